"""What lossy settings cost: each one's run over a text, beside the lossless run over the same text.

Teacher-forced, one token at a time. The model is opened afresh for every setting, so that each
starts from the same state: an empty cache, then the same prompt. The lossless run comes first and
its logits are kept; then it is run again, as a setting like any other, and must repeat itself bit
for bit, because otherwise no difference of another setting would mean anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from engine.config import AUTO, RunConfig, is_live, require_valid
from engine.errors import InputError, TuiworkError
from engine.model_file import ModelFile
from engine.quality_corpus import Corpus, Window, begin_token, cut_windows, text_tokens
from engine.quality_figures import CacheState, SettingRun, TokenLog
from engine.quality_math import TokenScore, score
from engine.quality_reference import LogitsFile
from engine.quality_sets import LOSSLESS_ROUTING, REFERENCE, Variant, check_fit, default_variants
from engine.results import ModelInfo
from engine.session import Session
from engine.telemetry import MIB, TokenRow

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class QualityPlan:
    """What to measure, on which text."""

    corpus: Corpus
    variants: list[Variant] = field(default_factory=list)
    """Empty: the default set for the model's top-k."""
    n_tokens: int = 1024
    """Most tokens of the text; 0: all."""
    warm_up: int = 64
    """Tokens at the start of each window that are its prompt: read, not scored."""
    scratch: Path = Path("/tmp")
    """Where the lossless run's logits are kept meanwhile."""


@dataclass
class QualityResult:
    """What was measured; after an interruption, what was finished."""

    model: ModelInfo
    config: RunConfig
    """As every run used it, but for the routing."""
    corpus: Corpus
    warm_up: int
    n_windows: int
    n_scored: int
    reference: SettingRun
    planned: list[Variant]
    runs: list[SettingRun] = field(default_factory=list)
    """The lossless run's repetition first, then the planned settings in their order."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a setting could not be measured, by its name."""
    notes: list[str] = field(default_factory=list)

    @property
    def unfinished(self) -> list[str]:
        """Names of the settings that were not reached or not finished."""
        done = {run.variant.name for run in self.runs} | set(self.failed)
        return [v.name for v in (REFERENCE, *self.planned) if v.name not in done]


class _Stopped(Exception):
    """The person wants no more; what was finished is kept."""


