"""What the lossless gates share: run a model in some way, and compare tokens and logits exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine import native_library
from engine.config import RunConfig
from engine.diagnostics import Diagnostics
from engine.session import Session

N_TOKENS = 128
BATCH = 48
PROMPTS = (
    "hello world",
    "One two three, four! What is the capital of the moon? " * 2,
    "a prompt that is longer than one batch of tokens, so that prefill takes several. " * 4,
)
"""The last one has more than twice BATCH tokens in every tiny vocabulary."""

RESIDENT = {"stream.enabled": False}
EVICTING = {"stream.cache-mb": 1, "stream.force-cache": True}
"""A budget of 1 MiB: every tiny model has more experts than that, so it evicts all the time."""

INTERPRETED = native_library.library is None
"""Whether there is no compiled code to load tokens."""

NO_PREFETCH = {"stream.prefetch": "off"}
"""Counts of reads are then a function of the routings alone."""


@dataclass
class Run:
    """What a session gave: per answer its tokens, and the logits that each was chosen from."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[list[np.ndarray]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def open_session(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> Session:
    """A session with few threads (the machine is shared) and end tokens ignored."""
    base = {
        "model.path": str(model),
        "model.ctx": 1024,
        "model.threads": 1,
        "model.batch": BATCH,
        "run.ignore-eos": True,
    }
    config = RunConfig().replace(base | (settings or {}))
    return Session.open(config, options=Diagnostics(**options))


def run(
    model: Path,
    settings: dict[str, Any] | None = None,
    prompts: Sequence[str] = PROMPTS,
    *,
    n_tokens: int = N_TOKENS,
    between: Callable[[Session, int], None] | None = None,
    chat: bool = False,
    **options: Any,
) -> Run:
    """Answer each prompt; `between(session, n)` is called between tokens.

    Each prompt starts an empty context, except in a `chat`, where it is the next user message.
    """
    result = Run()
    messages: list[dict[str, str]] = []
    with open_session(model, settings, **options) as session:
        for prompt in prompts:
            logits: list[np.ndarray] = []

            def keep(_token: int, logits: list[np.ndarray] = logits) -> None:
                assert session.last_logits is not None
                logits.append(session.last_logits.copy())
                if between is not None:
                    between(session, len(logits))

            if chat:
                messages.append({"role": "user", "content": prompt})
                answer = session.generate(messages, n_predict=n_tokens, on_token=keep)
                messages.append({"role": "assistant", "content": answer.text})
            else:
                session.clear()
                answer = session.generate(prompt, n_predict=n_tokens, on_token=keep)
            result.tokens.append(answer.tokens)
            result.logits.append(logits)
        result.counts = counts_of(session)
        result.notes = session.notes
    return result


def counts_of(session: Session) -> dict[str, Any]:
    """What the engine counted so far; empty for a resident run."""
    counts = session.counts()
    if counts is None:
        return {}
    router = session._opened.router
    assert router is not None
    lanes_used = int((router.loader.lanes.counters.reads > 0).sum())
    guesses = router.loader.ahead.counters
    return {
        **asdict(counts),
        "lanes_used": lanes_used,
        "moved": router.store.moved,
        "apart": router.loader.n_apart,
        "read_ahead": int(guesses.read.sum()),
        "used_ahead": int(guesses.used.sum()),
        "late": int(guesses.late.sum()),
        "compiled": router.compiled.n_decodes,
    }


def assert_same(got: Run, expected: Run) -> None:
    """Equal tokens and bit-equal logits, for as many tokens as the gate promises."""
    assert [len(tokens) for tokens in got.tokens] == [len(tokens) for tokens in expected.tokens]
    assert all(len(tokens) >= N_TOKENS for tokens in got.tokens)
    for answer, (ours, theirs) in enumerate(zip(got.logits, expected.logits, strict=True)):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert np.isfinite(b).all(), f"answer {answer}, token {place}: reference is not finite"
            assert np.array_equal(a, b), f"answer {answer}: logits differ from token {place} on"
    assert got.tokens == expected.tokens
    # A model that says one thing for ever would pass with broken experts.
    assert all(len(set(tokens)) > 8 for tokens in expected.tokens)
