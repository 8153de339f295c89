"""`tuiwork tune` with the real engine on tiny models, and as a person uses it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from engine import tune as tuning
from engine import tune_knobs
from engine.bandwidth import LaneRate
from engine.config import RunConfig
from engine.errors import InputError
from engine.model_file import ModelFile
from engine.profile import load_profile, resolve
from engine.quality_corpus import Corpus, Window, read_corpus
from engine.quality_math import kl_divergence, log_probabilities
from engine.session import Session
from engine.tune import TunePlan, TuneResult, TuneRun
from engine.tune_bench import Bench
from engine.tune_search import Cell, Rules, Sample
from tests.commandline import SMALL, Cli, Tiny, cli, command, own_home
from tuiwork import tune_profile

__all__ = ["cli", "own_home"]  # fixtures

QUICK = ("--tokens", "16", "--warm-up", "4", "--rounds", "3", "--threads", "1", *SMALL)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the disk takes seconds, and a long ladder more of them."""
    rates = [LaneRate(1, 2**20, 1.0), LaneRate(2, 2**21, 1.0)]
    monkeypatch.setattr(tuning, "measure", lambda *_a, **_k: rates)
    monkeypatch.setattr(tune_knobs, "DROP_FRACTIONS", (0.5, 1.0))


def config(model: Path, **more: Any) -> RunConfig:
    settings = {"model.path": str(model), "model.ctx": 512, "model.threads": 1}
    return RunConfig().replace(settings | {"stream.cache-mb": 2, "stream.force-cache": True} | more)


def plan(tmp_path: Path, **rules: Any) -> TunePlan:
    return TunePlan(read_corpus(), Rules(max_rounds=3, **rules), 16, 4, tmp_path)


def scripted(monkeypatch: pytest.MonkeyPatch, ms: Any) -> list[Cell]:
    """Let cells really run, but take as long as `ms(settings)` says."""
    really, cells = Bench.measure, []

    def measure(bench: Bench, cell: Cell) -> Sample:
        cells.append(cell)
        found = really(bench, cell)
        assert len(found.token_ms) == 16 and min(found.token_ms) > 0
        token_ms = [ms(cell.settings) * (1 + 0.001 * n) for n in range(16)]
        return Sample(token_ms, found.kl)

    monkeypatch.setattr(Bench, "measure", measure)
    return cells


def test_it_measures_and_decides(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    cells = scripted(monkeypatch, lambda s: 10 / (1 + s["routing.drop-cold-experts"]))
    run = TuneRun(
        config(tiny_model()),
        plan(tmp_path, max_kl=100.0),
        learned=lambda result: told.append(len(result.search.trials)),
    )
    result = run.run()
    assert result is not None and result.complete
    assert result.search.start["stream.io-threads"] == 2  # what the disk said
    assert result.tuned.routing.drop_cold_experts == 1.0
    assert all(trial.held == "held" for trial in result.search.trials if "drop" in trial.key)
    assert all(trial.kl.value for trial in result.search.trials if "drop" in trial.key)
    # Told after every decision, and as soon as the cache and the disk were known.
    assert told[0] == 0 and told[-1] == len(result.search.trials)
    assert sorted(set(told)) == list(range(told[-1] + 1))
    assert result.search.cells_done == len(cells)


def test_the_divergence_of_a_cell_is_that_of_its_tokens(tiny_model: Tiny, tmp_path: Path) -> None:
    """A lossy cell beside the lossless one, and the same by hand from a session of its own."""
    found: list[tuple[Cell, Sample]] = []

    def noting(bench: Bench, cell: Cell, really: Any = Bench.measure) -> Sample:
        sample: Sample = really(bench, cell)
        found.append((cell, sample))
        return sample

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "measure", noting)
        settings = {"stream.io-threads": 3, "stream.cache-mb": 1}
        result = TuneRun(config(tiny_model(), **settings), plan(tmp_path, max_kl=1e-9)).run()
    assert result is not None
    cell, sample = next((c, s) for c, s in found if c.needs_kl)
    assert len(sample.kl) == 16 and max(sample.kl) > 0
    assert result.search.trials[-1].held == "broken"
    with Session.open(config(tiny_model(), **settings)) as session:
        tokens = session.vocabulary.tokenize(
            read_corpus().text, add_special=False, parse_special=False
        )
        piece = tokens[21 * cell.round : 21 * cell.round + 20]
        exact = [log_probabilities(row.copy()) for row in session.teacher_force(piece, 4)]
    with Session.open(config(tiny_model(), **settings | cell.settings)) as session:
        lossy = [log_probabilities(row.copy()) for row in session.teacher_force(piece, 4)]
    assert sample.kl == [kl_divergence(p, q) for p, q in zip(exact, lossy, strict=True)]


