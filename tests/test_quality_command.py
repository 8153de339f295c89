"""`tuiwork quality` as a person uses it: table, document, plot, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from engine.demo import DEMO_MODEL
from engine.quality_corpus import shipped_texts
from tests.benchmarks import quality as benchmark
from tests.commandline import SMALL, Cli, Tiny, cli, command, own_home
from tuiwork.commands.quality import text_for
from tuiwork.time_left import TimeLeft, spoken

__all__ = ["cli", "own_home"]  # fixtures

QUICK = ("--tokens", "44", "--warm-up", "8", "--threads", "1", *SMALL)
DROPS = ("--set-of", "drop-cold-experts=0.5,0.75,1+drop-renorm=true,false")
TOPS = ("--set-of", "n-expert-used=2,1")


def measured(done: Any) -> dict[str, Any]:
    assert done.status == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


def test_the_document(cli: Cli, tiny_model: Tiny) -> None:
    found = measured(cli("quality", tiny_model(), "--json", *QUICK, *DROPS, *TOPS))
    names = [setting["name"] for setting in found["settings"]]
    assert names == [
        *("lossless", "drop 0.5", "drop 0.5 raw", "drop 0.75", "drop 0.75 raw"),
        *("drop 1", "drop 1 raw", "top-2", "top-1"),
    ]
    lossless, dropped = found["settings"][0], found["settings"][5]
    assert lossless["kl_mean"] == lossless["kl_hi"] == lossless["kl_max"] == 0
    assert lossless["top1"] == 1
    assert dropped["settings"] == {"routing.drop-cold-experts": 1.0}
    assert dropped["kl_lo"] < dropped["kl_mean"] < dropped["kl_hi"]
    assert dropped["ppl_lo"] < dropped["ppl"] < dropped["ppl_hi"]
    assert dropped["dropped"] > 0 and 0 < dropped["drop_rate"] < 1
    assert dropped["reads_saved"] == 1 - dropped["read_bytes"] / found["reference"]["read_bytes"]
    # Fewer than a hundred tokens have no 99th percentile.
    assert dropped["kl_p99"] is None
    assert dropped["cache"]["entry"] == "warm" and dropped["cache"]["budget_bytes"] == 2 * 2**20
    assert found["text"] == {
        "name": "prose",
        "windows": 1,
        "scored_tokens": 44 - 1 - 8,
        "warm_up_tokens": 8,
    }
    assert found["config"]["routing"]["drop-cold-experts"] == 0
    assert {curve["family"] for curve in found["curves"]} == {
        *("drop", "drop, not renormalised", "fewer experts")
    }
    assert [pair["fraction"] for pair in found["renormalising"]] == [0.5, 0.75, 1.0]
    assert all(pair["separated"] in (True, False) for pair in found["renormalising"])
    assert any(len(level["families"]) > 1 for level in found["at_equal_reads"])
    assert found["complete"] and found["unfinished"] == [] and found["failed"] == {}


def test_the_table_fits_a_terminal(cli: Cli, tiny_model: Tiny, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    done = cli("quality", tiny_model(), *QUICK, *DROPS, *TOPS, "--plot", plot)
    assert done.status == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    for words in ("drop 0.75 raw", "At equal reads saved", "Renormalising", "few: rare, large"):
        assert words in done.out
    assert "logits take 0." in done.err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_cold_start_and_a_full_cache_are_said(cli: Cli, tiny_model: Tiny) -> None:
    few = ("--tokens", "40", "--threads", "1", "--set-of", "drop-cold-experts=1", "--ctx", "512")
    cold = cli("quality", tiny_model(), *few, "--warm-up", "0", *SMALL)
    assert "the cache was empty at the start" in cold.out
    full = cli(
        *("quality", tiny_model(), *few, "--warm-up", "36"),
        *("--set", "cache-mb=64", "--set", "force-cache=true"),
    )
    assert full.status == 0
    assert "too few for intervals" in full.out
    assert "the cache holds all experts" in full.out
    assert "the cache holds all experts" not in cold.out


def test_a_lossy_profile_is_measured_itself(cli: Cli, tiny_model: Tiny) -> None:
    found = measured(
        cli(
            *("quality", tiny_model(), "--json", "--tokens", "40", "--warm-up", "8"),
            *("--threads", "1", *SMALL, "--drop-cold-experts", "0.6", *TOPS),
        )
    )
    names = [setting["name"] for setting in found["settings"]]
    assert names == ["lossless", "drop 0.6", "top-2", "top-1"]


def test_sets_from_a_file_and_a_text_of_ones_own(
    cli: Cli, tiny_model: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "sets.toml").write_text("[[sets]]\nn-expert-used = 3\n")
    text = tmp_path / "own\x1b[31m.txt"
    text.write_text("One two three, four! <|im_end|> " * 30)
    done = cli(
        *("quality", tiny_model(), "--json", *QUICK, "--text", text),
        *("--sets", tmp_path / "sets.toml"),
    )
    assert [setting["name"] for setting in measured(done)["settings"]] == ["lossless", "top-3"]
    assert "\x1b" not in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "no-such"], "no-such: there is no such file"),
        (["--set-of", "n-expert-used=two"], "'two' is a text"),
        (["--set-of", "n-expert-used=99"], "16 experts per layer"),
        (["--set-of", "cache-mb=2000"], "not lossy"),
        (["--set-of", "n-expert-used=1", "--sets", "x.toml"], "give one of them"),
        (["--sets", "/no/such.toml"], "/no/such.toml"),
        (["--tokens", "-1"], "Must be >= 0"),
        (["--warm-up", "9999"], "no room behind a prompt"),
        (["--plot", "x.gif"], ".png or .svg"),
        (["--plot", "/no/folder/x.png"], "there is no folder"),
        (["--scratch", "/proc/nothing"], "cannot be kept there"),
        (["--no-stream"], "this needs streaming"),
        (["--cache-mb", "0"], "needs the cache"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, cli: Cli, tiny_model: Tiny) -> None:
    # A later --cache-mb overrides the small one.
    done = cli("quality", tiny_model(), *QUICK, *arguments)
    assert done.status == 2, done.err
    assert message in done.err
    assert done.out == ""


def test_ctrl_c_shows_what_was_finished(tiny_model: Tiny, tmp_path: Path) -> None:
    arguments = ("--tokens", "400", "--warm-up", "8", "--threads", "1", *SMALL)
    process = subprocess.Popen(
        command("quality", tiny_model(), "--json", "--scratch", tmp_path, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "logits take" in process.stderr.readline()
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if out:
        found = json.loads(out)
        assert not found["complete"] and found["unfinished"]
        assert "settings" in found
    else:
        assert "nothing to show" in err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_model_is_measured_on_its_own_text(tiny_model: Tiny) -> None:
    expected = "demo" if "demo" in shipped_texts() else None
    assert text_for(None) == text_for(str(DEMO_MODEL)) == expected
    assert text_for(str(tiny_model())) is None


def test_the_documents_figures_are_replaced_between_their_marks() -> None:
    page = "before\n<!-- figures -->\nold\n<!-- /figures -->\nafter\n"
    expected = "before\n<!-- figures -->\nnew | 1\n<!-- /figures -->\nafter\n"
    assert benchmark.replaced(page, "new | 1") == expected
    assert benchmark.replaced(benchmark.DOCUMENT.read_text(), "new").count("new\n<!-- /") == 1


def test_the_documents_figures_are_those_of_the_document(cli: Cli, tiny_model: Tiny) -> None:
    found = measured(cli("quality", tiny_model(), "--json", *QUICK, *DROPS, *TOPS))
    text = benchmark.section(found)
    assert text.count("\n| drop ") == 6 and "| KL: fewer experts |" in text
    assert f"{found['settings'][1]['kl_mean']:.3g}" in text
    assert "None" not in text and "nan" not in text


def test_time_left_is_told_once_something_is_done() -> None:
    now, shown = [0.0], []
    bar = TimeLeft(lambda stage, fraction: shown.append((stage, fraction)), lambda: now[0])
    bar("one", 0.0)
    now[0] = 30.0
    bar("two", 0.25)
    bar("three", 1.0)
    bar("anew", 0.0)
    now[0] = 40.0
    bar("anew", 0.5)
    assert shown == [
        *(("one", 0.0), ("two, 2 min left", 0.25), ("three", 1.0)),
        *(("anew", 0.0), ("anew, 10 s left", 0.5)),
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (59, "59 s"), (61, "1 min"), (3600, "1 h"), (7800, "2 h 10 min")],
)
def test_durations_are_spoken(seconds: float, words: str) -> None:
    assert spoken(seconds) == words
