"""Reading ahead: what is guessed, what becomes of it, and that every record of it agrees."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest

from engine import router_matrix
from engine.demo import DEMO_MODEL
from engine.errors import ReadError
from engine.guessing import Guesser
from engine.lane_jobs import Read, ReadOutcome
from engine.lanes import Lanes
from engine.loading import ExpertLoader
from engine.mapping import ShardMapping
from engine.marks import Role
from engine.prefetch_trial import BLOCK, BLOCKS, FIRST_TOKENS, PrefetchTrial
from engine.residency import ExpertCache
from engine.router_matrix import RouterMatrix, RouterPlan, likeliest
from engine.routing import ExpertRouter
from engine.session import Session
from engine.token_core import TokenCore
from engine.traces import HIT, MISS, PREFETCHED, read_route_trace
from tests import gate
from tests.test_lossless import KINDS, all_kinds, slow

TinyModel = Callable[..., Path]
ON = {"stream.cache-mb": 2, "stream.force-cache": True, "stream.prefetch": "on"}
PROMPT = gate.PROMPTS[:1]


def share_right(
    monkeypatch: pytest.MonkeyPatch, session: Session, n_tokens: int
) -> dict[str, float]:
    """Of the experts that each way of guessing names for decoded tokens, those that come."""
    right = {"same layer": 0, "next layer": 0}
    guessed = {"same layer": 0, "next layer": 0}
    named: dict[int, set[int]] = {}
    load = ExpertRouter._stage

    def count(what: str, guess: set[int], routed: set[int]) -> None:
        right[what] += len(guess & routed)
        guessed[what] += len(guess)

    def watch(self: ExpertRouter, index: int, experts: Any, started: int) -> Any:
        guesser = self.guesser
        if guesser is not None and not self.prefill:
            routing, top_k = self._addresses[Role.ROUTING, index], self.top_k
            count("same layer", set(guesser.same_layer(index, routing, top_k)), set(experts))
            if index in named:
                count("next layer", named.pop(index), set(experts))
            guess = guesser.next_layer(index, routing, top_k)
            if guess is not None:
                named[guess.index] = set(guess.name())
        return load(self, index, experts, started)

    monkeypatch.setattr(ExpertRouter, "_stage", watch)
    session.generate("hello world", n_predict=n_tokens)
    return {what: right[what] / guessed[what] for what in right}


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_without_staleness_is_always_right(
    kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a layer's router on its own input names exactly what the model routes to."""
    with gate.open_session(tiny_model(kind), ON, interpreted=True) as session:
        right = share_right(monkeypatch, session, 60)
    assert right["same layer"] == 1.0
    assert 0.4 < right["next layer"] < 1.0


def test_a_trained_model_is_guessed_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with gate.open_session(DEMO_MODEL, ON, interpreted=True) as session:
        right = share_right(monkeypatch, session, 60)
    assert right["same layer"] == 1.0
    assert right["next layer"] > 0.75


def test_every_record_of_reading_ahead_agrees(tiny_model: TinyModel, tmp_path: Path) -> None:
    routes, reads = tmp_path / "routes.csv", tmp_path / "io.csv"
    ran = gate.run(
        tiny_model("tiny-mixed"), ON, PROMPT, poison=True, route_trace=routes, io_trace=reads
    )
    gate.assert_same(ran, gate.run(tiny_model("tiny-mixed"), gate.RESIDENT, PROMPT))
    trace = read_route_trace(routes)
    assert trace.residency is not None and trace.expert_bytes is not None
    prefetched = trace.residency == PREFETCHED
    assert 0 < prefetched.sum() <= ran.counts["used_ahead"] + ran.counts["late"]
    assert (trace.expert_bytes[trace.residency != MISS] == 0).all()
    assert int((trace.expert_bytes > 0).sum()) == ran.counts["misses"]
    assert int(np.isin(trace.residency, (HIT, PREFETCHED)).sum()) >= ran.counts["hits"]
    lines = reads.read_text().splitlines()
    header = next(line for line in lines if line.startswith("turn,")).split(",")
    rows = [dict(zip(header, line.split(","), strict=True)) for line in lines if line[0].isdigit()]
    ahead = [row for row in rows if row["speculative"] == "1"]
    assert len(rows) == ran.counts["reads"]
    assert 0 < len(ahead) <= 3 * ran.counts["read_ahead"]
    assert len(rows) - len(ahead) == 3 * ran.counts["misses"]


