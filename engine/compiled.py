"""Which decodes compiled code loads: one token each, from a cache, while nobody watches reads.

All else is Python's: prompts, whose time goes to reading; traces, which want to know of every read
and routing; and a warm start while it lasts.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.counters import MAX_LANES, RoutingCounters
from engine.errors import TuiworkError
from engine.guessing import Guesser
from engine.loading import ExpertLoader
from engine.residency import ExpertCache
from engine.token_core import TokenCore, TokenSettings


class CompiledLoading:
    """Makes the compiled loader when it is wanted, and keeps it aside while Python loads."""

    def __init__(self, loader: ExpertLoader, counters: RoutingCounters) -> None:
        self._loader = loader
        self._counters = counters
        self._core: TokenCore | None = None
        self.on_refusal: Callable[[str], None] | None = None
        """Told once if the system refuses what compiled code needs."""
        self.allowed = True
        """Whether it may be used at all."""
        self._refused_lanes = MAX_LANES + 1
        """Not asked for again, nor are more: the system has refused to have so many twice."""
        self.n_decodes = 0
        """Tokens that it loaded."""

    def begin_decode(self, guesser: Guesser | None, wanted: TokenSettings | None) -> None:
        """A decode comes next; None: Python must load it."""
        loader = self._loader
        core = None
        if wanted is not None and self.allowed and not (loader.warming and loader.warming.is_busy):
            core = self._core_for(guesser)
        if core is None:
            loader.take_over()
            return
        if loader.core is not core:
            loader.hand_over(core)
        assert wanted is not None
        core.prepare(wanted)
        self.n_decodes += 1

    def would_load(self, guesser: Guesser | None) -> bool:
        """Whether compiled code loads tokens, while nobody watches."""
        return self.allowed and TokenCore.is_possible(self._loader.store, guesser)

    def close(self) -> None:
        """Stop the compiled loader's lanes, once nothing is under way."""
        self._loader.take_over()
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def _core_for(self, guesser: Guesser | None) -> TokenCore | None:
        loader = self._loader
        core, store = self._core, loader.store
        if core is not None and core.is_for(store, loader.lanes, guesser):
            return core
        self.close()
        is_refused = loader.lanes.count >= self._refused_lanes
        if is_refused or not TokenCore.is_possible(store, guesser):
            return None
        assert isinstance(store, ExpertCache)
        try:
            self._core = TokenCore(
                store, loader.lanes, loader.ahead.counters, self._counters, guesser
            )
        except TuiworkError as error:
            # Python needs no further lanes.
            self._refused_lanes = loader.lanes.count
            if self.on_refusal is not None:
                self.on_refusal(f"experts are loaded in Python, some of the speed is lost: {error}")
        return self._core
