"""The models opened last and the folder looked through last, in a small JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from platformdirs import user_state_dir

MOST = 12


def default_file() -> Path:
    """Where the list is kept; it need not exist."""
    return Path(user_state_dir("tuiwork", appauthor=False)) / "recent-models.json"


class Recent:
    """The list. A file that is missing or damaged is an empty list: it is only a convenience."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or default_file()

    @property
    def models(self) -> list[Path]:
        """The newest first."""
        names = self._read().get("models")
        return [Path(name) for name in names if _is_path(name)] if isinstance(names, list) else []

    @property
    def folder(self) -> Path | None:
        """The folder that was looked through last."""
        name = self._read().get("folder")
        return Path(name) if isinstance(name, str) and _is_path(name) else None

    def opened(self, model: Path) -> None:
        """Put a model first."""
        model = model.absolute()
        others = [path for path in self.models if path != model]
        self._write({"models": [str(path) for path in [model, *others][:MOST]]})

    def looked_in(self, folder: Path) -> None:
        """Remember the folder."""
        self._write({"folder": str(folder.absolute())})

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, changes: dict[str, Any]) -> None:
        """Replace the file in one step, so that a crash leaves the old one or the new one."""
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._file.parent, prefix=".recent-")
            with os.fdopen(descriptor, "w") as file:
                json.dump(self._read() | changes, file, indent=1)
            os.replace(name, self._file)
        except OSError:
            return  # a list that cannot be kept must not keep anybody from opening a model


def _is_path(name: object) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name
