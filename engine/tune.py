"""`tuiwork tune`: settings for one model on one machine, found by measuring.

The cache is sized from memory, the disk is measured with several numbers of readers, and then the
search (`tune_search`) tries settings against each other on a text, keeping only what is separated.
Whatever was decided before an interruption is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import machine
from engine.bandwidth import LaneRate, fewest_good_lanes, measure
from engine.config import (
    SETTINGS,
    SMALLEST_CACHE_MIB,
    RunConfig,
    get,
    require_valid,
)
from engine.errors import InputError, ReadError
from engine.model_file import ModelFile
from engine.positioned import direct_reads_work
from engine.quality import lossless, settled
from engine.quality_corpus import Corpus, Window, begin_token, text_tokens
from engine.quality_reference import LogitsFile
from engine.quality_sets import configured
from engine.results import ModelInfo
from engine.session import Session
from engine.sizing import default_threads
from engine.telemetry import MIB
from engine.tune_bench import Bench, Stopped
from engine.tune_knobs import (
    LANES,
    OVERLAP,
    PREFETCH,
    THREADS,
    Place,
    knobs,
    start_settings,
)
from engine.tune_search import Cell, Rules, Search

Progress = Callable[[str, float], None]

MEASURED = (LANES, OVERLAP, PREFETCH, THREADS)
"""Settings of every profile that tuning writes."""

FEWEST_TOKENS = 16
"""Below this a cell says more about luck than about its settings."""


@dataclass(frozen=True)
class TunePlan:
    """How to measure."""

    corpus: Corpus
    rules: Rules = field(default_factory=Rules)
    n_tokens: int = 48
    """Tokens that are measured in a cell."""
    warm_up: int = 32
    """Tokens of a cell before them: the cache fills, nothing is counted."""
    scratch: Path = Path("/tmp")


@dataclass
class TuneResult:
    """What is known; complete only if nothing interrupted it."""

    model: ModelInfo
    config: RunConfig
    """Settled, with the settings that the search began with."""
    plan: TunePlan
    place: Place
    cache_reason: str
    lane_rates: list[LaneRate]
    search: Search
    load: float
    """Processes that ran or waited when it began, averaged over a minute."""
    complete: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def tuned(self) -> RunConfig:
        """The best settings that are known."""
        return self.config.replace(self.search.settings)

    @property
    def changes(self) -> dict[str, Any]:
        """What a profile must hold: every setting of the model's run that is no default."""
        tuned = self.tuned
        if not 0 < int(tuned.stream.cache_mb) < SMALLEST_CACHE_MIB:
            tuned = tuned.replace({"stream.force-cache": False})
        found = {
            key: get(tuned, key)
            for key, spec in SETTINGS.items()
            if key.partition(".")[0] in ("model", "stream", "routing")
            and get(tuned, key) != spec.default
        }
        # What was measured is said even where it is the default: defaults may change.
        return found | {key: get(tuned, key) for key in self.search.start if key in MEASURED}


