"""Profiles beside the settings in force: what differs, what to save, what to apply. No widgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import SETTINGS, RunConfig, get
from engine.errors import InputError
from engine.profile import load_profile, resolve
from engine.profile_edit import save_profile
from engine.profile_paths import user_profiles_dir

_NOT_OF_A_PROFILE = ("description", "model.path", "run.prompt", "run.system")
"""What belongs to a conversation or a machine, not to how a model is run."""


@dataclass(frozen=True)
class Difference:
    """A setting with two values."""

    key: str
    left: Any
    right: Any


def settings_of(name: str) -> RunConfig:
    """The settings under a profile alone. Raises InputError."""
    return resolve([name])


def differences(left: RunConfig, right: RunConfig) -> list[Difference]:
    """Every setting of a profile in which two configurations differ."""
    return [
        Difference(key, get(left, key), get(right, key))
        for key in SETTINGS
        if key not in _NOT_OF_A_PROFILE and get(left, key) != get(right, key)
    ]


def to_apply(in_force: RunConfig, profile: RunConfig) -> dict[str, Any]:
    """The settings that must change to run as under a profile."""
    return {found.key: found.right for found in differences(in_force, profile)}


def to_save(config: RunConfig, existing: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile has to say for `config`: what is no default, and what it says already."""
    changes = {}
    for key, spec in SETTINGS.items():
        if key in _NOT_OF_A_PROFILE:
            continue
        value = get(config, key)
        if value != spec.default or key in existing:
            changes[key] = value
    return {key: value for key, value in changes.items() if existing.get(key) != value}


def save(name: str, config: RunConfig) -> Path:
    """Save settings as the user's profile `name`, an existing one with its comments kept.

    Raises InputError.
    """
    if not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
        raise InputError(f"{name!r} cannot be a profile's name: give letters, digits and dashes")
    path = user_profiles_dir() / f"{name.removesuffix('.toml')}.toml"
    existing = load_profile(path) if path.exists() else {}
    save_profile(path, to_save(config, existing))
    return path
