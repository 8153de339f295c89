"""The plot of a replayed trace. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InputError
from engine.replay import Replay
from engine.replay_cache import POLICIES
from engine.replay_lossy import Saving

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises InputError if a plot cannot be drawn, or not into such a file."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"{path}: a plot is written as {' or '.join(SUFFIXES)}, by the file's ending"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "a plot needs matplotlib, which is not installed: pip install matplotlib "
            "(or leave out --plot)"
        )


def write_plot(result: Replay, path: Path) -> None:
    """Draw a replay's curves into a PNG or SVG file. Raises InputError if it cannot be written."""
    # Imported here: it takes half a second. A bare Figure needs no display and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_cache(axes[0, 0], result)
    _draw_lossy(axes[0, 1], result)
    _draw_predictors(axes[1, 0], result)
    _draw_popularity(axes[1, 1], result)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"{path}: the plot cannot be written: {error.strerror}") from None


def _draw_cache(axes: Axes, result: Replay) -> None:
    for policy in POLICIES:
        points = [p for p in result.cache_curve if p.policy == policy and p.hit_pct is not None]
        budgets = [point.budget_mib for point in points]
        style = "--" if policy in ("belady", "random") else "-"
        axes.plot(budgets, [p.hit_pct or 0.0 for p in points], style, marker=".", label=policy)
    axes.set_xscale("log")
    ticks = sorted({point.budget_mib for point in result.cache_curve})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=60)
    axes.minorticks_off()
    axes.set(title="Cache hits while decoding", xlabel="budget, MiB", ylabel="hits, %")
    axes.legend()


def _draw_lossy(axes: Axes, result: Replay) -> None:
    static: dict[str, Sequence[Saving]] = {
        "drop, as recorded": result.drop_curve,
        "fewer experts": result.topk_curve,
    }
    curves: dict[str, list[tuple[float | None, float | None]]] = {
        name: [(point.mass_lost_pct, point.io_saved_pct) for point in points]
        for name, points in static.items()
    }
    for budget in dict.fromkeys(point.budget_mib for point in result.drop_dynamic):
        curves[f"drop, cache of {budget} MiB"] = [
            (point.mass_lost_pct, point.io_saved_pct)
            for point in result.drop_dynamic
            if point.budget_mib == budget
        ]
    for name, pairs in curves.items():
        known = [(lost, saved) for lost, saved in pairs if lost is not None and saved is not None]
        if known:
            style = "-" if "cache of" in name else "--"
            lost_pct, saved_pct = [lost for lost, _ in known], [saved for _, saved in known]
            axes.plot(lost_pct, saved_pct, style, marker="o", label=name)
            axes.legend(fontsize="small")
    axes.set(
        title="What the lossy settings save and cost",
        xlabel="routing weight lost, %",
        ylabel="read bytes saved, %",
    )


def _draw_predictors(axes: Axes, result: Replay) -> None:
    for judged in result.predictors:
        known = [(layer, pct) for layer, pct in judged.layers.items() if pct is not None]
        if known:
            layers, hit_pct = [layer for layer, _ in known], [pct for _, pct in known]
            axes.plot(layers, hit_pct, marker=".", label=judged.predictor)
            axes.legend()
    axes.set(title="Experts guessed right", xlabel="layer", ylabel="routed slots, %")


def _draw_popularity(axes: Axes, result: Replay) -> None:
    axes.set(title="Expert popularity", xlabel="expert, by popularity", ylabel="layer")
    if not result.popularity:
        return
    shares = [
        [100 * count / max(1, layer.routed) for count in sorted(layer.counts, reverse=True)]
        for layer in result.popularity
    ]
    layers = [layer.layer for layer in result.popularity]
    image = axes.imshow(shares, aspect="auto", interpolation="nearest")
    shown = range(0, len(layers), max(1, len(layers) // 12))
    axes.set_yticks(list(shown), [str(layers[n]) for n in shown])
    axes.figure.colorbar(image, ax=axes, label="routed slots of the layer, %")
