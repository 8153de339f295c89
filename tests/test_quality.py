"""Quality with the real engine: its logits are those of plain decoding, and identities hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import RunConfig
from engine.errors import InputError, ReadError, TuiworkError
from engine.quality import QualityPlan, QualityResult, QualityRun
from engine.quality_corpus import Corpus, read_corpus
from engine.quality_figures import summarise
from engine.quality_reference import LogitsFile
from engine.quality_sets import parse_sets
from engine.session import Session
from tests import gate
from tests.gate import EVICTING, RESIDENT

TinyModel = Callable[..., Path]
CACHE = {"stream.cache-mb": 2, "stream.force-cache": True}
SETS = ["drop-cold-experts=1+drop-renorm=true,false", "n-expert-used=2"]
SUBSTITUTE = "cold-policy=substitute+drop-cold-experts=1"


def measure(
    model: Path, scratch: Path, sets: list[str] | None = None, **more: Any
) -> QualityResult | None:
    plan = {"n_tokens": 130, "warm_up": 16, "scratch": scratch} | more.pop("plan", {})
    settings = {"model.path": str(model), "model.ctx": 512, "model.threads": 1} | CACHE
    config = RunConfig().replace(settings | more.pop("settings", {}))
    variants = parse_sets(SETS if sets is None else sets)
    return QualityRun(config, QualityPlan(read_corpus(), variants, **plan), **more).run()


@pytest.fixture(scope="module")
def measured(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> QualityResult:
    found = measure(tiny_model(), tmp_path_factory.mktemp("scratch"), [*SETS, SUBSTITUTE])
    assert found is not None
    return found


def forced_logits(session: Session, tokens: list[int], n_prompt: int = 0) -> list[np.ndarray]:
    return [logits.copy() for logits in session.teacher_force(tokens, n_prompt)]


@pytest.mark.parametrize("kind", ["tiny", "tiny-fused", "tiny-sigmoid", "tiny-hybrid"])
def test_teacher_forced_logits_are_those_of_plain_decoding(
    kind: str, tiny_model: TinyModel
) -> None:
    """Bit for bit: an answer of llama.cpp alone, and its tokens forced through the stream."""
    with gate.open_session(tiny_model(kind), RESIDENT | {"model.batch": 1}) as session:
        seen: list[np.ndarray] = []

        def keep(_token: int) -> None:
            assert session.last_logits is not None
            seen.append(session.last_logits.copy())

        prompt = session.tokenize("hello world")
        answer = session.generate("hello world", n_predict=64, on_token=keep).tokens
    text = [*prompt, *answer]
    with gate.open_session(tiny_model(kind), EVICTING, poison=True) as session:
        for n_prompt in (0, len(prompt) - 1):
            forced = forced_logits(session, text[:-1], n_prompt)[-64:]
            assert all(np.array_equal(a, b) for a, b in zip(forced, seen, strict=True))
        assert gate.counts_of(session)["evictions"] > 0
        # One token at a time and nothing else in the context: again, it is the same.
        assert np.array_equal(forced_logits(session, text[:-1])[-1], seen[-1])
        assert len(session.metrics.rows) == 2 * (len(text) - 1) + 64


def test_the_lossless_run_repeats_itself_exactly(measured: QualityResult) -> None:
    again = measured.runs[0]
    assert again.variant.name == "lossless"
    assert (again.series["kl"] == 0.0).all()
    assert (again.series["nll"] == measured.reference.series["nll"]).all()
    assert (again.series["read_bytes"] == measured.reference.series["read_bytes"]).all()
    figures = summarise(again, measured.reference)
    assert (figures.kl_mean.value, figures.kl_mean.high, figures.kl_max) == (0.0, 0.0, 0.0)
    assert figures.kl_p99.value == 0.0
    assert (figures.top1.value, figures.ppl_ratio.value, figures.reads_saved.value) == (1, 1, 0)


def test_every_setting_is_run_once_over_all_tokens(measured: QualityResult) -> None:
    names = [run.variant.name for run in measured.runs]
    assert names == ["lossless", "drop 1", "drop 1 raw", "top-2", "substitute 1"]
    assert {run.n_tokens for run in measured.runs} == {130 - 1 - 16}
    assert measured.unfinished == [] and measured.failed == {}


def test_what_a_setting_did_is_counted(measured: QualityResult) -> None:
    runs = {run.variant.name: run for run in measured.runs}
    base = measured.reference
    for name in ("drop 1", "drop 1 raw", "substitute 1"):
        figures = summarise(runs[name], base)
        assert figures.kl_mean.value is not None and figures.kl_mean.value > 0
        assert figures.reads_saved.value is not None and 0 < figures.reads_saved.value < 1
    assert runs["drop 1"].total("dropped") > 0 == runs["drop 1"].total("substituted")
    assert runs["substitute 1"].total("substituted") > 0 == runs["substitute 1"].total("dropped")
    assert base.total("dropped") == base.total("substituted") == 0
    assert runs["top-2"].total("routed") == base.total("routed") / 2
    assert runs["top-2"].top_k == 2 and base.top_k == 4
    # Each routed expert was dropped, or looked up once: hit or read.
    for run in measured.runs:
        looked_up = run.total("hits") + run.total("misses")
        assert looked_up == run.total("routed") - run.total("dropped")


def test_the_cache_state_is_part_of_a_run(
    measured: QualityResult, tiny_model: TinyModel, tmp_path: Path
) -> None:
    warm = measured.reference.cache
    assert warm.budget_bytes == 2 * 2**20
    assert (warm.entry, warm.warm_up_tokens) == ("warm", 16)
    assert 0 < warm.entry_bytes <= warm.budget_bytes
    # Nothing is dropped in the prompt, so every setting of one top-k enters with the same cache.
    entries = {run.cache.entry_bytes for run in measured.runs if run.top_k == 4}
    assert entries == {warm.entry_bytes}
    cold = measure(tiny_model(), tmp_path, ["n-expert-used=2"], plan={"warm_up": 0, "n_tokens": 40})
    assert cold is not None
    assert (cold.reference.cache.entry, cold.reference.cache.entry_bytes) == ("cold", 0)
    assert cold.reference.series["hits"][0] == 0


def test_figures_are_those_of_the_logits(tiny_model: TinyModel, tmp_path: Path) -> None:
    """KL and likelihood again, the naive way, from two sessions' own logits."""
    result = measure(tiny_model(), tmp_path, ["n-expert-used=2"], plan={"n_tokens": 60})
    assert result is not None
    settings = CACHE | {"model.ctx": 512}
    with gate.open_session(tiny_model(), settings) as session:
        vocabulary = session.vocabulary
        text = result.corpus.text
        assert not vocabulary.adds_bos
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)[:60]
        p = np.stack(forced_logits(session, tokens[:-1], 16)).astype(float)
    with gate.open_session(tiny_model(), settings | {"routing.n-expert-used": 2}) as session:
        q = np.stack(forced_logits(session, tokens[:-1], 16)).astype(float)
    p, q = (np.exp(x - x.max(axis=1, keepdims=True)) for x in (p, q))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    kl = (p * np.log(p / q)).sum(axis=1)
    assert result.runs[1].series["kl"] == pytest.approx(kl, rel=1e-6)
    nll = -np.log(q[np.arange(len(q)), tokens[17:]])
    assert result.runs[1].series["nll"] == pytest.approx(nll, rel=1e-9)
    figures = summarise(result.runs[1], result.reference)
    assert figures.ppl.value == pytest.approx(math.exp(nll.mean()))
    assert figures.top1.value == pytest.approx((p.argmax(axis=1) == q.argmax(axis=1)).mean())


