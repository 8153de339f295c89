"""Copying: to the terminal by OSC 52, and to the desktop where a tool for it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess

from textual.app import App

_TOOLS = (
    ("WAYLAND_DISPLAY", ["wl-copy"]),
    ("DISPLAY", ["xclip", "-selection", "clipboard"]),
    ("DISPLAY", ["xsel", "--clipboard", "--input"]),
    ("", ["pbcopy"]),
)
_PATIENCE_S = 2.0


def copy(app: App[object], text: str) -> None:
    """Put `text`, which has been made `visible`, on the clipboard, by every way there is.

    The terminal does not tell whether it took it, so both ways are always tried.
    """
    app.copy_to_clipboard(text)
    command = desktop_tool()
    if command:
        app.run_worker(lambda: _run(command, text), thread=True, exit_on_error=False)


def desktop_tool() -> list[str] | None:
    """The command that takes a text for the desktop's clipboard, if there is one."""
    for variable, command in _TOOLS:
        if (not variable or os.environ.get(variable)) and shutil.which(command[0]):
            return command
    return None


def _run(command: list[str], text: str) -> None:
    # Some of these stay in the background to serve the text; they must not hold our pipes open.
    subprocess.run(
        command,
        input=text.encode("utf-8", errors="replace"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_PATIENCE_S,
        check=False,
    )
