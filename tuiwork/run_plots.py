"""Parts of plots that comparisons and sweeps share. Need matplotlib, an optional extra."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.run_figures import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = (
    ("compute_ms", "compute", "tab:blue"),
    ("wait_ms", "waited reads", "tab:orange"),
    ("mgmt_ms", "management", "tab:green"),
    ("loop_ms", "between decodes", "tab:gray"),
)
_DPI = 120
_UNTOLD = "not told"


def image(figure: Figure, kind: str) -> bytes:
    """A figure as the content of a `png` or `svg` file."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name may have characters that the plot's font has not: boxes stand for them.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format=kind, dpi=_DPI)
    return buffer.getvalue()


def draw_token_times(axes: Axes, runs: Sequence[Run], names: Sequence[str]) -> None:
    """A stacked bar for each run; what its file does not tell is drawn as such."""
    for n, run in enumerate(runs):
        left = 0.0
        for name, label, colour in _PARTS:
            width = getattr(run.token_time, name) or 0.0
            # The first bar of a kind names it; what no run has is not named.
            seen = axes.get_legend_handles_labels()[1]
            if width:
                named = None if label in seen else label
                axes.barh(n, width, left=left, color=colour, label=named)
            left += width
        rest = float(run.token_ms.mean()) - left
        if rest > 0.001 * left:
            axes.barh(n, rest, left=left, color="none", edgecolor="black", hatch="//")
            axes.text(left + rest / 2, n, _UNTOLD, ha="center", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.05)
    axes.set(title="Where a token's time goes", xlabel="ms per token")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