class QualityRun:
    """Measures a plan. `cancel` may be called from any thread or a signal handler."""

    def __init__(
        self,
        config: RunConfig,
        plan: QualityPlan,
        progress: Progress | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Check everything that can be checked without loading. Raises InputError, ModelError.

        `note` is told in a line what will be done, before it is.
        """
        self._plan = plan
        self._note = note or (lambda _line: None)
        self._progress = progress or (lambda _stage, _fraction: None)
        self._stopped = False
        self._session: Session | None = None
        self._config = lossless(config)
        layout = ModelFile.open(config.model.path).experts
        if not layout.n_expert:
            raise InputError(f"{config.model.path}: has no experts, so no setting to compare")
        top_k = layout.n_expert_used
        self.variants = check_fit(plan.variants or default_variants(top_k), top_k, layout.n_expert)
        for variant in self.variants:
            require_valid(self._config.replace(variant.settings))

    def cancel(self) -> None:
        """Stop within a token; `run` then returns what was finished."""
        self._stopped = True
        session = self._session
        if session is not None:
            session.cancel()

    def run(self) -> QualityResult | None:
        """Measure; None if it was stopped before the lossless run was done.

        A setting that fails is recorded and the others go on. Raises what `Session.open` raises
        for the lossless run, InputError for a text or folder that does not do, and TuiworkError if
        the lossless run does not repeat itself.
        """
        self._progress("opening the model", 0.0)
        try:
            session = self._open(self._config)
        except _Stopped:
            return None
        with session:
            self._config = settled(session)
            windows = self._windows(session)
            rows = sum(len(window.targets) for window in windows)
            pace = _Pace(len(self.variants) + 2, rows, self._progress)
            with LogitsFile(rows, session.model_info.n_vocab, self._plan.scratch) as kept:
                self._note(
                    f"{len(self.variants) + 2} runs over {rows} scored tokens; the lossless run's "
                    f"logits take {kept.n_bytes / MIB:.1f} MiB in {self._plan.scratch} meanwhile"
                )
                result = self._reference(session, windows, kept, pace)
                session.close()
                if result is not None:
                    self._compare(result, windows, kept, pace)
        return result

    def _reference(
        self, session: Session, windows: list[Window], kept: LogitsFile, pace: _Pace
    ) -> QualityResult | None:
        """The lossless run, its logits kept; None if it was stopped."""
        try:
            pace.begin(f"{REFERENCE.name} (reference)")
            reference = self._measure(session, REFERENCE, windows, kept, pace, keep=True)
        except _Stopped:
            return None
        return QualityResult(
            session.model_info,
            self._config,
            self._plan.corpus,
            self._plan.warm_up,
            len(windows),
            reference.n_tokens,
            reference,
            self.variants,
            notes=list(session.notes),
        )

    def _compare(
        self, result: QualityResult, windows: list[Window], kept: LogitsFile, pace: _Pace
    ) -> None:
        for variant in (REFERENCE, *self.variants):
            try:
                pace.begin(variant.name)
                with self._open(self._config.replace(variant.settings)) as session:
                    run = self._measure(session, variant, windows, kept, pace, keep=False)
            except _Stopped:
                return
            except TuiworkError as error:
                if variant is REFERENCE:
                    raise
                result.failed[variant.name] = str(error)
                continue
            if variant is REFERENCE:
                _require_repetition(run)
            result.runs.append(run)

    def _open(self, config: RunConfig) -> Session:
        def check(_stage: str, _fraction: float) -> None:
            if self._stopped:
                raise _Stopped

        return Session.open(config.to_measure(), progress=check)

    def _windows(self, session: Session) -> list[Window]:
        vocabulary, plan = session.vocabulary, self._plan
        tokens = text_tokens(vocabulary, plan.corpus.text, plan.n_tokens)
        bos = begin_token(vocabulary)
        return cut_windows(tokens, session.model_info.ctx, plan.warm_up, bos)

    def _measure(
        self,
        session: Session,
        variant: Variant,
        windows: list[Window],
        kept: LogitsFile,
        pace: _Pace,
        *,
        keep: bool,
    ) -> SettingRun:
        started = perf_counter()
        log, entry = TokenLog(), _Entry(session)
        self._session = session
        try:
            for window in windows:
                self._window(session, window, kept, log, entry, pace, keep)
        finally:
            self._session = None
        counts = session.counts()
        assert counts is not None
        cache = CacheState(
            int(session.resolved.stream.cache_mb) * MIB,
            self._plan.warm_up,
            entry.resident_bytes,
            counts.resident_bytes,
        )
        return SettingRun(
            variant, log.series(), cache, perf_counter() - started, session.model_info.n_expert_used
        )

    def _window(
        self,
        session: Session,
        window: Window,
        kept: LogitsFile,
        log: TokenLog,
        entry: _Entry,
        pace: _Pace,
        keep: bool,
    ) -> None:
        decoded = session.teacher_force(window.tokens, window.n_prompt, entry.note)
        for target, logits in zip(window.targets, decoded, strict=False):
            row = len(log.rows)
            if keep:
                kept.write(row, logits)
            reference = logits if keep else kept.read(row)
            log.add(_figures(score(reference, logits, target), session.metrics.rows[-1]))
            pace.step()
            if self._stopped:
                break
        # A cancelled decode ends the text early, too.
        if self._stopped:
            raise _Stopped


class _Entry:
    """What the cache held before the first scored token of a run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._noted = False
        self.resident_bytes = 0

    def note(self) -> None:
        counts = self._session.counts()
        if not self._noted and counts is not None:
            self.resident_bytes, self._noted = counts.resident_bytes, True


class _Pace:
    """How far all runs together are."""

    def __init__(self, n_runs: int, n_tokens: int, progress: Progress) -> None:
        self._n_runs, self._n_tokens, self._progress = n_runs, n_tokens, progress
        self._run, self._tokens, self._stage = -1, 0, ""

    def begin(self, name: str) -> None:
        self._run, self._tokens = self._run + 1, 0
        self._stage = f"{name}, {self._run + 1} of {self._n_runs}"
        self._progress(self._stage, self._run / self._n_runs)

    def step(self) -> None:
        self._tokens += 1
        done = self._run + self._tokens / self._n_tokens
        self._progress(self._stage, done / self._n_runs)


def lossless(config: RunConfig) -> RunConfig:
    """`config` without anything lossy. Raises InputError where it does not stream."""
    if not config.stream.enabled:
        raise InputError(
            "this needs streaming: what is read, dropped or substituted depends on the cache. "
            "Leave out --no-stream (stream.enabled = false)"
        )
    return config.replace(dict(LOSSLESS_ROUTING))


def settled(session: Session) -> RunConfig:
    """What automatic settings mean here, fixed, so that every run has the same."""
    resolved = session.resolved
    cache_mb = int(resolved.stream.cache_mb)
    experts = sum(layer.n_expert * layer.entry_bytes for layer in session.layers)
    if session.config.stream.cache_mb == AUTO and 0 < experts - cache_mb * MIB < MIB:
        # All experts fit; a whole number of MiB rounded down would not hold the last of them.
        cache_mb += 1
    changes: dict[str, Any] = {
        "model.ctx": resolved.model.ctx,
        "model.threads": resolved.model.threads,
        "stream.cache-mb": cache_mb,
        # An automatic cache may be smaller than is allowed to be asked for: all experts fit.
        "stream.force-cache": True,
        # What is read must depend on the routings alone.
        "stream.prefetch": "off",
    }
    session.set_live({key: changes[key] for key in changes if is_live(key)})
    return session.config.replace(changes)


def _figures(scored: TokenScore, row: TokenRow) -> tuple[float, ...]:
    """A token's row of SERIES."""
    return (
        *(scored.nll, scored.kl, float(scored.same_top)),
        *(row.read_bytes, row.reads, row.hits, row.misses, row.evictions),
        *(row.experts_routed, row.experts_dropped, row.experts_substituted, row.mass_discarded),
    )


def _require_repetition(run: SettingRun) -> None:
    if float(run.series["kl"].max()) != 0.0:
        raise TuiworkError(
            "the lossless run did not repeat itself: run twice, it gave other logits "
            f"(KL up to {run.series['kl'].max():.3g}), so no setting can be compared with it. This "
            "is a fault of the engine or of this llama.cpp build: please report it with the output "
            "of `tuiwork doctor`"
        )
