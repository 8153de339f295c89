"""The workbench's keys: function keys work everywhere, letters where nobody writes.

Every binding has an id that stays, so that a keymap can move it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from platformdirs import user_config_dir
from textual.app import App, SystemCommand
from textual.binding import Binding

from engine.errors import InputError
from engine.profile import parse, read_text
from tuiwork.panels.board import PANELS

DROP, CACHE = "routing.drop-cold-experts", "stream.cache-mb"


def _key(
    keys: str,
    action: str,
    name: str,
    id: str,
    tooltip: str,
    *,
    letters: str = "",
    shown_as: str | None = None,
    show: bool = True,
) -> list[Binding]:
    """A binding of keys that no text field may take, and of letters that it may."""
    first = Binding(
        keys, action, name, show=show, key_display=shown_as, priority=True, tooltip=tooltip, id=id
    )
    if not letters:
        return [first]
    # An id of its own: a keymap that moves one must not move the other.
    return [first, Binding(letters, action, name, show=False, tooltip=tooltip, id=f"{id}-letter")]


BINDINGS: list[Binding] = [
    *_key("f1", "help", "Help", "app.help", "Keys and panels", letters="question_mark"),
    *_key("f3", "tuning", "Tune", "app.tune", "Open or close the tuning form", letters="t"),
    *_key(
        "f4", "reopen", "Reopen", "app.reopen",
        "Open the model again, with the settings that wait for that", show=False,
    ),
    *_key(
        "f5", f"turn('{DROP}', -1)", "Drop less", "tune.drop-less",
        "LOSSY: leave out fewer cold experts", letters="left_square_bracket", show=False,
    ),
    *_key(
        "f6", f"turn('{DROP}', 1)", "Drop", "tune.drop-more",
        "LOSSY: leave out more cold experts (F5 or [ fewer, F6 or ] more)",
        letters="right_square_bracket", shown_as="f5/6",
    ),
    *_key(
        "f7", f"turn('{CACHE}', -1)", "Less cache", "tune.cache-less",
        "Less memory for experts", letters="minus", show=False,
    ),
    *_key(
        "f8", f"turn('{CACHE}', 1)", "Cache", "tune.cache-more",
        "Memory for experts (F7 or - less, F8 or + more)",
        letters="plus,equals_sign", shown_as="f7/8",
    ),
    *_key(
        "f2", "zoom", "Zoom", "app.zoom", "Let the current panel fill the screen", letters="z"
    ),
    *_key(
        "f9", "undo", "Undo", "tune.undo", "Take the latest change back",
        letters="u", show=False,
    ),
    *_key("f10", "redo", "Redo", "tune.redo", "Repeat it", letters="U", show=False),
    *_key("ctrl+o", "open_model", "Open", "app.open", "Open another model", show=False),
    *_key(
        "alt+p", "profiles", "Profiles", "app.profiles",
        "Save, load and compare settings", letters="p", show=False,
    ),
    *_key(
        "alt+a", "trial", "A/B", "app.trial",
        "One prompt under two profiles, side by side", show=False,
    ),
    *_key(
        "alt+c,alt+0", "board", "Chat alone", "app.board", "Hide or show the panels",
        letters="0", show=False,
    ),
    # Ahead of the chat's own Escape, and only while a model is being opened.
    Binding("escape", "stop_opening", "Stop", show=False, priority=True, id="app.stop-opening"),
    Binding("i", "write", "Write", show=False, id="app.write", tooltip="Go to the message"),
]  # fmt: skip
# By their letters: of a digit with Alt, many a terminal makes a sign such as £.
for _number, (_, _kind) in enumerate(PANELS, start=1):
    BINDINGS += _key(
        f"alt+{_kind.TAB[0].lower()},alt+{_number}", f"panel({_number - 1})", _kind.TITLE,
        f"app.panel-{_number}", f"{_kind.TITLE}: go there; again: let it fill the screen",
        letters=f"{_number}", show=False,
    )  # fmt: skip

OWN_ACTIONS = frozenset(binding.action.partition("(")[0] for binding in BINDINGS)
"""Actions of the workbench, which mean nothing in a dialog."""


def keys_file() -> Path:
    """Where a person moves keys: lines like `"tune.drop-more" = "f12"`. It need not exist."""
    return Path(user_config_dir("tuiwork", appauthor=False)) / "keys.toml"


def read_keymap(path: Path) -> dict[str, str]:
    """Keys by the id of what they do. Raises InputError for what is no such file."""
    if not path.exists():
        return {}
    keymap = parse(read_text(path), path)
    wrong = [name for name, keys in keymap.items() if not isinstance(keys, str)]
    if wrong:
        raise InputError(
            f'{path}: {wrong[0]}: give keys as a text, such as "tune.drop-more" = "f12"; '
            "an id with a dot needs its quotes"
        )
    return keymap


def commands_of(app: App[None]) -> Iterator[SystemCommand]:
    """The same actions and more, for the command palette."""
    seen = set()
    for binding in BINDINGS:
        if binding.action not in seen:
            seen.add(binding.action)
            title = binding.tooltip or binding.description
            run = partial(app.run_action, binding.action)
            yield SystemCommand(binding.description, title, run)
    measure = partial(app.run_action, "measure_disk")
    yield SystemCommand("Measure the disk", "What it gives at most, for the lanes", measure)
    trace = partial(app.run_action, "trace_routes")
    told = "Write what the router chooses to a file, for tuiwork replay; again: stop"
    yield SystemCommand("Trace routings", told, trace)
