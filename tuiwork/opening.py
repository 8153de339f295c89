"""Opening a model at the terminal: a progress bar, Ctrl-C that is obeyed, last words that help."""

from __future__ import annotations

import os
import re
import sys

from engine import ggml
from engine.config import RunConfig
from engine.diagnostics import Diagnostics
from engine.session import Session
from tuiwork import console
from tuiwork.interrupt import cancel_on_interrupt
from tuiwork.progress import ProgressBar

_RUN_FAILED, _BAD_MODEL = 1, 2
"""Exit statuses: what ends opening is the model's fault, what ends a run may be anything's."""

_SOURCE_FOLDER = re.compile(r"\S*/(?=[\w.-]+:\d+:)")
"""Where llama.cpp was built: of its file names only the last part says anything."""


def open_session(config: RunConfig, options: Diagnostics | None = None) -> Session:
    """Open the model of `config` for one person at this terminal.

    Raises what `Session.open` does, and KeyboardInterrupt for Ctrl-C.
    """
    end_clearly_on_abort(config.model.path, _BAD_MODEL)
    with ProgressBar() as bar, cancel_on_interrupt(lambda: None) as interrupt:

        def progress(stage: str, fraction: float) -> None:
            # Raised here, where no native code stands in between that would swallow it.
            if interrupt.pressed:
                raise KeyboardInterrupt
            bar(stage, fraction)

        session = Session.open(config, progress=progress, options=options)
    if interrupt.pressed:
        session.close()
        raise KeyboardInterrupt
    end_clearly_on_abort(config.model.path)
    return session


def end_clearly_on_abort(path: str, status: int = _RUN_FAILED) -> None:
    """Should native code give up on the model at `path`, say so for a person, and end."""
    ggml.on_abort(lambda words: _end(path, words, status))


def _end(path: str, words: str, status: int) -> None:
    """Say why native code gives up, and end: it would abort the process otherwise."""
    console.note(
        f"tuiwork: {path}: llama.cpp cannot go on: {_SOURCE_FOLDER.sub('', words)}. Probably the "
        "file is damaged, or made for another version: download or copy it again"
    )
    sys.stderr.flush()
    os._exit(status)
