"""The board: all panels together, as a mosaic where there is room and one at a time where not."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.message import Message

from tuiwork.kept import KeptLines
from tuiwork.meters.meters import Meters
from tuiwork.panels.drops import DropsPanel
from tuiwork.panels.heatmap import HeatmapPanel
from tuiwork.panels.lanes import LanesPanel
from tuiwork.panels.memory import MemoryPanel
from tuiwork.panels.palette import Palette
from tuiwork.panels.panel import Line, Panel
from tuiwork.panels.run import RunPanel
from tuiwork.panels.token_time import TokenTimePanel

CURRENT = "-current"

PANELS: tuple[tuple[str, type[Panel]], ...] = (
    ("heatmap", HeatmapPanel),
    ("token-time", TokenTimePanel),
    ("lanes", LanesPanel),
    ("drops", DropsPanel),
    ("memory", MemoryPanel),
    ("run", RunPanel),
)
"""Ids and classes, in the order of their number keys."""


class PanelTabs(Panel, can_focus=False):
    """The panels' names on one line, where only one panel fits."""

    DEFAULT_CSS = """
    PanelTabs { border: none; padding: 0; height: 1; display: none; }
    """

    class Chosen(Message):
        """A panel's name was clicked."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    current = 0

    def lines(self, width: int, height: int) -> list[Line]:
        """`1 Experts  2 Time …`, the current one marked."""
        line: Line = []
        for place, (_, kind) in enumerate(PANELS):
            role = "tab" if place == self.current else "dim"
            line.append((f" {place + 1} {kind.TAB} ", role))
        return [line]

    def on_click(self, event: events.Click) -> None:
        """Show the panel whose name was clicked."""
        x = 0
        for place, (text, _) in enumerate(self.lines(self.size.width, 1)[0]):
            if x <= event.x < x + len(text):
                self.post_message(self.Chosen(place))
            x += len(text)


class Board(KeptLines, Container):
    """All panels. Exactly one is current: the one that keys and small screens mean."""

    DEFAULT_CSS = """
    Board {
        layout: grid;
        grid-size: 2 4;
        grid-columns: 1fr 1fr;
        grid-rows: 16 1.3fr 1fr 6;
        Panel { height: 100%; }
        #heatmap, #run { column-span: 2; }
    }
    """

    def __init__(self, meters: Meters, palette: Palette, *, id: str) -> None:
        super().__init__(id=id)
        self.tabs = PanelTabs(meters, palette, id="panel-tabs")
        self.panels = [kind(meters, palette, id=name) for name, kind in PANELS]
        self.panels[0].add_class(CURRENT)

    def compose(self) -> ComposeResult:
        """The names, then the panels."""
        yield self.tabs
        yield from self.panels

    @property
    def current(self) -> Panel:
        """The panel that keys mean."""
        return self.panels[self.tabs.current]

    def choose(self, number: int) -> None:
        """Make a panel the current one."""
        number %= len(self.panels)
        if number == self.tabs.current:
            return
        self.current.remove_class(CURRENT)
        self.tabs.current = number
        self.current.add_class(CURRENT)
        self.tabs.update_lines()

    def use_palette(self, palette: Palette) -> None:
        """Draw with other colours from now on."""
        for panel in (self.tabs, *self.panels):
            panel.use_palette(palette)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """The focused panel is the current one."""
        if event.widget in self.panels:
            self.choose(self.panels.index(event.widget))

    def on_panel_tabs_chosen(self, event: PanelTabs.Chosen) -> None:
        """Show and focus the panel."""
        event.stop()
        self.choose(event.number)
        self.current.focus()