class TuneRun:
    """One tuning. `cancel` may be called from any thread or a signal handler."""

    def __init__(
        self,
        config: RunConfig,
        plan: TunePlan,
        *,
        progress: Progress | None = None,
        learned: Callable[[TuneResult], None] | None = None,
    ) -> None:
        """`learned` is called after every decision. Raises InputError for what cannot be tuned."""
        self._plan = plan
        self._progress = progress or (lambda _stage, _fraction: None)
        self._learned = learned or (lambda _result: None)
        self._stopped = False
        self._bench: Bench | None = None
        self._config = lossless(config)
        self._notes: list[str] = []
        if configured(config) is not None:
            self._notes.append(
                "the lossy settings that were given were left out: what may be lossy is decided by "
                "the quality bound alone"
            )
        self._file = ModelFile.open(config.model.path)
        if plan.n_tokens < FEWEST_TOKENS:
            raise InputError(
                f"{plan.n_tokens} tokens per measurement are too few to tell anything: at least "
                f"{FEWEST_TOKENS} (--tokens)"
            )
        if plan.rules.max_kl is not None:
            require_valid(self._config.replace({"routing.drop-cold-experts": 1.0}))

    def cancel(self) -> None:
        """Stop within a token; `run` then returns what is known."""
        self._stopped = True
        session = self._bench.session if self._bench is not None else None
        if session is not None:
            session.cancel()

    def run(self) -> TuneResult | None:
        """Tune; None if it was stopped before anything was known.

        Raises what `Session.open` raises, InputError for a text that is too short or a folder
        without room.
        """
        try:
            rates = self._lane_rates()
            session = self._open()
        except Stopped:
            return None
        with session:
            result = self._begin(session, rates)
            windows = self._windows(session)
            kept = self._reference(len(windows), session)
            try:
                self._learned(result)
                self._bench = Bench(session, result.config, windows, kept, lambda: self._stopped)
                self._search(result)
            except Stopped:
                pass
            finally:
                if self._bench is not None:
                    self._bench.close()
                if kept is not None:
                    kept.close()
        return result

    def _lane_rates(self) -> list[LaneRate]:
        """What the disk gives to several readers; empty where it cannot be measured."""
        file = self._file
        path = max(zip(file.sizes, file.paths, strict=True))[1]
        slices = [
            entry.nbytes // file.experts.n_expert
            for entry in file.tensors.values()
            if file.experts.n_expert and len(entry.shape) == 3
        ]
        direct = self._config.stream.o_direct and direct_reads_work(path)
        try:
            return measure(path, max(slices, default=MIB), o_direct=direct, progress=self._progress)
        except ReadError:
            return []

    def _open(self) -> Session:
        return Session.open(self._config.to_measure(), progress=self._check)

    def _check(self, stage: str, fraction: float) -> None:
        if self._stopped:
            raise Stopped
        self._progress(stage, fraction)

    def _begin(self, session: Session, rates: list[LaneRate]) -> TuneResult:
        reason = session.cache_reason
        overlap = session.resolved.stream.overlap
        config = settled(session)
        experts = self._file.experts.expert_bytes
        notes = [*self._notes, *session.notes]
        can_overlap = _can(OVERLAP, session, self._config)
        if not can_overlap and self._config.stream.overlap != "off":
            notes.append("overlap was not tried: reads and compute do not overlap here")
        place = Place(
            cores=default_threads(),
            cpus=machine.usable_cpus(),
            good_lanes=fewest_good_lanes(rates) if rates else None,
            overlap=overlap,
            can_overlap=can_overlap,
            everything_fits=int(config.stream.cache_mb) * MIB >= experts,
            can_prefetch=_can(PREFETCH, session, self._config),
        )
        lossy = self._plan.rules.max_kl is not None
        start = start_settings(self._config, place)
        search = Search(start, knobs(self._config, start, place, lossy=lossy), self._plan.rules)
        return TuneResult(
            session.model_info,
            config.replace(start),
            self._plan,
            place,
            reason,
            rates,
            search,
            os.getloadavg()[0],
            notes=notes,
        )

    def _windows(self, session: Session) -> list[Window]:
        """A stretch of the text for each round, all of one length."""
        plan, bos = self._plan, begin_token(session.vocabulary)
        head = [] if bos is None else [bos]
        each = plan.warm_up + plan.n_tokens + 1 - len(head)
        wanted = each * plan.rules.max_rounds
        tokens = text_tokens(session.vocabulary, plan.corpus.text, wanted)
        if len(tokens) < wanted:
            raise InputError(
                f"{plan.corpus.name}: has {len(tokens)} tokens, and {plan.rules.max_rounds} rounds "
                f"of {plan.warm_up} + {plan.n_tokens} need {wanted}: give a longer text (--text), "
                "or measure fewer (--tokens, --warm-up)"
            )
        if session.model_info.ctx < each:
            raise InputError(
                f"a context of {session.model_info.ctx} tokens does not hold a measurement of "
                f"{each}: raise model.ctx (--ctx), or measure fewer (--tokens, --warm-up)"
            )
        stretches = [[*head, *tokens[n * each : (n + 1) * each]] for n in range(wanted // each)]
        return [Window(s[:-1], plan.warm_up, s[plan.warm_up + 1 :]) for s in stretches]

    def _reference(self, n_windows: int, session: Session) -> LogitsFile | None:
        if self._plan.rules.max_kl is None:
            return None
        rows = n_windows * self._plan.n_tokens
        return LogitsFile(rows, session.model_info.n_vocab, self._plan.scratch)

    def _search(self, result: TuneResult) -> None:
        search, bench = result.search, self._bench
        assert bench is not None
        steps = search.run()
        try:
            cell = next(steps)
            while True:
                left = search.most_cells_left
                self._progress(_stage(cell, search), search.cells_done / (search.cells_done + left))
                known = len(search.trials)
                cell = steps.send(bench.measure(cell))
                if len(search.trials) > known:
                    self._learned(result)
        except StopIteration:
            result.complete = True
        self._learned(result)


def _can(key: str, session: Session, config: RunConfig) -> bool:
    """Whether something works here when it is asked for: the engine says so itself."""
    session.set_live({key: "on"})
    found = bool(get(session.resolved, key) == "on")
    session.set_live({key: get(config, key)})
    return found


def _stage(cell: Cell, search: Search) -> str:
    """What is tried now, in a few words."""
    if cell.settings == search.start != search.settings:
        return f"the settings it began with, round {cell.round + 1}"
    words = "baseline"
    # What changes along comes before what is tried: settings are in the order of the search.
    for key, value in cell.settings.items():
        if value != search.settings.get(key):
            words = f"{key.partition('.')[2]} {value}"
    return f"{words}, round {cell.round + 1}"
