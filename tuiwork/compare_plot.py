"""The plot of compared runs. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.comparison import Comparison
from engine.errors import InputError
from engine.run_figures import Run
from engine.whole_file import write_whole
from tuiwork.compare_view import letters_of
from tuiwork.replay_plot import check_plot
from tuiwork.run_plots import draw_token_times, image
from tuiwork.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "write_plot"]

_WINDOWS = 60
"""Points of a run's course: each the rate of a stretch of its tokens."""

_LONGEST_NAME = 40


def write_plot(result: Comparison, path: Path) -> None:
    """Draw a comparison into a PNG or SVG file. Raises InputError if it cannot be written."""
    # Imported here: it takes half a second. A bare Figure needs no display and no global state.
    from matplotlib.figure import Figure

    letters = letters_of(result)
    taller = max(0, max(len(result.runs), len(result.pairs) / 2) - 6)
    figure = Figure(figsize=(12, 8 + 0.4 * taller), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_rates(axes[0, 0], result, letters)
    draw_token_times(axes[0, 1], result.runs, letters)
    if result.pairs:
        _draw_pairs(axes[1, 0], result, letters)
    else:
        axes[1, 0].axis("off")
    _draw_course(axes[1, 1], result.runs, letters)
    try:
        write_whole(path, image(figure, path.suffix[1:].lower()))
    except OSError as error:
        raise InputError(f"{path}: the plot cannot be written: {error.strerror}") from None


def _draw_rates(axes: Axes, result: Comparison, letters: Sequence[str]) -> None:
    for n, run in enumerate(result.runs):
        rate = run.rate
        for place, interval, colour in (
            (n - 0.12, rate.interval, "tab:blue"),
            (n + 0.12, run.blocked_rate.interval, "tab:orange"),
        ):
            axes.hlines(place, interval.low, interval.high, color=colour, linewidth=3)
            axes.plot(rate.tok_s, place, "o", color=colour)
    names = [_label(run, letter) for run, letter in zip(result.runs, letters, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(title="Rate, 95 % intervals", xlabel="tokens per second")
    _legend(axes, {"tokens one by one": "tab:blue", "in blocks of neighbours": "tab:orange"})


def _draw_pairs(axes: Axes, result: Comparison, letters: Sequence[str]) -> None:
    for n, pair in enumerate(result.pairs):
        colour = "tab:blue" if pair.separated else "tab:gray"
        low = min(pair.independent.low, pair.blocked.low)
        high = max(pair.independent.high, pair.blocked.high)
        axes.hlines(n, low, high, color=colour, linewidth=3)
        axes.plot(pair.ratio, n, "o", color=colour)
    names = [f"{letters[pair.b]} / {letters[pair.a]}" for pair in result.pairs]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set(title="Ratio of each pair, the wider of both intervals", xlabel="times faster")
    _legend(axes, {"separated": "tab:blue", "not separated": "tab:gray"})


def _draw_course(axes: Axes, runs: Sequence[Run], letters: Sequence[str]) -> None:
    for run, letter in zip(runs, letters, strict=True):
        parts = np.array_split(run.token_ms, min(_WINDOWS, len(run)))
        ends = run.skip + np.cumsum([len(part) for part in parts])
        axes.plot(ends, [1000 / part.mean() for part in parts], linewidth=1, label=letter)
    axes.set_ylim(bottom=0)
    axes.set(title="Rate in the course of the run", xlabel="token", ylabel="tokens per second")
    axes.legend(fontsize="small")


def _label(run: Run, letter: str) -> str:
    # matplotlib reads $…$ as formulas.
    name = one_line(run.path.stem).replace("$", r"\$")
    short = name if len(name) <= _LONGEST_NAME else "…" + name[-_LONGEST_NAME:]
    return f"{short}  {letter}"


def _legend(axes: Axes, colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, marker="o") for colour in colours.values()]
    axes.legend(handles, list(colours), fontsize="small")
