"""The help: every key, and what each panel shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tuiwork.keys import BINDINGS, keys_file
from tuiwork.panels.board import PANELS
from tuiwork.panels.panel import Panel
from tuiwork.screens.dialog import Dialog
from tuiwork.tuning.panel import TuningPanel

_NAMES = {
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "question_mark": "?",
    "minus": "-",
    "plus": "+",
    "equals_sign": "=",
    "escape": "Esc",
    "enter": "Enter",
}
_ELSEWHERE = (
    ("Tab, Shift+Tab", "from the chat to the panels and back; letters and digits work there"),
    ("Esc", "stops an answer; in a panel: one step back towards the chat"),
    ("Ctrl+P", "every command by name, themes too"),
    ("Ctrl+Q", "quit"),
)


class HelpScreen(Dialog[None]):
    """Scrolls; closes with Escape."""

    DEFAULT_CSS = """
    HelpScreen .box { width: 92; height: 90%; padding: 0; }
    HelpScreen VerticalScroll { padding: 1 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1,question_mark,q", "leave", "Close", show=False),
    ]

    def compose(self) -> ComposeResult:
        """Keys, then panels."""
        with Vertical(classes="box") as box:
            box.border_title = Content("Help")
            box.border_subtitle = Content("Esc closes")
            with VerticalScroll():
                yield Static(Text("Keys", style="bold"))
                yield Static(key_table())
                yield Static(Text(f"\nKeys can be moved by their id in {keys_file()}.", "dim"))
                kinds: list[type[Panel]] = [*(kind for _, kind in PANELS), TuningPanel]
                for kind in kinds:
                    yield Static(Text(f"\n{kind.TITLE}", style="bold"))
                    yield Static(Text(kind.HELP))
                    own = _panel_keys(kind)
                    if own:
                        yield Static(_table(own))

    def on_mount(self) -> None:
        """Let the arrows scroll."""
        self.query_one(VerticalScroll).focus()


def key_table() -> Table:
    """The workbench's keys, one line for each action."""
    by_action: dict[str, tuple[list[str], str]] = {}
    for binding in BINDINGS:
        if not (binding.tooltip or binding.show):
            continue
        keys, _ = by_action.setdefault(binding.action, ([], binding.tooltip or binding.description))
        # A digit with Alt reaches few terminals' programs: its letter is the key to learn.
        keys += [
            key_name(key) for key in binding.key.split(",") if not re.fullmatch(r"alt\+\d", key)
        ]
    rows = [(", ".join(keys), words) for keys, words in by_action.values()]
    return _table([*_ELSEWHERE, *rows])


def key_name(key: str) -> str:
    """A key as it is printed on a keyboard: `F2`, `Ctrl+O`, `[`."""
    *held, last = key.strip().split("+") if key != "plus" else [key]
    bare = len(last) == 1 and not held
    last = _NAMES.get(last, last if bare else last.capitalize())
    return "+".join([*(part.capitalize() for part in held), last])


def _panel_keys(kind: type[Panel]) -> list[tuple[str, str]]:
    rows = []
    for binding in kind.__dict__.get("BINDINGS", ()):
        if isinstance(binding, Binding):
            keys = ", ".join(key_name(key) for key in binding.key.split(","))
            rows.append((keys, binding.tooltip or binding.description))
    return rows


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=16, no_wrap=True)
    table.add_column()
    for keys, words in rows:
        table.add_row(Text(keys, style="bold"), Text(words))
    return table
