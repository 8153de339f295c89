"""The command line: what it prints where, its exit status, and what it says to bad arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commandline import Cli, Tiny, cli, own_home

__all__ = ["cli", "own_home"]  # fixtures


class TestStart:
    """Starting is quick, and help and mistakes need nothing native."""

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["run", "--help"],
            ["--version"],
            ["run", "--bogus"],
            ["run", "-p", ""],
            ["run", "-p", "x", "--cache-mb", "800"],
            ["run", "-p", "x", "--profile", "nope"],
            ["profiles", "list"],
            ["profiles", "check", "default"],
            ["synth", "--list"],
            ["rnu"],
        ],
    )
    def test_native_code_is_not_loaded(self, arguments: list[str]) -> None:
        code = (
            "import sys; from tuiwork.cli import run_command; "
            f"run_command({arguments!r}); "
            "heavy = {'llama_cpp', 'numpy', 'textual', 'tomlkit'} & set(sys.modules); "
            "sys.exit(f'loaded {heavy}' if heavy else 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()

    def test_help_names_every_command(self, cli: Cli) -> None:
        done = cli("--help")
        assert done.status == 0
        for name in ("run", "inspect", "doctor", "synth", "replay", "profiles"):
            assert name in done.out

    def test_help_shows_what_a_setting_allows(self, cli: Cli) -> None:
        words = " ".join(re.sub(r"[│\s]+", " ", cli("run", "--help").out).split())
        assert "--threads VALUE" in words
        assert "from 1 to 512, or auto" in words
        assert "Lossy: these change the answer" in words

    def test_version(self, cli: Cli) -> None:
        assert cli("--version").out.startswith("tuiwork 0.")


class TestBadArguments:
    """Exit status 2, a message on stderr, nothing on stdout."""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["run", "--bogus"], "--bogus"),
            (["run", "m.gguf", "extra", "-p", "x"], "extra"),
            (["run", "-p"], "requires an argument"),
            (["run"], "give a prompt"),
            (["run", "-p", ""], "the prompt is empty"),
            (["run", "-p", " \n"], "the prompt is empty"),
            (["run", "-p", "a\0b"], "NUL"),
            (["run", "-p", "x", "--cache-mb", "800"], "--cache-mb: 800 MiB is refused"),
            (["run", "-p", "x", "--cache-mb", "-1"], "--cache-mb: -1 is out of range"),
            (["run", "-p", "x", "--cache-mb", "lots"], "--cache-mb: 'lots' is not allowed"),
            (["run", "-p", "x", "--drop-cold-experts", "1.5"], "from 0 to 1"),
            (["run", "-p", "x", "--threads", "0"], "--threads: 0 is out of range"),
            (["run", "-p", "x", "--threads", "10000"], "from 1 to 512, or auto"),
            (["run", "-p", "x", "--io-threads", "0"], "from 1 to 64"),
            (["run", "-p", "x", "--temp", "-1"], "--temp: -1.0 is out of range"),
            (["run", "-p", "x", "-n", "0"], "--n-predict: 0 is out of range"),
            (["run", "-p", "x", "-n", "ten"], "--n-predict: 'ten' is a text"),
            (["run", "-p", "x", "--set", "cach-mb=0"], "did you mean stream.cache-mb"),
            (["run", "-p", "x", "--set", "cache-mb"], "key=value"),
            (["run", "-p", "x", "--profile", "laptop"], "no profile 'laptop'"),
            (["run", "no-such.gguf", "-p", "x"], "no-such.gguf: there is no such file"),
            (["run", "a\0b.gguf", "-p", "x"], "NUL"),
            (["run", "-p", "x", "--csv", "/no/such/dir/x.csv"], "/no/such/dir"),
            (["rnu"], "did you mean `tuiwork run`"),
            (["no-such.gguf"], "no-such.gguf: there is no such file"),
            (["inspect", "no-such.gguf"], "there is no such file"),
            (["doctor", "no-such.gguf"], "there is no such file"),
            (["replay", "no-such.csv"], "no-such.csv"),
            (["synth"], "give the file to write"),
            (["synth", "x.gguf", "--shape", "tinny"], "tiny"),
            (["synth", "/no/such/dir/x.gguf"], "/no/such/dir"),
            (["profiles", "show", "nope"], "no profile 'nope'"),
            (["profiles", "check"], "at least one"),
        ],
    )
    def test_it_is_refused_with_a_reason(
        self, cli: Cli, arguments: list[str], said: str, tmp_path: Path
    ) -> None:
        done = cli(*arguments)
        assert done.status == 2
        assert said in done.err
        assert done.out == ""
        assert not list(tmp_path.rglob("*.gguf"))

    def test_a_bad_profile_names_file_line_and_key(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        for text, line, said in (
            ("[stream]\ncache_mb = 4000", 2, "did you mean stream.cache-mb"),
            ('[stream]\nio-threads = "4"', 2, "'4' is a text"),
            ("[stream]\n\nio-threads = ", 3, "not valid TOML"),
            ("[stream]\ncache-mb = 800", 2, "1500"),
        ):
            path.write_text(text)
            done = cli("run", "-p", "x", "--profile", path)
            assert done.status == 2
            assert f"{path}:{line}: " in done.err
            assert said in done.err

    def test_what_an_argument_holds_cannot_act_on_the_terminal(self, cli: Cli) -> None:
        done = cli("run", "\x1b[2J[red]x[/red].gguf", "-p", "x")
        assert done.status == 2
        assert "\x1b" not in done.err
        assert "[red]x[/red]" in done.err


class TestOtherCommands:
    """inspect, doctor, synth and profiles."""

    def test_inspect(self, cli: Cli, tiny_model: Tiny) -> None:
        done = cli("inspect", tiny_model("tiny-mixed"))
        assert done.status == 0
        assert " to " in next(line for line in done.out.splitlines() if "one expert" in line)
        facts = json.loads(cli("inspect", tiny_model("tiny-mixed"), "--json").out)
        per_layer = facts["expert_bytes_by_layer"].values()
        assert facts["token_demand_bytes"] == sum(per_layer) * facts["n_expert_used"]
        assert facts["layer_demand_bytes"] == max(per_layer) * facts["n_expert_used"]
        assert facts["regime"] == "all"

    def test_inspect_without_a_model_tells_of_the_demo_model(self, cli: Cli) -> None:
        facts = json.loads(cli("inspect", "--json").out)
        assert (facts["name"], facts["n_expert_used"]) == ("tuiwork demo", 4)

    def test_inspect_tells_a_dense_model(self, cli: Cli, tiny_model: Tiny) -> None:
        done = cli("inspect", tiny_model("tiny-dense"))
        assert done.status == 0
        assert "no experts" in done.out

    def test_doctor(self, cli: Cli, tiny_model: Tiny) -> None:
        facts = json.loads(cli("doctor", tiny_model(), "--json").out)
        assert facts["llama"]["error"] is None
        assert [lane["lanes"] for lane in facts["model"]["lanes"]] == [1, 2, 4, 8]
        assert cli("doctor").status == 0

    def test_synth(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "x.gguf"
        done = cli("synth", path, "--shape", "tiny,n-layer=2", "--seed", "3")
        assert done.status == 0
        assert done.out.strip() == str(path)
        again = cli("synth", path)
        assert again.status == 2
        assert "exists" in again.err
        assert cli("synth", path, "--force").status == 0
        split = cli("synth", tmp_path / "y.gguf", "--shards", "2")
        names = [Path(line).name for line in split.out.splitlines()]
        assert names == ["y-00001-of-00002.gguf", "y-00002-of-00002.gguf"]

    def test_profiles(self, cli: Cli, tmp_path: Path) -> None:
        listed = cli("profiles")
        assert listed.status == 0
        assert "small-memory" in listed.out
        shown = cli("profiles", "show", "app")
        assert re.search(r"^\* drop-cold-experts +0.75", shown.out, re.MULTILINE)
        document = json.loads(cli("profiles", "show", "app", "--json").out)
        assert document["settings"]["routing.drop-cold-experts"] == 0.75
        bad = tmp_path / "bad.toml"
        bad.write_text("x = 1")
        checked = cli("profiles", "check", "app", bad)
        assert checked.status == 2
        assert "app: good" in checked.out
        assert f"{bad}:1" in checked.err
