"""The screen on which a model is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from tuiwork.chat.untrusted import visible
from tuiwork.chat.when import counted
from tuiwork.model_picker import probe as probing
from tuiwork.model_picker.probe import Facts
from tuiwork.model_picker.recent import Recent
from tuiwork.model_picker.scan import models_in
from tuiwork.text import one_line, size

Probe = Callable[[list[Path], Callable[[], bool]], Iterator[Facts]]

KEYS = "Enter open · Tab list or folder · F3 subfolders · Esc close"
DIM = "$foreground 55%"
_NAME_CELLS, _ARCH_CELLS, _SIZE_CELLS = 26, 12, 10
"""Columns that leave the experts room at 80 cells."""


class ModelPicker(ModalScreen[Path | None]):
    """Gives the file of the chosen model, or None."""

    DEFAULT_CSS = """
    ModelPicker {
        align: center middle; background: $background 60%;
        #picker {
            width: 92%; max-width: 120; height: 92%; border: round $primary;
            border-title-color: $text-primary; border-title-style: bold;
            background: $surface; padding: 0 1;
        }
        Input {
            border: round $foreground 25%; background: $surface; border-title-color: $text-muted;
        }
        Input:focus { border: round $primary; }
        OptionList { height: 1fr; border: none; background: $surface; padding: 0; }
        OptionList:focus { border: none; }
        OptionList > .option-list--option-highlighted,
        OptionList:focus > .option-list--option-highlighted {
            background: $primary 30%; color: $foreground; text-style: none;
        }
        .picker--line { height: 1; color: $text-muted; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close"),
        Binding("f3", "recursive", "Subfolders", id="picker.recursive", priority=True),
        Binding("down", "into_list", "List", show=False),
    ]

    def __init__(
        self,
        *,
        folder: Path | None = None,
        recent: Recent | None = None,
        probe: Probe | None = None,
    ) -> None:
        super().__init__()
        self._recent = recent or Recent()
        self._folder = folder or self._recent.folder or Path.cwd()
        self._probe = probe or probing.probe
        self._recursive = False
        self._facts: dict[str, Facts] = {}
        self._known: set[Path] = set()

    def compose(self) -> ComposeResult:
        """The folder, the list, what is being done, the keys."""
        with Vertical(id="picker") as box:
            box.border_title = Content("Open a model")
            field = Input(str(self._folder), placeholder="A folder, or a .gguf file")
            field.border_title = Content("folder or file")
            yield field
            yield OptionList(markup=False)
            yield Static("", id="picker-state", classes="picker--line", markup=False)
            yield Static(Content(KEYS), classes="picker--line")

    def on_mount(self) -> None:
        """List what was open before, then the folder."""
        self._look()
        self.query_one(OptionList).focus()

    def _look(self) -> None:
        """Begin anew: the recent files, and the folder in the field."""
        self._facts.clear()
        self._known.clear()
        self.query_one(OptionList).clear_options()
        self._read(self._folder, self._recursive, self._recent.models)

    @work(thread=True, exclusive=True, group="models")
    def _read(self, folder: Path, recursive: bool, recent: list[Path]) -> None:
        """Read the headers in a thread and a process; a newer look ends an older one."""
        worker = get_current_worker()

        def cancelled() -> bool:
            return worker.is_cancelled

        def tell(text: str) -> None:
            if not cancelled():
                self.app.call_from_thread(self._state, text)

        there = [path for path in recent if path.exists()]
        if there:
            self._list("Opened before", self._probe(there, cancelled), cancelled)
        tell("Looking…")
        n_found = 0
        try:
            for found in models_in(folder, recursive=recursive, cancelled=cancelled):
                fresh = [entry for entry in found if entry.path.absolute() not in self._known]
                n_found += len(found)
                named = {entry.path: entry.problem for entry in fresh if entry.problem}
                whole = [entry.path for entry in fresh if not entry.problem]
                tell(f"Reading {len(whole)} headers in {found[0].path.parent} · F3 or Esc stops")
                broken = (Facts(path, problem=problem) for path, problem in named.items())
                facts = _then(self._probe(whole, cancelled), broken)
                self._list(str(found[0].path.parent), facts, cancelled)
        except OSError as error:
            tell(f"{error.strerror}: {folder}")
            return
        count = counted(n_found, "model") if n_found else "No .gguf files"
        tell(f"{count} in {'all folders of ' if recursive else ''}{folder}")

    def _list(self, title: str, facts: Iterator[Facts], cancelled: Callable[[], bool]) -> None:
        headed = False
        for one in facts:
            if cancelled():
                return
            self.app.call_from_thread(self._add, "" if headed else title, one)
            headed = True

    def _state(self, text: str) -> None:
        for state in self.query("#picker-state").results(Static):
            state.update(Content(one_line(visible(text))))

    def _add(self, title: str, facts: Facts) -> None:
        options = next(iter(self.query(OptionList)), None)
        if options is None:
            return  # the screen was closed while this was on its way
        if title:
            options.add_option(
                Option(Content.styled(visible(title), f"{DIM} italic"), disabled=True)
            )
        id_ = f"model-{len(self._facts)}"
        self._facts[id_] = facts
        self._known.add(facts.path.absolute())
        options.add_option(Option(entry(facts), id=id_, disabled=bool(facts.reason)))
        if options.highlighted is None and not facts.reason:
            options.highlighted = options.get_option_index(id_)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        facts = self._facts.get(event.option_id or "")
        if facts is not None:
            self._open(facts.path)

    @on(Input.Submitted)
    def _typed(self, event: Input.Submitted) -> None:
        """A folder is looked through; a file is opened, whatever it is: opening tells more."""
        path = Path(event.value.strip()).expanduser()
        if "\0" in event.value or not event.value.strip():
            return
        if path.is_file():
            self._open(path)
            return
        self._folder = path
        if path.is_dir():
            self._recent.looked_in(path)
        self._look()
        self.query_one(OptionList).focus()

    def _open(self, path: Path) -> None:
        self._recent.opened(path)
        self.dismiss(path)

    def action_recursive(self) -> None:
        """With or without subfolders; begins anew."""
        self._recursive = not self._recursive
        self._look()

    def action_into_list(self) -> None:
        """From the field to the list."""
        self.query_one(OptionList).focus()

    def action_leave(self) -> None:
        """Choose nothing."""
        self.workers.cancel_group(self, "models")
        self.dismiss(None)


