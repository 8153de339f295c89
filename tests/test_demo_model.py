"""The demo model: what it knows, what it shows, and that neither gets worse unnoticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from engine.demo import DEMO_MODEL
from engine.demo.evaluation import Reading, distance, open_session, read_domains
from engine.demo.exam import is_sensible, read_exam, take
from engine.demo.held_out import held_out_texts
from engine.model_file import ModelFile
from engine.profile import load_profile
from engine.session import Session

TOKENS = 400
"""About so many held-out tokens are read for each domain."""
PERPLEXITY = {
    "geography": 1.405,
    "chemistry": 1.231,
    "arithmetic": 2.399,
    "dictionary": 35.319,
    "python": 264.066,
    "prose": 63.709,
}
"""As `python -m engine.demo.evaluation --tokens 400` tells."""
TOLERANCE = 0.03
"""Of each. Other processors round otherwise; what is worth noticing is larger."""
SENSIBLE = 28
LARGEST_MB = 40
LOAD_SECONDS = 1.0
UNEVEN = 8.0
QUESTIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Define week."}],
]


@cache
def readings() -> list[Reading]:
    return read_domains(DEMO_MODEL, held_out_texts(), TOKENS)


def answers(settings: dict[str, Any] | None = None) -> list[list[int]]:
    """The tokens of the answers to QUESTIONS."""
    with open_session(DEMO_MODEL, settings) as session:
        return list(_each(session))


def _each(session: Session) -> Iterator[list[int]]:
    for messages in QUESTIONS:
        session.clear()
        yield session.generate(messages, n_predict=40).tokens


def demo_settings() -> dict[str, Any]:
    """The demo profile's streaming settings."""
    config = load_profile("demo")
    return {"stream.enabled": True} | config


class TestFile:
    def test_it_is_what_real_models_are(self) -> None:
        experts = ModelFile.open(DEMO_MODEL).experts
        assert ModelFile.open(DEMO_MODEL).arch == "qwen3moe"
        assert experts.n_layer >= 8
        assert experts.n_expert >= 32
        assert experts.n_expert_used >= 4

    def test_it_is_small(self) -> None:
        assert DEMO_MODEL.stat().st_size < LARGEST_MB * 10**6

    def test_it_opens_at_once(self) -> None:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            with open_session(DEMO_MODEL, {"stream.enabled": True}):
                times.append(time.perf_counter() - start)
        assert min(times) < LOAD_SECONDS


class TestQuality:
    @pytest.mark.parametrize("domain", PERPLEXITY)
    def test_held_out_text_surprises_it_no_more_than_it_did(self, domain: str) -> None:
        (reading,) = (r for r in readings() if r.domain == domain)
        assert reading.perplexity == pytest.approx(PERPLEXITY[domain], rel=TOLERANCE)

    def test_it_passes_its_exam(self) -> None:
        questions = read_exam()
        assert len(questions) == 40
        marked = take(DEMO_MODEL, questions)
        assert sum(mark.sensible for mark in marked) >= SENSIBLE

    def test_the_exam_tells_good_answers_from_bad(self) -> None:
        for question in read_exam():
            assert is_sensible(question, question.reference)
            assert not is_sensible(question, "")
            assert not is_sensible(question, question.reference * 3)


class TestExperts:
    def test_none_is_dead_and_none_does_it_all(self) -> None:
        loads = sum(reading.loads for reading in readings())
        assert not isinstance(loads, int)
        assert (loads > 0).all()
        assert (loads.max(1) <= UNEVEN * loads.mean(1)).all()

    def test_domains_have_experts_of_their_own(self) -> None:
        by_domain = {reading.domain: reading.loads for reading in readings()}
        assert distance(by_domain["arithmetic"], by_domain["prose"]).mean() > 0.1


class TestRunning:
    def test_the_same_question_gets_the_same_answer(self) -> None:
        assert answers() == answers()

    def test_streaming_changes_no_answer(self) -> None:
        assert answers(demo_settings()) == answers()

    def test_under_the_demo_profile_it_misses_and_evicts(self) -> None:
        with open_session(DEMO_MODEL, demo_settings()) as session:
            list(_each(session))
            counts = session.counts()
        assert counts is not None
        assert counts.hits > 0
        assert counts.misses > 0
        assert counts.evictions > 0
        assert counts.dropped == 0

    def test_with_the_workbench_s_lossy_setting_it_drops(self) -> None:
        lossy = demo_settings() | {"routing.drop-cold-experts": 0.75}
        with open_session(DEMO_MODEL, lossy) as session:
            list(_each(session))
            counts = session.counts()
        assert counts is not None
        assert counts.dropped > 0
