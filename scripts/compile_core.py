"""Compiles engine/native/*.c when tuiwork is installed or its wheel is built.

A step of hatchling's. Where there is no compiler, or it fails, tuiwork is installed without: then
Python does the same work, which costs some of the speed; `tuiwork doctor` tells.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = (
    *("-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    # The same sums as numpy's, on every processor.
    "-ffp-contract=off",
)


class CompileCore(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled core to what is installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is put together; `version` is "editable" or "standard"."""
        folder = Path(self.root, "engine", "native")
        compiled = folder / "core.so"
        reason = compile_core(folder, compiled)
        if reason:
            compiled.unlink(missing_ok=True)
            self.app.display_warning(f"tuiwork's compiled core is left out: {reason}")
            return
        build_data["artifacts"].append("engine/native/core.so")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compile_core(folder: Path, target: Path) -> str:
    """Compile all C files of `folder` into `target`. Returns why it could not be done, or ""."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang)"
    sources = sorted(map(str, folder.glob("*.c")))
    partial = target.with_suffix(".partial")
    # Whole or not at all: somebody may have it loaded.
    command = [*compiler.split(), *FLAGS, "-o", str(partial), *sources, "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{compiler}: {error.strerror}"
    if done.returncode:
        partial.unlink(missing_ok=True)
        return f"{compiler} failed:\n{done.stderr.strip()}"
    partial.replace(target)
    return ""