def test_every_cell_starts_from_an_empty_cache(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the reads of a lossless cell depend on its tokens alone, whatever ran before."""
    reads: dict[int, set[int]] = {}
    really = Bench.measure

    def counting(bench: Bench, cell: Cell) -> Sample:
        found = really(bench, cell)
        assert bench.session is not None
        rows = bench.session.metrics.rows[-16:]
        alone = cell.settings["stream.prefetch"] == "off"
        if alone and not cell.settings["routing.drop-cold-experts"]:
            reads.setdefault(cell.round, set()).add(sum(row.read_bytes for row in rows))
        return found

    monkeypatch.setattr(Bench, "measure", counting)
    result = TuneRun(config(tiny_model()), plan(tmp_path, max_kl=1.0)).run()
    assert result is not None and result.complete
    assert all(len(amounts) == 1 for amounts in reads.values())
    assert min(min(amounts) for amounts in reads.values()) > 0


def test_what_cannot_change_live_opens_the_model_again(tiny_model: Tiny) -> None:
    settled = config(tiny_model())
    window = Window(list(range(300, 320)), 4, list(range(304, 320)))
    bench = Bench(Session.open(settled), settled, [window], None, lambda: False)
    try:
        for direct in (True, False, False):
            before = bench.session
            bench.measure(Cell({"stream.o-direct": direct, "stream.io-threads": 2}, 0))
            assert bench.session is not None
            assert bench.session.resolved.stream.io_threads == 2
            assert bench.session.config.stream.o_direct == direct
            assert (bench.session is before) == (direct == settled.stream.o_direct)
            settled = settled.replace({"stream.o-direct": direct})
    finally:
        bench.close()


def test_stopping_keeps_what_is_known(tiny_model: Tiny, tmp_path: Path) -> None:
    def stop(result: TuneResult) -> None:
        if result.search.trials:
            run.cancel()

    run = TuneRun(config(tiny_model()), plan(tmp_path), learned=stop)
    result = run.run()
    assert result is not None and not result.complete
    assert len(result.search.trials) == 1
    assert "UNFINISHED" in tune_profile.profile_text(result)
    run = TuneRun(config(tiny_model()), plan(tmp_path))
    run.cancel()
    assert run.run() is None


def test_what_cannot_be_tuned_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    short = TunePlan(Corpus("short", "a word or two"), scratch=tmp_path)
    with pytest.raises(InputError, match=r"short: has \d+ tokens, and 5 rounds"):
        TuneRun(config(tiny_model()), short).run()
    with pytest.raises(InputError, match="needs the cache"):
        TuneRun(config(tiny_model(), **{"stream.cache-mb": 0}), plan(tmp_path, max_kl=1.0))
    with pytest.raises(InputError, match="does not hold a measurement of"):
        long = TunePlan(Corpus("long", "word " * 4000), n_tokens=600, scratch=tmp_path)
        TuneRun(config(tiny_model()), long).run()


def test_a_cache_that_holds_everything_is_said(tiny_model: Tiny, tmp_path: Path) -> None:
    changes = {"stream.cache-mb": 64}
    result = TuneRun(config(tiny_model(), **changes), plan(tmp_path, max_kl=0.1)).run()
    assert result is not None and result.complete
    assert result.search.trials == [] and result.place.everything_fits


def test_the_cache_is_sized_from_memory_and_the_profile_says_how(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    result = TuneRun(config(tiny_model(), **{"stream.cache-mb": "auto"}), plan(tmp_path)).run()
    assert result is not None and result.place.everything_fits
    assert "# all experts fit; not searched" in tune_profile.profile_text(result)
    experts = sum(ModelFile.open(tiny_model()).experts.entry_bytes.values()) * 16
    assert (result.changes["stream.cache-mb"] - 1) * 2**20 < experts
    assert experts <= result.changes["stream.cache-mb"] * 2**20
    small = {"stream.cache-mb": "auto", "stream.cache-ceil-mb": 2}
    limited = TuneRun(config(tiny_model(), **small), plan(tmp_path)).run()
    assert limited is not None and limited.changes["stream.cache-mb"] == 2
    assert "cache-ceil-mb; not searched" in tune_profile.profile_text(limited)


def test_the_profile_holds_settings_and_evidence(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, lambda s: 10 / (1 + s["routing.drop-cold-experts"]))
    result = TuneRun(config(tiny_model()), plan(tmp_path, max_kl=100.0)).run()
    assert result is not None
    path = tmp_path / "new" / "tuned.toml"
    tune_profile.write(result, path)
    text = path.read_text()
    values = load_profile(path)
    assert values["routing.drop-cold-experts"] == 1.0
    assert values["stream.io-threads"] == 2 and values["model.threads"] == 1
    assert values["description"].startswith("LOSSY: tuned for tiny.gguf")
    for words in (
        "# LOSSY: leaves experts out",
        "# drop-cold-experts 0 -> 0.5: ",
        "bound held",
        "# Against the start: ",
        "# the disk with so many readers: 1: 1 MiB/s, 2: 2 MiB/s",
        "Bound: mean KL at most 100 nats",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100
    # It is a profile like any other.
    assert resolve([path]).routing.drop_cold_experts == 1.0


def test_the_profile_says_why_prefetch_is_auto_where_experts_are_dropped(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ms(settings: dict[str, Any]) -> float:
        ahead = 1.0 if settings["stream.prefetch"] == "off" else 1.5
        return float(10 / (1 + settings["routing.drop-cold-experts"]) / ahead)

    scripted(monkeypatch, ms)
    result = TuneRun(config(tiny_model()), plan(tmp_path, max_kl=100.0)).run()
    assert result is not None
    path = tmp_path / "tuned.toml"
    tune_profile.write(result, path)
    assert load_profile(path)["stream.prefetch"] == "auto"
    text = path.read_text()
    assert "# prefetch off -> on: " in text
    assert "# auto where experts are dropped: on for every token" in text


def test_a_hostile_model_name_stays_in_its_comment(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tmp_path / "x\n[stream]\x1b[31m\u2028evil = 1.gguf"
    model.write_bytes(tiny_model().read_bytes())
    result = TuneRun(config(model, **{"stream.cache-mb": 64}), plan(tmp_path)).run()
    assert result is not None
    path = tmp_path / "tuned.toml"
    tune_profile.write(result, path)
    assert load_profile(path)["model.path"] == str(model)
    assert "\x1b" not in path.read_text()


class TestCommand:
    def test_a_profile_is_written(self, cli: Cli, tiny_model: Tiny, tmp_path: Path) -> None:
        path = tmp_path / "tuned.toml"
        done = cli("tune", tiny_model(), "--out", path, *QUICK)
        assert done.status == 0, done.err
        assert max(map(len, done.out.splitlines())) <= 80
        assert "io-threads" in done.out and str(path) in done.out.replace("\n    ", "")
        assert "LOSSY" not in path.read_text()
        assert load_profile(path)["stream.cache-mb"] == 2
        refused = cli("tune", tiny_model(), "--out", path, *QUICK)
        assert refused.status == 2 and "is there already; --force replaces it" in refused.err

    def test_the_document(self, cli: Cli, tiny_model: Tiny, tmp_path: Path) -> None:
        path = tmp_path / "tuned.toml"
        done = cli(
            *("tune", tiny_model(), "--out", path, "--json", "--max-kl", "50", *QUICK),
            *("--io-threads", "3"),
        )
        assert done.status == 0, done.err
        found = json.loads(done.out)
        assert found["complete"] and found["max_kl"] == 50
        assert found["settings"]["stream.io-threads"] == 3
        assert {trial["key"] for trial in found["trials"]} >= {"routing.drop-cold-experts"}
        assert all(trial["kl_mean"] >= 0 for trial in found["trials"] if trial["quality"])
        assert "drop-cold-experts 0 -> 0.5: " in done.err

    def test_without_a_name_it_goes_among_the_users_profiles(
        self, cli: Cli, tiny_model: Tiny
    ) -> None:
        done = cli("tune", tiny_model(), "--cache-mb", "64", *QUICK, "--set", "cache-mb=64")
        assert done.status == 0, done.err
        listed = cli("profiles")
        assert "tiny-tuned" in listed.out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--max-kl", "0"], "must be a number above 0"),
            (["--max-kl", "nan"], "must be a number above 0"),
            (["--max-kl", "-1"], "must be a number above 0"),
            (["--max-kl", "0.1", "--lossless"], "give one of them"),
            (["--tokens", "3"], "--tokens"),
            (["--rounds", "2"], "--rounds"),
            (["--out", "/"], "is a directory"),
            (["--text", "no-such"], "there is no such file"),
            (["--no-stream"], "needs streaming"),
        ],
    )
    def test_mistakes_are_named(
        self, arguments: list[str], message: str, cli: Cli, tiny_model: Tiny
    ) -> None:
        done = cli("tune", tiny_model(), *QUICK, *arguments)
        assert done.status == 2, done.err
        assert message in done.err
        assert done.out == ""

    def test_ctrl_c_leaves_a_profile(self, tiny_model: Tiny, tmp_path: Path) -> None:
        path = tmp_path / "tuned.toml"
        arguments = ("--warm-up", "4", "--threads", "1", *SMALL, "--max-kl", "90")
        process = subprocess.Popen(
            command("tune", tiny_model(), "--out", path, "--tokens", "200", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(400):
            if path.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert "UNFINISHED" in out
        assert load_profile(path)["description"].endswith("(UNFINISHED)")