def test_a_disk_that_fails_ahead_of_time_is_told_only_if_it_matters(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed guess is forgotten; one that is needed after all fails the answer alone."""
    expected = gate.run(tiny_model("tiny"), gate.RESIDENT, PROMPT)
    read, failing = os.preadv, [False]

    def sometimes(*arguments: Any) -> int:
        if failing[0]:
            raise OSError(errno.EIO, "the disk is gone")
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", sometimes)
    with gate.open_session(tiny_model("tiny"), ON, poison=True, interpreted=True) as session:

        def fail(n: list[int]) -> Callable[[int], None]:
            def on_token(_token: int) -> None:
                n[0] += 1
                failing[0] = n[0] >= 10

            return on_token

        for _ in range(3):
            with pytest.raises(ReadError, match="the disk is gone"):
                session.generate(PROMPT[0], n_predict=200, on_token=fail([0]))
            failing[0] = False
            session.clear()
            assert (
                session.generate(PROMPT[0], n_predict=gate.N_TOKENS).tokens == (expected.tokens[0])
            )
            session.clear()


def test_a_failed_guess_is_never_taken_for_an_expert(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads ahead fail now and then: an answer is right, or it fails; never wrong."""
    expected = gate.run(tiny_model("tiny"), gate.RESIDENT, PROMPT).logits[0]
    read, place = Lanes._read, itertools.count()

    def fails_ahead(self: Lanes, work: Read, *rest: Any) -> ReadOutcome:
        outcome = read(self, work, *rest)
        fails = work.ahead and next(place) % 41 == 0
        return outcome._replace(error=OSError(errno.EIO, "it is gone") if fails else None)

    with gate.open_session(tiny_model("tiny"), ON, poison=True, interpreted=True) as session:
        monkeypatch.setattr(Lanes, "_read", fails_ahead)
        compared = 0
        for _ in range(60):
            session.clear()
            logits: list[np.ndarray] = []

            def keep(_token: int, logits: list[np.ndarray] = logits) -> None:
                assert session.last_logits is not None
                logits.append(session.last_logits.copy())

            with suppress(ReadError):
                session.generate(PROMPT[0], n_predict=60, on_token=keep)
            for ours, theirs in zip(logits, expected, strict=False):
                assert np.array_equal(ours, theirs)
                compared += 1
        assert gate.counts_of(session)["read_ahead"] > 60
        assert compared > 0


def test_what_failed_ahead_of_time_is_read_when_it_is_needed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read ahead fails before its layer is routed: none of them may pass for a hit."""
    read, take_back = Lanes._read, ExpertLoader.take_store_back

    def fails_ahead(
        self: Lanes, work: Read, mapping: ShardMapping, lane: int, fds: list[int]
    ) -> ReadOutcome:
        if work.ahead:
            return ReadOutcome(work, lane, 0, 0, OSError(errno.EIO, "the disk is gone"))
        return read(self, work, mapping, lane, fds)

    def when_all_is_done(self: ExpertLoader) -> None:
        take_back(self)
        for entry in self.ahead._under_way:
            self.lanes.wait(entry.jobs)

    monkeypatch.setattr(Lanes, "_read", fails_ahead)
    monkeypatch.setattr(ExpertLoader, "take_store_back", when_all_is_done)
    streamed = gate.run(tiny_model("tiny"), ON, PROMPT, poison=True, interpreted=True)
    gate.assert_same(streamed, gate.run(tiny_model("tiny"), gate.RESIDENT, PROMPT))
    assert streamed.counts["read_ahead"] > gate.N_TOKENS
    assert streamed.counts["used_ahead"] == streamed.counts["late"] == 0


def test_what_arrives_between_tokens_is_counted(tiny_model: TinyModel) -> None:
    with gate.open_session(tiny_model("tiny"), ON) as session:
        router = session._opened.router
        assert router is not None
        done = router.loader.lanes.counters.reads
        before = int(done.sum())

        def change(_token: int) -> None:
            session.set_live({"stream.overlap": "on"})  # waits for all that is under way

        session.generate(PROMPT[0], n_predict=60, on_token=change)
        router.loader.settle()
        session.generate(PROMPT[0], n_predict=2)
        router.loader.settle()
        told = int(done.sum()) - before - router.loader._between_steps.reads
        counts = session.counts()
    assert counts is not None and counts.reads == told > 0


def test_notes_follow_what_is_asked_and_possible(tiny_model: TinyModel) -> None:
    with gate.open_session(tiny_model("tiny"), ON | {"stream.io-threads": 1}) as session:
        for lanes, is_off in ((1, True), (4, False), (1, True)):
            session.set_live({"stream.io-threads": lanes})
            assert ("prefetch is off" in str(session.notes)) == is_off
            assert session.resolved.stream.prefetch == ("off" if is_off else "on")


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_poison_is_only_written_by_who_has_the_store(
    overlap: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere what was just given up may be on its way again."""
    poison, guests = ExpertCache._poison_slices, list[int]()

    with gate.open_session(
        tiny_model("tiny"), ON | {"stream.overlap": overlap}, poison=True, interpreted=True
    ) as session:
        router = session._opened.router
        assert router is not None
        ahead = router.loader.ahead

        def watched(self: ExpertCache, index: int, experts: Any) -> None:
            if ahead._guessing is not None and current_thread() is main_thread():
                guests.append(index)
            poison(self, index, experts)

        monkeypatch.setattr(ExpertCache, "_poison_slices", watched)
        session.generate(PROMPT[0], n_predict=60)
        assert session._opened.store.evictions > 60
    assert guests == []


def test_a_prompt_does_not_read_ahead_for_the_layer_that_computes_its_end_alone(
    tiny_model: TinyModel,
) -> None:
    with gate.open_session(tiny_model("tiny"), ON) as session:
        session.generate(gate.PROMPTS[2], n_predict=1)
        router = session._opened.router
        assert router is not None
        *others, last = router.loader.ahead.counters.read.tolist()
    assert sum(others) > 0 == last


LOSSY = ON | {"routing.drop-cold-experts": 0.75}


@pytest.mark.parametrize("kind", all_kinds("tiny"))
@pytest.mark.parametrize("cold_policy", ["drop", *slow(["substitute"])])
def test_what_is_dropped_does_not_depend_on_how_fast_reads_are(
    kind: str, cold_policy: str, tiny_model: TinyModel
) -> None:
    """It depends on what is in memory, so that must not depend on time, guesses included; nor on
    who loads it."""
    settings = LOSSY | {"stream.prefetch": "auto", "routing.cold-policy": cold_policy}
    prompts = gate.PROMPTS[1:]
    fast = gate.run(tiny_model(kind), settings, prompts, poison=True)
    rng = np.random.default_rng(5)
    read = os.preadv
    for lanes in (2, 5):
        with pytest.MonkeyPatch.context() as patch:

            def at_its_leisure(*arguments: Any) -> int:
                time.sleep(rng.choice([0, 0, 0, 0.0003, 0.003]))
                return read(*arguments)

            patch.setattr(os, "preadv", at_its_leisure)
            patch.setattr(TokenCore, "most_delay_us", 3000)
            changed = settings | {"stream.io-threads": lanes}
            in_python = lanes == 5
            moody = gate.run(tiny_model(kind), changed, prompts, poison=True, interpreted=in_python)
        gate.assert_same(moody, fast)
        for what in ("dropped", "substituted", "hits", "misses", "evictions", "read_ahead"):
            assert moody.counts[what] == fast.counts[what]
        # What it is about did happen: late reads, and wrong ones whose experts had to stay.
        assert moody.counts["late"] > 0
        assert (moody.counts["compiled"] > 0) == (not in_python and not gate.INTERPRETED)
    counts = fast.counts
    assert counts["dropped"] + counts["substituted"] > 0
    assert counts["read_ahead"] > counts["used_ahead"] > 0 and counts["evictions"] > 0


def test_prefetch_that_is_asked_for_uses_nothing_unloaded_under_dropping(
    tiny_model: TinyModel,
) -> None:
    """Unloaded slices hold NaN patterns; one that is used would reach the logits."""
    asked = gate.run(tiny_model("tiny"), LOSSY, PROMPT, poison=True)
    assert np.isfinite(np.stack(asked.logits[0])).all()
    assert asked.counts["used_ahead"] > 0 and asked.counts["dropped"] > 0


def test_prefetch_that_is_asked_for_reads_a_prompt_ahead_under_dropping_too(
    tiny_model: TinyModel,
) -> None:
    read_ahead = {}
    for prefetch in ("on", "auto"):
        settings = LOSSY | {"stream.prefetch": prefetch}
        with gate.open_session(tiny_model("tiny"), settings) as session:
            session.generate(gate.PROMPTS[2], n_predict=1)
            router = session._opened.router
            assert router is not None and router.prefetch == "on"
            read_ahead[prefetch] = int(router.loader.ahead.counters.read.sum())
    assert read_ahead["on"] > 0 == read_ahead["auto"]


def router(matrix: list[list[float]], activation: str = "", **parts: list[float]) -> RouterMatrix:
    plan = RouterPlan((0, 1), "matrix", activation=activation)
    arrays = {name: np.array(part, np.float32) for name, part in parts.items()}
    return RouterMatrix(
        plan,
        np.array(matrix, np.float32),
        arrays.get("bias"),
        arrays.get("selection_bias"),
    )


def test_scores_are_what_the_graph_ranks_by() -> None:
    x = np.array([[1.0, 2.0]], np.float32)
    assert router([[1, 0], [0, 1]]).scores(x).tolist() == [[1.0, 2.0]]
    assert router([[1, 0], [0, 1]], bias=[3, 0]).scores(x).tolist() == [[4.0, 2.0]]
    squashed = router([[1, 0], [0, 1]], "UNARY", selection_bias=[1, 0]).scores(x)
    assert squashed[0] == pytest.approx([1 + 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-2))])
    shares = router([[1, 0], [0, 1]], "SOFT_MAX", selection_bias=[0, 0]).scores(x)
    assert shares.sum() == pytest.approx(1)


