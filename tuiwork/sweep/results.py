"""What a sweep's finished cells say together. Pure, but for reading their figures.

An arm's tokens are pooled over its cells. How much its cells differ among themselves, which no
interval of one run shows, stands beside that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.comparability import caveats
from engine.comparison import Pair, compare_pair
from engine.metrics_reader import TIME, TokenMetrics, read_metrics
from engine.run_figures import Run
from engine.steadiness import warm_up
from tuiwork.sweep.plan import Arm, Plan
from tuiwork.sweep.store import TOKENS, FinishedCell

_BY_DESIGN = frozenset({"top_k", "drop_rate", "substitute_rate"})
"""What a matrix varies on purpose: told once, by the arms' own figures."""


@dataclass(frozen=True)
class CellResult:
    """One cell and its run."""

    finished: FinishedCell
    run: Run

    @property
    def arm(self) -> str:
        """Its arm's letter."""
        return self.finished.cell.arm.letter

    @property
    def place(self) -> tuple[int, int]:
        """Its round and prompt: cells of one place follow closely on each other."""
        return self.finished.cell.round, self.finished.cell.prompt


@dataclass(frozen=True)
class ArmResult:
    """One arm over all its cells."""

    arm: Arm
    cells: tuple[CellResult, ...]
    pooled: Run

    @property
    def cell_rates(self) -> list[float]:
        """Tokens per second of each cell."""
        return [cell.run.rate.tok_s for cell in self.cells]


@dataclass(frozen=True)
class SweepResult:
    """All that can be said about a sweep so far."""

    plan: Plan
    arms: tuple[ArmResult, ...]
    """Those with at least one finished cell."""
    pairs: tuple[Pair, ...]
    """Every arm against the first; arms are counted as in `arms`."""
    failures: Mapping[str, str]

    @property
    def cells(self) -> list[CellResult]:
        """Every finished cell, in the plan's order."""
        order = {cell.id: n for n, cell in enumerate(self.plan.cells)}
        found = [cell for arm in self.arms for cell in arm.cells]
        return sorted(found, key=lambda cell: order[cell.finished.cell.id])

    @property
    def missing(self) -> int:
        """Cells that have not run, or failed."""
        return len(self.plan.cells) - len(self.cells)

    def paired_ratios(self, a: int, b: int) -> list[float]:
        """How many times faster arm `b` was than `a`, at every place where both ran."""
        first = {cell.place: cell.run.rate.tok_s for cell in self.arms[a].cells}
        return [
            cell.run.rate.tok_s / first[cell.place]
            for cell in self.arms[b].cells
            if cell.place in first
        ]

    @cached_property
    def doubts(self) -> list[str]:
        """What there is to doubt, in words that name arms."""
        return [*_caveat_words(self.cells), *self._unsteady(), *_machine_words(self.cells)]

    def _unsteady(self) -> list[str]:
        """Pairs that the tokens separate and the cells do not, or cannot."""
        words = []
        alone = [arm.arm.letter for arm in self.arms if len(arm.cells) == 1]
        if alone and len(self.arms) > 1:
            words.append(
                f"a single cell ({', '.join(alone)}) may differ by its moment and not by its "
                "settings: more --rounds tell"
            )
        for pair in self.pairs:
            slower = [ratio < 1 for ratio in self.paired_ratios(pair.a, pair.b)]
            if pair.separated and len(set(slower)) > 1:
                a, b = self.arms[pair.a].arm.letter, self.arms[pair.b].arm.letter
                odd = sum(slower) if pair.ratio > 1 else len(slower) - sum(slower)
                words.append(
                    f"{b} and {a} are separated by their tokens, yet {odd} of {len(slower)} pairs "
                    "of cells say the contrary: runs differ more than tokens do; more --rounds tell"
                )
        return words


