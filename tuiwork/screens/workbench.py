"""The workbench: the chat, the board beside it, and the tuning form when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.screen import Screen
from textual.widgets import Footer

from tuiwork.kept import KeptLines
from tuiwork.meters.meters import Meters
from tuiwork.panels.board import Board
from tuiwork.panels.notice import Notice
from tuiwork.panels.palette import Palette
from tuiwork.panels.panel import Panel
from tuiwork.panels.status import StatusLine
from tuiwork.tuning.panel import TuningPanel

if TYPE_CHECKING:
    from tuiwork.chat.pane import ChatPane

ZOOM, TUNING, ALONE = "-zoom", "-tuning", "-alone"
"""Classes of the screen: one panel fills it; the form is open; the chat has it to itself."""


class Area(KeptLines, Container):
    """A part of the screen."""


class Column(KeptLines, Vertical):
    """Parts of the screen one below the other."""


class Workbench(KeptLines, Screen[None]):
    """The main screen."""

    AUTO_FOCUS = "#composer"

    def __init__(self, meters: Meters, palette: Palette, chat: ChatPane, *, id: str) -> None:
        super().__init__(id=id)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide"), (180, "-huge")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-medium"), (54, "-tall")]
        self.status = StatusLine(meters, palette, id="status")
        self.notice = Notice(meters, palette, id="notice")
        self.chat = chat
        self.tuning = TuningPanel(meters, palette, id="tuning")
        self.board = Board(meters, palette, id="board")

    def compose(self) -> ComposeResult:
        """Status above, keys below, chat and board between."""
        yield self.status
        with Area(id="body"):
            with Column(id="talk"):
                yield self.notice
                yield self.chat
                yield self.tuning
            yield self.board
        yield Footer(compact=True)

    def on_key(self, event: events.Key) -> None:
        """Who types before anything has the focus, as at the start, is writing a message."""
        if self.focused in (None, self.chat.composer):
            self.chat.composer.take_key(event)

    def on_tick(self, tick: int) -> None:
        """Draw what changed, of those panels whose turn it is."""
        for panel in (self.status, self.notice, self.tuning, *self.board.panels):
            panel.on_tick(tick)

    def update_panels(self) -> None:
        """Draw all that changed."""
        self.on_tick(0)

    def use_palette(self, palette: Palette) -> None:
        """Draw with other colours from now on."""
        panels: list[Panel] = [self.status, self.notice, self.tuning]
        for panel in panels:
            panel.use_palette(palette)
        self.board.use_palette(palette)

    def zoom(self, wanted: bool | None = None) -> None:
        """Let the current panel fill the screen, or end that; None: the other of the two."""
        zoomed = not self.has_class(ZOOM) if wanted is None else wanted
        self.remove_class(ALONE)
        self.set_class(zoomed, ZOOM)
        if zoomed:
            self.board.current.focus()
        self.call_after_refresh(self.update_panels)

    def show_panel(self, number: int) -> None:
        """Go to a panel; if it is where one is already, let it fill the screen or end that."""
        self.remove_class(ALONE)
        panel = self.board.panels[number]
        if panel.has_focus:
            self.zoom()
            return
        self.board.choose(number)
        panel.focus()
        self.call_after_refresh(self.update_panels)

    def toggle_tuning(self) -> None:
        """Open the form and go there, or close it."""
        opening = not self.has_class(TUNING)
        self.remove_class(ZOOM)
        self.set_class(opening, TUNING)
        if opening:
            self.tuning.focus()
            self.call_after_refresh(self.tuning.update_lines)
        else:
            self.focus_chat()

    def toggle_board(self) -> None:
        """Give the chat the whole screen, or share it again."""
        self.remove_class(ZOOM)
        self.toggle_class(ALONE)
        if self.has_class(ALONE):
            self.focus_chat()
        self.call_after_refresh(self.update_panels)

    def back(self) -> None:
        """One step back towards the chat: from a filled screen, from the form, from a panel."""
        if self.has_class(ZOOM):
            self.zoom(False)
        elif self.has_class(TUNING) and self.tuning.has_focus:
            self.toggle_tuning()
        else:
            self.focus_chat()

    def focus_chat(self) -> None:
        """Let the person write."""
        self.remove_class(ZOOM)
        composer = self.query("#composer")
        (composer.first() if composer else self.chat).focus()
