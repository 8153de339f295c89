"""Which model a command means, and with which settings it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from engine.config import RunConfig
from engine.demo import DEMO_MODEL
from engine.errors import InputError
from tuiwork.settings import CommonFlags

DEMO_PROFILE = "demo"


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
    """The model to use when none is given; it comes along. Raises InputError if it does not."""
    if not DEMO_MODEL.is_file():
        raise InputError(f"{DEMO_MODEL} is missing: install tuiwork again, or give a model")
    return DEMO_MODEL
