"""Which model a command means, and with which settings it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from engine.config import RunConfig
from engine.errors import InputError
from tuiwork import console
from tuiwork.settings import CommonFlags

DEMO_PROFILE = "demo"
_STAND_IN = "synthetic-tiny-1.gguf"
"""The number is part of the name so that a changed shape is not mistaken for the old file."""


def cache_dir() -> Path:
    """The user's folder for what can be made again; it need not exist."""
    return Path(user_cache_dir("tuiwork", appauthor=False))


def open_config(
    model: str | None,
    flags: CommonFlags,
    more: Mapping[str, Any] | None = None,
    *,
    base: Sequence[str] = (),
) -> RunConfig:
    """All settings of a run, with a model in them: the given one, the profile's, or the demo.

    `more` are further settings by dotted key; `base` are profiles that any other overrides.
    Raises InputError.
    """
    if model is not None and not model.strip():
        # An unset variable of a script, more often than not: no reason to run another model.
        raise InputError("the model's path is empty")
    config = flags.resolve(model, more, base=base)
    if config.model.path:
        return config
    # The demo model is so small that it needs settings of its own, below all that was given.
    demo = demo_model()
    return flags.resolve(str(demo), more, base=[*base, DEMO_PROFILE])


def demo_model() -> Path:
    """The model to use when none is given; made on first use. Raises InputError."""
    path = cache_dir() / "models" / _STAND_IN
    if path.exists():
        return path
    console.note(f"No model given: making a small synthetic one (it babbles) in {path}")
    make_synthetic(path, "tiny")
    return path


def make_synthetic(path: Path, shape: str) -> None:
    """Write a synthetic model of a named shape, with a progress bar. Raises InputError."""
    from engine.synth import SHAPES, write_model
    from tuiwork.progress import ProgressBar

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path.parent}: cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder "
            "that can be written, or give a model"
        ) from None
    with ProgressBar() as bar:
        write_model(
            path,
            SHAPES[shape],
            progress=lambda done, total: bar("writing the model", done / max(1, total)),
        )