def collect(
    plan: Plan, finished: Sequence[FinishedCell], failures: Mapping[str, str], skip: int = 0
) -> SweepResult:
    """The results of finished cells without each one's first `skip` tokens. Raises InputError."""
    by_arm: dict[str, list[CellResult]] = {}
    for found in finished:
        run = Run(read_metrics(found.folder / TOKENS), skip)
        by_arm.setdefault(found.cell.arm.letter, []).append(CellResult(found, run))
    arms = tuple(
        ArmResult(arm, tuple(by_arm[arm.letter]), Run(_pooled(by_arm[arm.letter])))
        for arm in plan.arms
        if arm.letter in by_arm
    )
    pooled = [arm.pooled for arm in arms]
    pairs = tuple(compare_pair(pooled, 0, n) for n in range(1, len(pooled)))
    return SweepResult(plan, arms, pairs, failures)


def _pooled(cells: Sequence[CellResult]) -> TokenMetrics:
    """The tokens of several runs as those of one."""
    runs = [cell.run for cell in cells]
    names = set.intersection(*(set(run.metrics.columns) for run in runs))
    # Cumulative over one run, so meaningless over several.
    names.discard("cache_hit_pct")
    preambles = [run.metrics.preamble for run in runs]
    return TokenMetrics(
        path=cells[0].finished.folder,
        format=runs[0].metrics.format,
        preamble={
            key: value
            for key, value in preambles[0].items()
            if all(other.get(key) == value for other in preambles)
        },
        columns={
            name: np.concatenate([run.metrics.columns[name][run.skip :] for run in runs])
            for name in sorted(names | {TIME})
        },
        extra={},
        summary={},
    )


def _caveat_words(cells: Sequence[CellResult]) -> list[str]:
    """The caveats of the cells of each prompt, told once, with the arms that they are about."""
    between: dict[str, dict[str, dict[str, None]]] = {}
    alone: dict[str, Counter[str]] = {}
    for prompt in sorted({cell.place[1] for cell in cells}):
        same = [cell for cell in cells if cell.place[1] == prompt]
        for caveat in caveats([cell.run for cell in same]):
            if caveat.kind in _BY_DESIGN:
                continue
            arms = [(value, [same[n].arm for n in members]) for value, members in caveat.groups]
            if caveat.between:
                for value, letters in arms:
                    groups = between.setdefault(caveat.text, {})
                    groups.setdefault(value, {}).update(dict.fromkeys(letters))
            else:
                counts = alone.setdefault(caveat.text, Counter())
                counts.update(letter for _, letters in arms for letter in letters)
    words = [
        f"{text}: " + "; ".join(f"{value} ({', '.join(arms)})" for value, arms in groups.items())
        for text, groups in between.items()
    ]
    total = Counter(cell.arm for cell in cells)
    for text, counts in alone.items():
        shown = ", ".join(
            f"{arm} in {n} of {total[arm]} cells" for arm, n in sorted(counts.items())
        )
        words.append(f"{text}: {shown}")
    slow_start = max((cell.run.skip + warm_up(cell.run.token_ms) for cell in cells), default=0)
    if any(warm_up(cell.run.token_ms) for cell in cells):
        words.append(f"leave the slow starts out of the report with --skip {slow_start}")
    return words


def _machine_words(cells: Sequence[CellResult]) -> list[str]:
    words = []
    hosts = {str(cell.finished.record.get("host")) for cell in cells}
    if len(hosts) > 1:
        words.append(f"ran on {len(hosts)} machines: {', '.join(sorted(hosts))}")
    together = {int(cell.finished.record.get("at_once") or 1) for cell in cells}
    if max(together, default=1) > 1:
        words.append(
            f"up to {max(together)} cells ran at once: those on one machine disturb each other"
        )
    gave_up = [
        cell.finished.cell.id
        for cell in cells
        if (cell.finished.record.get("cool_down") or {}).get("gave_up")
    ]
    if gave_up:
        shown = ", ".join(gave_up[:8]) + (", …" if len(gave_up) > 8 else "")
        words.append(f"began although the cool-down had not reached its condition: {shown}")
    return words