def test_a_text_longer_than_the_context_is_cut_into_windows(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    settings = {"model.ctx": 256}
    result = measure(
        tiny_model(), tmp_path, ["n-expert-used=1"], settings=settings, plan={"n_tokens": 350}
    )
    assert result is not None
    assert result.model.ctx == 256
    assert result.n_windows == 2
    # Each window reads a prompt of 16 tokens first; its last token is only a target.
    assert result.n_scored == (257 - 17) + (350 - 257 - 17)
    assert {run.n_tokens for run in result.runs} == {result.n_scored}
    assert (result.runs[0].series["kl"] == 0.0).all()


def test_stopping_keeps_what_was_finished(tiny_model: TinyModel, tmp_path: Path) -> None:
    plan = QualityPlan(read_corpus(), parse_sets(SETS), 60, 8, tmp_path)
    config = RunConfig().replace({"model.path": str(tiny_model()), "model.threads": 1} | CACHE)

    def stop_at(stage: str, run_at: str) -> None:
        if stage.startswith(run_at):
            run.cancel()

    run = QualityRun(config, plan, progress=lambda stage, _: stop_at(stage, "drop 1 raw"))
    result = run.run()
    assert result is not None
    assert [done.variant.name for done in result.runs] == ["lossless", "drop 1"]
    assert result.unfinished == ["drop 1 raw", "top-2"]
    run = QualityRun(config, plan, progress=lambda stage, _: stop_at(stage, "lossless (ref"))
    assert run.run() is None
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_fails_costs_no_other(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Session.open

    def failing(config: RunConfig, **options: Any) -> Session:
        if config.routing.drop_cold_experts and config.routing.drop_renorm:
            raise ReadError("the disk is gone")
        return opened(config, **options)

    monkeypatch.setattr(Session, "open", failing)
    result = measure(tiny_model(), tmp_path, plan={"n_tokens": 40})
    assert result is not None
    assert result.failed == {"drop 1": "the disk is gone"}
    assert [run.variant.name for run in result.runs] == ["lossless", "drop 1 raw", "top-2"]
    assert result.unfinished == []


def test_a_lossless_run_that_does_not_repeat_itself_is_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LogitsFile.read
    monkeypatch.setattr(LogitsFile, "read", lambda file, row: read(file, row) * 1.0001)
    with pytest.raises(TuiworkError, match="did not repeat itself"):
        measure(tiny_model(), tmp_path, plan={"n_tokens": 40})


def test_an_automatic_cache_is_settled_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    settings = {"stream.cache-mb": "auto", "stream.cache-ceil-mb": 2}
    result = measure(
        tiny_model(), tmp_path, ["n-expert-used=2"], settings=settings, plan={"n_tokens": 40}
    )
    assert result is not None
    assert result.config.stream.cache_mb == 2
    assert {run.cache.budget_bytes for run in result.runs} == {2 * 2**20}


def test_what_cannot_be_measured_is_refused_before_any_work(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="this needs streaming"):
        measure(model, tmp_path, settings=RESIDENT)
    with pytest.raises(InputError, match="dropping cold experts needs the cache"):
        measure(model, tmp_path, settings={"stream.cache-mb": 0})
    with pytest.raises(InputError, match="16 experts per layer"):
        measure(model, tmp_path, ["n-expert-used=99"])
    with pytest.raises(InputError, match="too few behind a prompt"):
        plan = QualityPlan(Corpus("short", "word"), scratch=tmp_path)
        settings = {"model.path": str(model), "model.threads": 1} | CACHE
        QualityRun(RunConfig().replace(settings), plan).run()


def test_logits_are_kept_to_the_bit_and_leave_nothing(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((3, 100)).astype(np.float32)
    with LogitsFile(3, 100, tmp_path / "new") as kept:
        for number in (2, 0, 1):
            kept.write(number, rows[number])
        assert all(np.array_equal(kept.read(number), rows[number]) for number in range(3))
        assert list((tmp_path / "new").iterdir()) == []


def test_logits_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"need \d+ MiB and \d+ MiB are free"):
        LogitsFile(10**6, 10**6, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be kept there"):
        LogitsFile(1, 1, tmp_path / "file")
