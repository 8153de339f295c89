"""Whether reading ahead pays here and now, found by doing it and not doing it in turn. Pure.

Where processor and disk have room, prefetch hides reads behind compute. On a machine whose compute
threads take every core, or whose disk is busy all the time, it may cost what it saves. So decoded
tokens are timed in blocks, with and without it in turn, and what was faster is kept for a while.
"""

from __future__ import annotations

from statistics import median

FIRST_TOKENS = 16
"""Tokens with prefetch before the first trial: a cold cache misses most, and is no measure."""

BLOCK = 8
"""Tokens in a block. The first of each is not counted: it meets the other mode's cache."""

BLOCKS = 4
"""Blocks of a trial, with and without in turn."""

TOKENS_BETWEEN_TRIALS = 480

WORTH_IT = 0.99
"""Below this part of the time without it, prefetch is kept: it costs reads and processor time."""


class PrefetchTrial:
    """Decides for each decoded token; ask `prefetch`, then tell how long the token took."""

    def __init__(self) -> None:
        self.prefetch = True
        self._rest = FIRST_TOKENS
        """Tokens until the next trial begins."""
        self._place = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def token(self, wall_ms: float) -> None:
        """The token that was just decoded took so long, with `prefetch` as it is."""
        if self._rest:
            self._rest -= 1
            return
        if self._place % BLOCK:
            self._times[self.prefetch].append(wall_ms)
        self._place += 1
        if self._place == BLOCK * BLOCKS:
            with_it, without = median(self._times[True]), median(self._times[False])
            self.prefetch = with_it < WORTH_IT * without
            self.begin_again(TOKENS_BETWEEN_TRIALS)
        elif self._place % BLOCK == 0:
            self.prefetch = not self.prefetch

    def begin_again(self, after_tokens: int = FIRST_TOKENS) -> None:
        """What was found may no longer hold: try again, `after_tokens` from now."""
        self._rest, self._place = after_tokens, 0
        self._times = {True: [], False: []}
