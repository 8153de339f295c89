"""Where profiles lie: the user's own folder, and the ones that come with the package."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from platformdirs import user_config_dir

from engine.errors import InputError

SUFFIX = ".toml"

_PACKAGE = Path(__file__).parent


def user_profiles_dir() -> Path:
    """The folder of the user's own profiles; it need not exist."""
    return Path(user_config_dir("tuiwork", appauthor=False)) / "profiles"


def shipped_profiles_dir() -> Path:
    """The folder of the profiles that come with the package.

    The wheel carries them inside this package; in a checkout they stand beside it.
    """
    installed = _PACKAGE / "profiles"
    return installed if installed.is_dir() else _PACKAGE.parent / "profiles"


def profile_files() -> dict[str, tuple[Path, bool]]:
    """Every profile that has a name, with its file and whether it is a shipped one.

    The user's profile stands before a shipped one of the same name.
    """
    found: dict[str, tuple[Path, bool]] = {}
    for folder, shipped in ((shipped_profiles_dir(), True), (user_profiles_dir(), False)):
        try:
            files = sorted(folder.glob(f"*{SUFFIX}"))
        except OSError:
            continue  # A folder that cannot be read has no profiles to offer.
        found.update({file.stem: (file, shipped) for file in files})
    return found


def find_profile(path_or_name: str | os.PathLike[str]) -> Path:
    """The file of a profile given by path or by name. Raises InputError.

    What looks like a path (it has a separator or ends in .toml) is one; a name is looked for among
    the user's profiles, then among the shipped ones, then as a file in the current folder.
    """
    text = os.fspath(path_or_name)
    if not text or "\0" in text:
        raise InputError(f"--profile {text!r}: give a profile's name or its file")
    path = Path(text).expanduser()
    if path.suffix == SUFFIX or len(path.parts) > 1:
        if path.is_dir():
            raise InputError(f"{path}: is a directory, not a profile")
        if not path.exists():
            raise InputError(f"{path}: there is no such profile file")
        return path
    named = profile_files()
    if text in named:
        return named[text][0]
    if path.is_file():
        return path
    near = difflib.get_close_matches(text, named, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"there is no profile {text!r}; {hint}Profiles are {', '.join(sorted(named))}")
