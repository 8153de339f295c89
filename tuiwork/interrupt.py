"""Ctrl-C while the model answers: stop the answer, within a token, and nothing else.

Python would raise KeyboardInterrupt wherever it stands, which may be inside a callback that native
code called; there it is lost, or leaves the engine half-way. So the signal only asks for a stop.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[Interrupt]:
    """Let Ctrl-C call `cancel` instead of raising KeyboardInterrupt.

    Signals reach only the main thread; elsewhere this does nothing.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        interrupt.pressed = True
        cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
