"""The plot of `tuiwork quality`. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InputError
from engine.quality import QualityResult
from engine.quality_curves import verdicts
from engine.quality_figures import Figures, SettingRun, summarise
from engine.quality_sets import LOSSLESS
from engine.quality_stats import Estimate, MovingBlocks
from tuiwork.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Family = list[tuple[SettingRun, Figures]]

_MARKERS = "osv^D*Pph8"
"""Families differ in more than colour; there are fewer of them than markers."""


def write_plot(result: QualityResult, path: Path) -> None:
    """Draw KL, perplexity and top-1 agreement against reads saved, a curve for each family.

    Bars are 95 % intervals. Raises InputError if the file cannot be written.
    """
    # Imported here: it takes half a second. A bare Figure needs no display and no global state.
    from matplotlib.figure import Figure

    families = _families(result)
    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    # No origin: divergences span orders of magnitude, and lossless, 0, is nowhere on such an axis.
    _draw(axes[0, 0], families, "kl_mean", "mean KL divergence, nats", origin=None)
    _mark_turns(axes[0, 0], result)
    _draw(axes[0, 1], families, "kl_p99", "99th percentile of KL, nats", origin=None)
    _draw(axes[1, 0], families, "ppl_ratio", "perplexity over lossless", origin=1.0)
    _draw(axes[1, 1], families, "top1", "same likeliest token, share", origin=1.0)
    axes[0, 0].set_title("What saving reads costs")
    axes[0, 0].legend(fontsize="small")
    cache = result.reference.cache
    figure.suptitle(
        f"{one_line(Path(result.model.path).name)}: {result.n_scored} tokens, cache "
        f"{cache.budget_bytes // 2**20} MiB, {cache.entry}; bars: 95 % intervals",
        # A file's name may hold what would be read as a formula.
        parse_math=False,
    )
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"{path}: the plot cannot be written: {error.strerror}") from None


def _families(result: QualityResult) -> dict[str, Family]:
    blocks = MovingBlocks(result.n_scored)
    families: dict[str, Family] = {}
    for run in result.runs:
        if run.variant.family != LOSSLESS:
            figures = summarise(run, result.reference, blocks)
            if figures.reads_saved.value is not None:
                families.setdefault(run.variant.family, []).append((run, figures))
    for points in families.values():
        points.sort(key=lambda point: point[1].reads_saved.value or 0.0)
    return families


def _draw(
    axes: Axes, families: dict[str, Family], figure: str, label: str, *, origin: float | None
) -> None:
    """A curve for each family, from `origin` at no reads saved; without one on a log axis."""
    begin = [] if origin is None else [origin]
    for marker, (family, points) in zip(_MARKERS, families.items(), strict=False):
        known = [
            (run, figures.reads_saved, getattr(figures, figure))
            for run, figures in points
            if (value := getattr(figures, figure).value) is not None
            and (value > 0 or origin is not None)
        ]
        if not known:
            continue
        x = [100 * (saved.value or 0.0) for _, saved, _ in known]
        y = [cost.value for _, _, cost in known]
        bars = [_bar(cost) for _, _, cost in known]
        axes.errorbar(
            [*(0.0 for _ in begin), *x],
            [*begin, *y],
            yerr=(
                [*(0.0 for _ in begin), *(low for low, _ in bars)],
                [*(0.0 for _ in begin), *(high for _, high in bars)],
            ),
            marker=marker,
            markersize=5,
            capsize=2,
            label=family,
        )
        for place, (run, _, _) in enumerate(known):
            axes.annotate(
                f"{run.variant.strength:g}",
                (x[place], y[place]),
                textcoords="offset points",
                xytext=(4, 4),
                fontsize="x-small",
            )
    if not axes.has_data():
        axes.text(0.5, 0.5, "unmeasured", ha="center", transform=axes.transAxes)
    axes.set(xlabel="read bytes saved, %", ylabel=label)
    if origin is None:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _bar(estimate: Estimate) -> tuple[float, float]:
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return 0.0, 0.0
    return max(0.0, estimate.value - estimate.low), max(0.0, estimate.high - estimate.value)


def _mark_turns(axes: Axes, result: QualityResult) -> None:
    found = verdicts(result.runs, result.reference)
    points = {point.name: point for curve in found.curves for point in curve.points}
    for number, turn in enumerate(found.turns):
        point = points[turn.name]
        axes.scatter(
            [100 * point.reads_saved],
            [point.kl],
            s=120,
            facecolors="none",
            edgecolors="black",
            label="the curve turns" if number == 0 else None,
        )