def entry(facts: Facts) -> Content:
    """A model in the list: two lines, the second with its place or what is wrong with it."""
    name = one_line(visible(facts.name or facts.path.name))
    if facts.problem:
        first = Content(facts.path.name and one_line(visible(facts.path.name)))
    else:
        experts = f"{facts.n_expert} experts, {facts.n_expert_used} used" if facts.n_expert else ""
        first = Content.assemble(
            (_cells(name, _NAME_CELLS), "bold"),
            _cells(one_line(visible(facts.arch)), _ARCH_CELLS),
            size(facts.size_bytes).rjust(_SIZE_CELLS - 2) + "  ",
            experts,
        )
    file = one_line(visible(facts.path.name))
    parts = f" · {facts.n_files} files" if facts.n_files > 1 else ""
    if facts.reason:
        style = "$text-warning" if facts.problem else DIM
        return first + Content.assemble(("\n  " + one_line(visible(facts.reason)), style))
    demand = f" · {size(facts.token_demand_bytes)} per token"
    return first + Content.assemble((f"\n  {file}{parts}{demand}", DIM))


def _cells(text: str, cells: int) -> str:
    """Cut or padded to a column; the last cell stays free."""
    content = Content(text).truncate(cells - 1, ellipsis=True)
    return content.plain + " " * (cells - content.cell_length)


def _then(first: Iterator[Facts], second: Iterator[Facts]) -> Iterator[Facts]:
    yield from first
    yield from second
