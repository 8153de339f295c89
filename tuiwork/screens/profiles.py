"""Profiles: load one, save the settings in force as one, see what differs between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from engine.config import SETTINGS, RunConfig
from engine.errors import InputError
from engine.profile import ProfileEntry, list_profiles
from tuiwork.screens.dialog import Dialog, TextDialog
from tuiwork.text import one_line
from tuiwork.tuning.changes import value_text
from tuiwork.tuning.profiles import Difference, differences, save, settings_of

IN_FORCE = "settings in force"


@dataclass(frozen=True)
class Chosen:
    """The profile to run under from now on."""

    name: str
    config: RunConfig


class ProfilesScreen(Dialog[Chosen]):
    """Names at the left; at the right how the named one differs from the base."""

    DEFAULT_CSS = """
    ProfilesScreen {
        .box { width: 100; height: 80%; padding: 0 1; }
        OptionList { width: 30; height: 1fr; border: none; background: $surface; }
        OptionList:focus { border: none; }
        VerticalScroll { width: 1fr; padding: 0 1; }
        #about { height: auto; padding: 0 0 1 0; }
        #keys { height: 1; color: $foreground 60%; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "save", "Save", id="profiles.save"),
        Binding("space", "base", "Compare with", id="profiles.base"),
    ]

    def __init__(self, in_force: RunConfig) -> None:
        super().__init__()
        self._in_force = in_force
        self._base_name, self._base = IN_FORCE, in_force
        self._entries: list[ProfileEntry] = []

    def compose(self) -> ComposeResult:
        """The names, the differences, the keys."""
        with Vertical(classes="box") as box:
            box.border_title = Content("Profiles")
            box.border_subtitle = Content("Esc closes")
            with Horizontal():
                yield OptionList()
                with VerticalScroll(can_focus=False):
                    yield Static(id="about")
                    yield Static(id="differences")
            yield Static(
                Text("Enter loads · s saves the settings in force · space compares with this one"),
                id="keys",
            )

    def on_mount(self) -> None:
        """List what there is."""
        self._list("")

    def _list(self, highlight: str) -> None:
        self._entries = list_profiles()
        options = self.query_one(OptionList)
        options.clear_options()
        for entry in self._entries:
            options.add_option(
                Option(_entry_text(entry), id=entry.name, disabled=bool(entry.error))
            )
        names = [entry.name for entry in self._entries]
        options.highlighted = names.index(highlight) if highlight in names else 0
        options.focus()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show how this one differs."""
        self._show(self._entries[event.option_index])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Load it."""
        name = self._entries[event.option_index].name
        config = self._settings(name)
        if config is not None:
            self.dismiss(Chosen(name, config))

    def action_base(self) -> None:
        """Compare the others with this one; again: with the settings in force."""
        place = self.query_one(OptionList).highlighted
        if place is None:
            return
        name = self._entries[place].name
        config = self._settings(name)
        if name == self._base_name or config is None:
            self._base_name, self._base = IN_FORCE, self._in_force
        else:
            self._base_name, self._base = name, config
        self._show(self._entries[place])

    @work
    async def action_save(self) -> None:
        """Save the settings in force under a name."""
        place = self.query_one(OptionList).highlighted
        own = [entry.name for entry in self._entries if not entry.shipped]
        highlighted = self._entries[place].name if place is not None else ""
        dialog = TextDialog(
            "Save the settings in force",
            "The profile's name. One of yours is changed in place, its comments kept.",
            highlighted if highlighted in own else "mine",
        )
        name = await self.app.push_screen_wait(dialog)
        if name is None:
            return
        try:
            path = save(name.strip(), self._in_force)
        except InputError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self.notify(f"Saved as {path}", markup=False)
        self._list(path.stem)

    def _settings(self, name: str) -> RunConfig | None:
        try:
            return settings_of(name)
        except InputError as error:
            self.notify(str(error), severity="error", markup=False)
            return None

    def _show(self, entry: ProfileEntry) -> None:
        about, shown = self.query_one("#about", Static), self.query_one("#differences", Static)
        about.update(Text(one_line(entry.error or entry.description)))
        config = None if entry.error else self._settings(entry.name)
        if config is None:
            shown.update(Text(""))
            return
        found = differences(self._base, config)
        if found:
            shown.update(difference_table(found, self._base_name, entry.name))
        else:
            shown.update(Text(f"No difference from {self._base_name}."))


def difference_table(found: list[Difference], left: str, right: str) -> Table:
    """Each setting with its two values; lossy ones say so."""
    table = Table.grid(padding=(0, 2))
    table.add_row(
        Text("setting", "dim"), Text(one_line(left), "dim"), Text(one_line(right), "bold")
    )
    for difference in found:
        spec = SETTINGS[difference.key]
        changes_answer = spec.lossy_at(difference.right) or spec.lossy_at(difference.left)
        name = Text(difference.key)
        if changes_answer:
            name.append(" lossy", "bold #ff7a45")
        table.add_row(
            name,
            Text(one_line(value_text(difference.key, difference.left))),
            Text(one_line(value_text(difference.key, difference.right)), "bold"),
        )
    return table


def _entry_text(entry: ProfileEntry) -> Text:
    text = Text(one_line(entry.name))
    if not entry.shipped:
        text.append(" yours", "dim")
    if entry.lossy:
        text.append(" LOSSY", "bold #ff7a45")
    if entry.error:
        text.append(" unusable", "dim")
    return text
