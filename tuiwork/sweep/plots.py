"""The plots of a sweep's report. Need matplotlib, which is an optional extra."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from tuiwork.run_plots import draw_token_times, image
from tuiwork.sweep.quality import Front
from tuiwork.sweep.results import SweepResult
from tuiwork.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST_NAME = 48
_STATE = (
    ("temperature_c", "temperature, °C"),
    ("cpu_mhz", "processor, MHz"),
    ("load", "load"),
    ("available_mib", "available memory, MiB"),
)


def plots_possible() -> bool:
    """Whether what draws them is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_plots(result: SweepResult, front: Front) -> dict[str, bytes]:
    """PNG images by name; one whose figures are not known is left out."""
    plots = {
        "rates": _rates(result),
        "pareto": _pareto(front) if len(front.points) > 1 else None,
        "times": _times(result),
        "state": _state(result),
    }
    return {name: image(figure, "png") for name, figure in plots.items() if figure is not None}


def _figure(height: float, width: float = 9.0) -> Figure:
    # Imported here: it takes half a second. A bare Figure needs no display and no global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _names(result: SweepResult) -> list[str]:
    names = []
    for arm in result.arms:
        # matplotlib reads $…$ as formulas.
        name = one_line(arm.arm.name).replace("$", r"\$")
        short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
        names.append(f"{short}  {arm.arm.letter}")
    return names


def _rates(result: SweepResult) -> Figure:
    figure = _figure(1.5 + 0.45 * len(result.arms))
    axes = figure.subplots()
    for n, arm in enumerate(result.arms):
        interval = arm.pooled.blocked_rate.interval
        axes.plot(arm.cell_rates, [n] * len(arm.cells), "|", color="tab:gray", markersize=14)
        axes.hlines(n, interval.low, interval.high, color="tab:blue", linewidth=4)
        axes.plot(arm.pooled.rate.tok_s, n, "o", color="tab:blue")
    axes.set_yticks(range(len(result.arms)), _names(result))
    axes.set_ylim(len(result.arms) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set(
        title="Rate of each arm: 95 % interval (blocks), and its single cells",
        xlabel="tokens per second",
    )
    return figure


def _pareto(front: Front) -> Figure:
    figure = _figure(5.0)
    axes = figure.subplots()
    best = sorted((p for p in front.points if p.on_front), key=lambda p: p.cost)
    axes.plot(
        [point.cost for point in best],
        [point.arm.pooled.rate.tok_s for point in best],
        "--",
        color="tab:blue",
        linewidth=1,
        label="worth having: none is both faster and cheaper",
    )
    for n, point in enumerate(front.points):
        rate, colour = point.arm.pooled.blocked_rate, "tab:blue" if point.on_front else "tab:gray"
        axes.vlines(point.cost, rate.interval.low, rate.interval.high, color=colour, linewidth=1)
        if point.cost_low is not None and point.cost_high is not None:
            axes.hlines(rate.tok_s, point.cost_low, point.cost_high, color=colour, linewidth=1)
        axes.plot(point.cost, rate.tok_s, "o", color=colour)
        axes.annotate(
            point.arm.arm.letter,
            (point.cost, rate.tok_s),
            textcoords="offset points",
            xytext=(6, 6 if n % 2 else -14),  # neighbours' letters apart
        )
    axes.set_ylim(bottom=0)
    axes.set(
        title="Speed against quality, 95 % intervals",
        xlabel=f"{front.measure} (less is better)",
        ylabel="tokens per second",
    )
    axes.legend(fontsize="small")
    return figure


def _times(result: SweepResult) -> Figure:
    figure = _figure(1.6 + 0.4 * len(result.arms))
    draw_token_times(figure.subplots(), [arm.pooled for arm in result.arms], _names(result))
    return figure


def _state(result: SweepResult) -> Figure | None:
    entries: list[dict[str, Any]] = [
        cell.finished.record.get("entry") or {} for cell in result.cells
    ]
    known = [
        (key, title)
        for key, title in _STATE
        if any(entry.get(key) is not None for entry in entries)
    ]
    if not known:
        return None
    figure = _figure(1.0 + 1.3 * len(known))
    panels = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
    letters = [arm.arm.letter for arm in result.arms]
    for axes, (key, title) in zip(panels, known, strict=True):
        _draw_state(axes, result, letters, key)
        axes.set_ylabel(title, fontsize="small")
    panels[0].set_title("The machine when each cell began")
    panels[-1].set_xlabel("cells in the order in which they ran")
    panels[0].legend(fontsize="small", ncols=min(8, len(letters)))
    return figure


def _draw_state(axes: Axes, result: SweepResult, letters: list[str], key: str) -> None:
    began = sorted(result.cells, key=lambda cell: float(cell.finished.record.get("started", 0)))
    for letter in letters:
        points = [
            (n, float(value))
            for n, cell in enumerate(began, start=1)
            if cell.arm == letter
            and (value := (cell.finished.record.get("entry") or {}).get(key)) is not None
        ]
        axes.plot([n for n, _ in points], [value for _, value in points], "o", label=letter)
