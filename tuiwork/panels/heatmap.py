"""The residency heatmap: every expert of every layer, as it comes and goes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip

from engine.counters import ABSENT, READING
from tuiwork.meters.glyphs import UNICODE, thousands
from tuiwork.meters.heat import (
    DISCARDED,
    LEVELS,
    N_CODES,
    READ_NOW,
    ExpertDetail,
    Grid,
    Mode,
    codes,
    pairs,
    strengths,
)
from tuiwork.meters.meters import Meters
from tuiwork.panels.map_line import MapLine, Run, plain_line
from tuiwork.panels.palette import Depth, Palette, pair_style
from tuiwork.panels.panel import Line, Panel, between, fitting, wrapped
from tuiwork.text import size

_LABEL_WIDTH = 4
_LABEL_EVERY = 4
_CURSOR = N_CODES
_LONGEST_RUN = 4096
_LINES_AT_ONCE = 6
"""Lines drawn in one update, those first that waited longest: most of what the app takes of a
core, and of what the terminal must read, is these lines."""

_BASE = N_CODES + 1
"""Pairs are drawn in this base, which has room for the cursor's own code."""


class HeatmapPanel(Panel):
    """Layers by experts; a cursor tells about one."""

    # Every column counts: with 70 of them, two of 128 experts share a cell.
    DEFAULT_CSS = "HeatmapPanel { padding: 0; }"

    TITLE = "Experts in memory"
    TAB = "Experts"
    EVERY = 1
    HELP = (
        "Every expert of every layer: dark is absent, bright is resident and used recently (or "
        "often: m changes that), and the strongest marks are being read or were just left out. "
        "Arrows move a cursor, which tells all about one expert."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "mode", "Colour by", id="heat.mode", tooltip="recency, frequency, popularity"),
        Binding("left,h", "move(0, -1)", "Expert −", show=False, id="heat.left"),
        Binding("right,l", "move(0, 1)", "Expert +", show=False, id="heat.right"),
        Binding("up,k", "move(-1, 0)", "Layer −", show=False, id="heat.up"),
        Binding("down,j", "move(1, 0)", "Layer +", show=False, id="heat.down"),
        Binding("shift+left", "move(0, -16)", "16 experts back", show=False, id="heat.far-left"),
        Binding("shift+right", "move(0, 16)", "16 experts on", show=False, id="heat.far-right"),
        Binding("home", "move(0, -99999)", "First expert", show=False, id="heat.first"),
        Binding("end", "move(0, 99999)", "Last expert", show=False, id="heat.last"),
    ]

    def __init__(self, meters: Meters, palette: Palette, *, id: str) -> None:
        self.mode = Mode.RECENCY
        self.cursor: tuple[int, int] | None = None
        """The (row of the counters, expert) looked at."""
        self._grid: Grid | None = None
        self._pairs: npt.NDArray[np.uint16] | None = None
        self._map_runs: list[list[Run]] = []
        """What each line of the map is made of."""
        self._whole: dict[int, tuple[Strip, list[Run], Strip]] = {}
        """Lines with their borders: of which blank line and which runs they were made."""
        self._drawn_at = np.zeros(0, np.int64)
        """The number of the update that last drew each line."""
        self._n_draws = 0
        self._runs: dict[int, Run] = {}
        super().__init__(meters, palette, id=id)

    def title(self) -> str:
        """The mode is part of the title: it says what brightness means."""
        return f"{self.TITLE}: {self.mode.value}"

    def action_mode(self) -> None:
        """Colour by something else."""
        self.mode = self.mode.next()
        self.border_title = self.title()
        self._draw_all()

    def action_move(self, layers: int, experts: int) -> None:
        """Move the cursor; the first press shows it."""
        grid = self._grid
        if grid is None:
            return
        layer, expert = self.cursor or (0, 0)
        if self.cursor is not None:
            layer = min(max(layer + layers, 0), grid.n_layer - 1)
            expert = min(max(expert + experts, 0), grid.n_expert - 1)
        self.cursor = (layer, expert)
        self._draw_all()

    def on_click(self, event: events.Click) -> None:
        """Look at the expert that was clicked."""
        offset = event.get_content_offset(self)
        if offset is None or self._grid is None:
            return
        self.cursor = self._grid.at(offset.x - _LABEL_WIDTH, offset.y)
        self._draw_all()

    def on_tick(self, tick: int) -> None:
        """At tick 0 everything is new: draw the whole map."""
        if tick == 0:
            self._pairs = None
        super().on_tick(tick)

    def _draw_all(self) -> None:
        """What a person did shows at once, whole."""
        self._pairs = None
        self.update_lines()

    def update_lines(self) -> None:
        """Draw the map's changed lines, then the legend's."""
        width, height = self.content_size
        if not (width and height and self.is_mounted):
            return
        self._update_map(width, height)
        super().update_lines()

    def use_palette(self, palette: Palette) -> None:
        """Draw with other colours from now on."""
        self._pairs = None
        super().use_palette(palette)

    def draw_lines(self, crop: Region) -> list[Strip]:
        """The panel as Textual draws it, with the map laid into its blank lines."""
        lines = list(super().draw_lines(crop))
        for y, runs in enumerate(self._map_runs):
            place = y + self.gutter.top - crop.y
            if 0 <= place < len(lines):
                lines[place] = self._with_map(y, lines[place], runs, crop)
        return lines

    def _with_map(self, y: int, blank: Strip, runs: list[Run], crop: Region) -> Strip:
        known = self._whole.get(y)
        if known is not None and known[0] is blank and known[1] is runs:
            return known[2]
        width, gutter = self.outer_size.width, self.gutter
        if crop.width == width:
            left, right = blank.crop(0, gutter.left), blank.crop(width - gutter.right, width)
        else:  # partly out of sight, and its borders with it
            left, right = Strip.blank(gutter.left), Strip.blank(gutter.right)
        whole: Strip
        if self._needs_no_filter():
            whole = MapLine(left, runs, right, width)
        else:
            background = self.background_colors[1]
            whole = plain_line(left, runs, right, self.get_line_filters(), background)
        whole = whole if crop.width == width else whole.crop(crop.x, crop.right)
        self._whole[y] = blank, runs, whole
        return whole

    def _needs_no_filter(self) -> bool:
        """Whether all colours are the terminal's own: Textual filters those that are not."""
        background = self.visual_style.rich_style.bgcolor
        own = background is not None and background.triplet is not None
        return own and self.palette.depth is Depth.FULL

    def lines(self, width: int, height: int) -> list[Line]:
        """What stands below the map; the map's own lines are blank here."""
        if self._grid is None:
            return self._nothing_to_show()
        spare = height - len(self._map_runs) - 1
        below = [self._legend(width - 2), *self._detail(width - 2)[: max(1, spare)]]
        if height < 5:
            below = below[1:]
        return [[] for _ in self._map_runs] + [[(" ", ""), *line] for line in below]

    def _nothing_to_show(self) -> list[Line]:
        if self.meters.opened is not None and not self.meters.streams:
            return [[("Not streaming: every expert is in memory, or mapped.", "dim")]]
        return [[("Experts appear here once a model is open.", "dim")]]

    def _update_map(self, width: int, height: int) -> None:
        counters = self.meters.counters
        if counters is None or "state" not in counters:
            self._grid, self._pairs, self._map_runs = None, None, []
            return
        n_layer, n_expert = counters["state"].shape
        below = 1 if height < 5 else 2
        grid = Grid.fit(
            n_layer,
            n_expert,
            width - _LABEL_WIDTH,
            height - below,
            halves=self.palette.halves,
        )
        new = self._new_pairs(grid)
        shown, known_grid, self._grid = self._pairs, self._grid, grid
        if shown is None or known_grid != grid or not self._map_runs:
            self._runs.clear()
            self._pairs, self._drawn_at = new, np.zeros(len(new), np.int64)
            self._map_runs = [self._line_runs(y, width) for y in range(len(new))]
            self.refresh()
            return
        changed = np.flatnonzero((shown != new).any(axis=1))
        stalest = changed[np.argsort(self._drawn_at[changed], kind="stable")][:_LINES_AT_ONCE]
        self._n_draws += 1
        self._drawn_at[stalest] = self._n_draws
        for y in stalest.tolist():
            shown[y] = new[y]
            self._map_runs[y] = self._line_runs(y, width)
            self.refresh_line(y)

    def _new_pairs(self, grid: Grid) -> npt.NDArray[np.uint16]:
        counters, totals = self.meters.counters, self.meters.totals
        assert counters is not None and totals is not None
        state = counters["state"]
        bright = strengths(
            self.mode,
            state,
            counters["hits"],
            counters["misses"],
            counters["last_used"],
            totals.clock,
        )
        shown = codes(grid, bright, state, counters["last_discarded"], totals.clock)
        if self.cursor is not None:
            row, column = grid.cell(*self.cursor)
            if row < grid.n_rows and column < grid.n_columns:
                shown[row, column] = _CURSOR
        return pairs(grid, shown, _BASE)

    def _line_runs(self, y: int, width: int) -> list[Run]:
        assert self._grid is not None and self._pairs is not None
        base = self.visual_style.rich_style
        row, cell_width = self._pairs[y], self._grid.cell_width
        starts = np.concatenate(([0], np.flatnonzero(row[1:] != row[:-1]) + 1))
        lengths = np.diff(starts, append=len(row))
        runs = (row[starts].astype(np.int64) * _LONGEST_RUN + lengths).tolist()
        known = self._runs
        line = [Run(self._label(y, base), self.app.console)]
        line += [known.get(run) or self._run(run, base) for run in runs]
        used = _LABEL_WIDTH + len(row) * cell_width
        if used < width:
            line.append(Run(Segment(" " * (width - used), base), self.app.console))
        return line

    def _run(self, run: int, base: Style) -> Run:
        """A run of equal cells, numbered by its pair of codes and its length; made once."""
        assert self._grid is not None
        pair, length = divmod(run, _LONGEST_RUN)
        upper, lower = divmod(pair, _BASE)
        palette, style = self.palette, pair_style(self.palette, upper, lower)
        if self._grid.halves:
            glyph = palette.glyphs.upper_half
        elif upper == _CURSOR:
            glyph, style = palette.glyphs.cursor, base + palette.style("cursor")
        else:
            glyph, style = palette.cell_glyph(upper), base + style
        segment = Segment(glyph * (length * self._grid.cell_width), style)
        self._runs[run] = Run(segment, self.app.console)
        return self._runs[run]

    def _label(self, y: int, base: Style) -> Segment:
        assert self._grid is not None
        first, last = self._grid.layers_of_line(y)
        here = self.cursor is not None and first <= self.cursor[0] <= last
        if y % (_LABEL_EVERY * self._grid.cell_height) and not here:
            return Segment(" " * _LABEL_WIDTH, base)
        number = self._number(self.cursor[0] if here and self.cursor else first)
        style = base + self.palette.style("cursor" if here else "dim")
        return Segment(f"{number:>{_LABEL_WIDTH - 1}} ", style)

    def _number(self, row: int) -> int:
        opened = self.meters.opened
        known = opened is not None and row < len(opened.layers)
        return opened.layers[row].number if opened is not None and known else row

    def _legend(self, width: int) -> Line:
        palette, glyphs = self.palette, self.palette.glyphs
        weak, strong = {
            Mode.RECENCY: ("long ago", "now"),
            Mode.FREQUENCY: ("seldom", "often"),
            Mode.POPULARITY: ("unpopular", "popular"),
        }[self.mode]
        solid = glyphs.full if self._grid is not None and self._grid.halves else None
        parts: list[Line] = []
        ramp: Line = [(f"{weak} ", "dim")]
        for level in range(1, LEVELS + 1, 2):
            ramp.append((solid or palette.cell_glyph(level), f"code:{level}"))
        ramp.append((f" {strong}", "dim"))
        parts.append(ramp)
        if self.mode.shows_residency:
            parts.insert(0, [(solid or palette.cell_glyph(0), "code:0"), (" absent", "dim")])
        parts.append([(solid or glyphs.reading, f"code:{READ_NOW}"), (" being read", "dim")])
        parts.append([(solid or glyphs.discarded, f"code:{DISCARDED}"), (" left out", "dim")])
        left = fitting(parts, width, "   ")
        return between(left, self._scale(), width)

    def _scale(self) -> Line:
        assert self._grid is not None
        grid = self._grid
        if grid.experts_per_cell == 1 and grid.layers_per_row == 1:
            return []
        times = "×" if self.palette.glyphs is UNICODE else "x"
        of = f"{grid.layers_per_row} layers {times} {grid.experts_per_cell} experts"
        if grid.layers_per_row == 1:
            of = f"{grid.experts_per_cell} experts"
        elif grid.experts_per_cell == 1:
            of = f"{grid.layers_per_row} layers"
        return [(f"a cell is {of}", "dim")]

    def _detail(self, width: int) -> list[Line]:
        detail = self.meters.expert(*self.cursor) if self.cursor is not None else None
        if detail is None:
            return [self._summary(width)]
        return wrapped(_detail_parts(detail, self.palette.glyphs.unmeasured), width)

    def _summary(self, width: int) -> Line:
        assert self.meters.counters is not None
        state = self.meters.counters["state"]
        n_resident = int(np.count_nonzero(state != ABSENT))
        n_reading = int(np.count_nonzero(state == READING))
        share = 100 * n_resident / max(state.size, 1)
        parts: list[Line] = [
            [
                (thousands(n_resident), "strong"),
                (f" of {thousands(state.size)} experts in memory ({share:.0f} %)", ""),
            ]
        ]
        if n_reading:
            parts.append([(thousands(n_reading), "strong"), (" being read", "")])
        parts.append([("arrows: look at one", "dim")])
        return fitting(parts, width, "   ")


def _detail_parts(detail: ExpertDetail, unmeasured: str) -> list[Line]:
    state = {ABSENT: "absent", READING: "being read"}.get(detail.state, "resident")
    ago = "never used" if detail.tokens_ago is None else f"used {_ago(detail.tokens_ago)}"
    share = detail.routing_share
    shown_share = unmeasured if share != share else f"{100 * share:.2f} %"
    parts: list[Line] = [
        [(f"layer {detail.layer} expert {detail.expert}", "cursor")],
        [(state, "strong")],
        [(thousands(detail.hits), "strong"), (" hits", "")],
        [(thousands(detail.misses), "strong"), (" misses", "")],
        [(ago, "")],
        [(shown_share, "strong"), (" of the layer's routings", "")],
        [(size(detail.entry_bytes), "")],
    ]
    if detail.just_discarded:
        parts.insert(2, [("just left out", "lossy")])
    return parts


def _ago(tokens: int) -> str:
    if tokens == 0:
        return "now"
    return f"{tokens} token{'s' if tokens > 1 else ''} ago"
