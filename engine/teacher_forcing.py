"""Teacher forcing: a given text decoded one token at a time, as an answer would be.

The decode regime matters: a batch routes, reads and rounds differently from one token, and lossy
rules act while decoding. So every token is a decode of its own; the first ones of a text may count
as its prompt, which is read under the rules of prefill (nothing is dropped unless
`drop-in-prefill` says so), and only those behind them are decoded like an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np
import numpy.typing as npt

from engine.recorder import Recorder
from engine.timeline import Timeline

Logits = npt.NDArray[np.float32]


def teacher_forced(
    timeline: Timeline,
    recorder: Recorder,
    tokens: Sequence[int],
    n_prompt: int,
    on_prompt: Callable[[], None] | None = None,
) -> Iterator[Logits]:
    """Empty the context and decode `tokens` one by one; yield the logits behind each decoded one.

    The first `n_prompt` are the prompt and yield nothing; then `on_prompt` is called. Logits are
    float32 of shape (n_vocab,), valid until the next step. The metrics get a row for each token
    that yields. Ends early when cancelled. Raises what a decode raises.
    """
    timeline.cancelled = False
    timeline.clear()
    recorder.begin_turn(n_prompt)
    try:
        started = perf_counter()
        for token in tokens[:n_prompt]:
            recorder.begin_decode(len(timeline.tokens), 1, prefill=True)
            timeline.decode([token], want_logits=False)
            if timeline.cancelled:
                return
        if on_prompt is not None:
            on_prompt()
        recorder.prefilled(0, perf_counter() - started)
        for token in tokens[n_prompt:]:
            recorder.begin_decode(len(timeline.tokens), 1, prefill=False)
            timeline.decode([token], want_logits=True)
            if timeline.cancelled:
                return
            recorder.end_token(token, len(tokens) - n_prompt)
            assert timeline.logits is not None
            yield timeline.logits
    finally:
        recorder.end_turn()
