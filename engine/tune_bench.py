"""Measures the cells of a search: a stretch of text, decoded under given settings.

Every cell starts from the same state: an empty cache, an empty context, then a prompt that is not
counted. The cells of a round decode the same tokens. A setting that can change live does not reopen
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.config import RunConfig, get, is_live
from engine.quality_corpus import Window
from engine.quality_math import score
from engine.quality_reference import LogitsFile
from engine.session import Session
from engine.tune_search import Cell, Sample, is_lossy

LOSSLESS_NOW = {"routing.drop-cold-experts": 0.0}


class Stopped(Exception):
    """The person wants no more; what was learned is kept."""


class Bench:
    """An open model on which cells are measured."""

    def __init__(
        self,
        session: Session,
        config: RunConfig,
        windows: Sequence[Window],
        kept: LogitsFile | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        """`config` is settled: nothing automatic is left in it. `kept` only where KL is wanted."""
        self.session: Session | None = session
        self._config = config
        self._windows = list(windows)
        self._kept = kept
        self._is_stopped = is_stopped
        self._references: dict[int, object] = {}
        """With which compute the kept logits of a round were made."""

    def measure(self, cell: Cell) -> Sample:
        """Run a cell. Raises Stopped, and what decoding raises."""
        if cell.needs_kl and self._references.get(cell.round) != self._compute(cell.settings):
            self._run({**cell.settings, **LOSSLESS_NOW}, cell.round, needs_kl=False)
        return self._run(cell.settings, cell.round, needs_kl=cell.needs_kl)

    def close(self) -> None:
        """Free the model."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def _run(self, settings: dict[str, Any], number: int, *, needs_kl: bool) -> Sample:
        session = self._prepared(settings)
        keeps = self._kept is not None and not is_lossy(settings)
        window = self._windows[number]
        token_ms: list[float] = []
        kl: list[float] = []
        decoded = session.teacher_force(window.tokens, window.n_prompt)
        for target, logits in zip(window.targets, decoded, strict=False):
            row = number * len(self._windows[0].targets) + len(token_ms)
            token_ms.append(session.metrics.rows[-1].wall_ms)
            if self._kept is not None and keeps:
                self._kept.write(row, logits)
            elif self._kept is not None and needs_kl:
                kl.append(score(self._kept.read(row), logits, target).kl)
            if self._is_stopped():
                break
        # A cancelled decode ends the text early, too.
        if self._is_stopped():
            raise Stopped
        if keeps:
            self._references[number] = self._compute(settings)
        return Sample(token_ms, kl)

    def _compute(self, settings: dict[str, Any]) -> object:
        """What logits could depend on beside the text: how the work is split."""
        return settings.get("model.threads")

    def _prepared(self, settings: dict[str, Any]) -> Session:
        """The model under these settings, its cache empty."""
        config = self._config.replace(settings)
        session = self.session
        if session is not None:
            in_use = session.resolved
            if any(get(in_use, key) != settings[key] for key in settings if not is_live(key)):
                self.close()
                session = None
        if session is None:
            self.session = session = Session.open(config.to_measure(), progress=self._check)
            return session
        if config.stream.cache_mb:
            session.set_live({"stream.cache-mb": 0, **LOSSLESS_NOW})
        live = {key: value for key, value in settings.items() if is_live(key)}
        session.set_live({"stream.cache-mb": config.stream.cache_mb, **live})
        return session

    def _check(self, _stage: str, _fraction: float) -> None:
        if self._is_stopped():
            raise Stopped
