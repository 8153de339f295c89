"""The list of kept conversations: search, resume, rename, delete, export."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from tuiwork.chat.blocks import DIM
from tuiwork.chat.dialogs import Confirm, EditText
from tuiwork.chat.export import export
from tuiwork.chat.history import History, HistoryError, Summary, load
from tuiwork.chat.untrusted import visible
from tuiwork.chat.when import ago, counted
from tuiwork.text import one_line

BATCH_S = 0.1
"""Found conversations are shown this often, so that a long list does not redraw at each."""

KEYS = "Enter resume · F2 rename · F4 export · F8 delete · Esc close"


class HistoryScreen(ModalScreen[Path | None]):
    """Gives the file of the conversation to resume, or None."""

    DEFAULT_CSS = """
    HistoryScreen {
        align: center middle; background: $background 60%;
        #history {
            width: 90%; max-width: 110; height: 90%; border: round $primary;
            border-title-color: $text-primary; border-title-style: bold;
            background: $surface; padding: 0 1;
        }
        Input { border: round $foreground 25%; background: $surface; }
        Input:focus { border: round $primary; }
        OptionList { height: 1fr; border: none; background: $surface; padding: 0; }
        OptionList:focus { border: none; }
        .history--keys { height: 1; color: $text-muted; }
        .history--none { height: 1fr; color: $text-muted; padding: 1 2; display: none; }
        &.-none OptionList { display: none; }
        &.-none .history--none { display: block; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close"),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("pagedown", "move(5)", "Down", show=False, priority=True),
        Binding("pageup", "move(-5)", "Up", show=False, priority=True),
        Binding("enter", "resume", "Resume", id="history.resume", priority=True),
        Binding("f2", "rename", "Rename", id="history.rename"),
        Binding("f4", "export", "Export", id="history.export"),
        Binding("f8", "delete", "Delete", id="history.delete"),
    ]

    def __init__(
        self,
        history: History,
        *,
        rename: Callable[[Path, str], None] | None = None,
        delete: Callable[[Path], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`rename` and `delete` know the open conversation, too; they raise HistoryError."""
        super().__init__()
        self._history = history
        self._rename = rename or history.rename
        self._delete = delete or history.delete
        self._clock = clock
        self._shown: list[Summary] = []
        self._listed: str | None = None
        """What the list was searched for; None: nothing is listed yet."""
        self._resumes = False
        """Whether the first conversation that is found is to be resumed."""

    def compose(self) -> ComposeResult:
        """A field to search with, the list, the keys."""
        with Vertical(id="history") as box:
            box.border_title = Content("Conversations")
            yield Input(placeholder="Search names and words")
            yield OptionList(markup=False)
            yield Static("", classes="history--none", markup=False)
            yield Static(Content(KEYS), classes="history--keys")

    def on_mount(self) -> None:
        """List them all."""
        self.query_one(Input).focus()
        self._search("")

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        self._search(event.value.strip())

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.action_resume()

    @work(thread=True, exclusive=True, group="history")
    def _search(self, wanted: str) -> None:
        """Read the files in a thread; a newer search ends an older one."""
        worker = get_current_worker()
        batch: list[Summary] = []
        first, shown_at = True, time.monotonic()
        for summary in self._history.summaries(wanted):
            if worker.is_cancelled:
                return
            batch.append(summary)
            if time.monotonic() - shown_at > BATCH_S:
                self.app.call_from_thread(self._show, wanted, batch, first)
                batch, first, shown_at = [], False, time.monotonic()
        if not worker.is_cancelled and (batch or first):
            self.app.call_from_thread(self._show, wanted, batch, first)

    def _show(self, wanted: str, batch: list[Summary], first: bool) -> None:
        options = next(iter(self.query(OptionList)), None)
        if options is None:
            return  # the screen was closed while this was on its way
        if first:
            self._shown, self._listed = [], wanted
            options.clear_options()
        self._shown += batch
        options.add_options([Option(self._entry(summary)) for summary in batch])
        if options.highlighted is None and self._shown:
            options.highlighted = 0
        self.set_class(not self._shown, "-none")
        self.query_one(".history--none", Static).update(
            Content(
                f"No conversation has “{visible(wanted)}” in it."
                if wanted
                else f"No conversations yet. They are kept in {self._history.folder}."
            )
        )
        if self._resumes:
            self._resumes = False
            self._resume()

    def _entry(self, summary: Summary) -> Content:
        facts = [counted(summary.n_turns, "message"), ago(summary.changed, self._clock())]
        if summary.model:
            facts.insert(0, one_line(visible(summary.model)))
        entry = Content.assemble(
            (one_line(visible(summary.title)), "bold"), ("\n  " + " · ".join(facts), DIM)
        )
        if summary.snippet:
            entry += Content.assemble("\n  ", (one_line(visible(summary.snippet)), "italic"))
        for problem in summary.problems:
            entry += Content.assemble("\n  ", (one_line(visible(problem)), "$text-warning"))
        return entry

    @property
    def _picked(self) -> Summary | None:
        number = self.query_one(OptionList).highlighted
        return self._shown[number] if number is not None and number < len(self._shown) else None

    def action_move(self, step: int) -> None:
        """Move in the list while the search field keeps the keyboard."""
        options = self.query_one(OptionList)
        if self._shown:
            at = options.highlighted or 0
            options.highlighted = max(0, min(len(self._shown) - 1, at + step))

    def action_leave(self) -> None:
        """Resume nothing."""
        self.dismiss(None)

    def action_resume(self) -> None:
        """Give the picked conversation back, of those that the words searched for have."""
        self.query_one(Input).call_later(self._resume)

    def _resume(self) -> None:
        if self._listed != self.query_one(Input).value.strip():
            self._resumes = True  # the list is still that of other words
        elif self._picked is not None:
            self.dismiss(self._picked.path)

    def action_rename(self) -> None:
        """Ask for another name."""
        picked = self._picked
        if picked is None:
            return

        def renamed(title: str | None) -> None:
            if title is not None:
                self._do(lambda: self._rename(picked.path, title))

        self.app.push_screen(
            EditText("Rename", picked.title, "The name in the list.", one_line=True), renamed
        )

    def action_delete(self) -> None:
        """Ask, then remove the picked conversation."""
        picked = self._picked
        if picked is None:
            return

        def decided(sure: bool | None) -> None:
            if sure:
                self._do(lambda: self._delete(picked.path))

        question = f"“{one_line(picked.title)}” is removed from the disk for good."
        self.app.push_screen(Confirm("Delete this conversation?", question, "Delete"), decided)

    def action_export(self) -> None:
        """Write the picked conversation as Markdown into the current folder."""
        picked = self._picked
        if picked is not None:
            self._do(lambda: self._export(picked))

    def _export(self, picked: Summary) -> None:
        loaded = load(picked.path)
        path = export(loaded.conversation, Path.cwd(), loaded.model)
        self.notify(f"Written: {visible(str(path))}", markup=False)

    def _do(self, change: Callable[[], None]) -> None:
        """Change the files and list them anew; say what went wrong."""
        try:
            change()
        except HistoryError as error:
            self.notify(visible(str(error)), severity="error", markup=False)
        self._search(self.query_one(Input).value.strip())
