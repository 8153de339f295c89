"""A run as a process that ends with the sweep which started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int) -> None:
    """Run the command line in `sys.argv` as `tuiwork` does, for the process `parent_pid`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
    from tuiwork.cli import main as command_line

    command_line()