def test_one_tokens_scores_are_nearly_the_same_and_quick() -> None:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((60, 256)).astype(np.float32)
    bias = rng.standard_normal(60).astype(np.float32)
    known = router(matrix.tolist(), bias=bias.tolist(), selection_bias=bias.tolist())
    assert known.is_quick
    for _ in range(3):
        x = rng.standard_normal((1, 256)).astype(np.float32)
        scores, exact = known.scores_of_one(x.ctypes.data), known.scores(x)
        assert scores.shape == exact.shape
        assert scores[0] == pytest.approx(exact[0], abs=1)
        assert np.ptp(scores) > 40


def test_a_router_without_whole_blocks_or_too_large_is_not_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not router([[1.0] * 33]).is_quick
    assert router([[1.0] * 64]).is_quick
    monkeypatch.setattr(router_matrix, "QUICK_BYTES", 255)
    assert not router([[1.0] * 64]).is_quick


def test_what_would_be_dropped_is_not_named() -> None:
    ranked = np.array([3.0, 2.0, 0.0, -1.0], np.float32)
    weights = np.exp(ranked) / np.exp(ranked).sum()
    known = router([[1, 0], [0, 1]])
    assert [known.n_above(share, ranked) for share in (0.0, weights[2], 0.2, 0.9)] == [4, 3, 2, 0]
    squashed = router([[1, 0], [0, 1]], "UNARY")
    assert squashed.n_above(0.25, ranked) == 2


def test_the_likeliest_come_first() -> None:
    assert likeliest(np.array([[0.1, 3, 2, -1]], np.float32), 2) == [1, 2]
    batch = np.array([[9, 8, 0, 0], [0, 8, 9, 0], [0, 9, 0, 8]], np.float32)
    assert likeliest(batch, 2)[0] == 1
    assert sorted(likeliest(batch, 2)) == [0, 1, 2, 3]


def test_a_router_that_is_not_understood_is_not_guessed() -> None:
    known = router([[1, 0], [0, 1]])
    assert Guesser([known, known, None, known, known]).n_guessable == 2
    assert Guesser([None]).n_guessable == Guesser([]).n_guessable == 0


def test_only_what_may_change_a_tokens_time_begins_the_trial_anew(tiny_model: TinyModel) -> None:
    with gate.open_session(tiny_model("tiny"), gate.EVICTING) as session:
        router = session._opened.router
        assert router is not None and router.trial is not None
        for changes, anew in (
            ({"sampling.temp": 0.5}, False),
            ({"stream.io-threads": 2}, True),
            ({"routing.drop-cold-experts": 0.5}, True),
        ):
            before = router.trial
            session.set_live(changes)
            assert (router.trial is not before) == anew


def timed(trial: PrefetchTrial, cost: Callable[[bool], float], tokens: int) -> None:
    for _ in range(tokens):
        trial.token(cost(trial.prefetch))


@pytest.mark.parametrize("pays", [True, False])
def test_a_trial_keeps_what_was_faster(pays: bool) -> None:
    trial = PrefetchTrial()
    assert trial.prefetch
    timed(trial, lambda on: 90.0 if on == pays else 100.0, FIRST_TOKENS + BLOCK * BLOCKS)
    assert trial.prefetch == pays
    timed(trial, lambda _on: 95.0, 200)
    assert trial.prefetch == pays


def test_a_trial_has_both_in_turn_and_is_not_fooled_by_drift() -> None:
    """A cache that warms up makes every later token faster, whatever the mode."""
    trial, seen, token = PrefetchTrial(), [], [0]

    def cost(on: bool) -> float:
        token[0] += 1
        seen.append(on)
        return 200.0 - token[0] - (5 if on else 0)

    timed(trial, cost, FIRST_TOKENS + BLOCK * BLOCKS)
    in_trial = seen[FIRST_TOKENS:]
    assert in_trial == ([True] * BLOCK + [False] * BLOCK) * (BLOCKS // 2)


def test_a_trial_is_repeated() -> None:
    trial = PrefetchTrial()
    timed(trial, lambda on: 100.0 if on else 90.0, FIRST_TOKENS + BLOCK * BLOCKS)
    assert not trial.prefetch
    timed(trial, lambda on: 80.0 if on else 90.0, 600)
    assert trial.prefetch
