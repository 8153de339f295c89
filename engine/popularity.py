"""How often the experts of a model were used, kept from session to session.

One small file for each model in the user's cache folder, named by what the model's files hold: a
model that is renamed, moved or copied keeps it, and a file of other contents never gets it.

    tuiwork-popularity 1 LAYERS EXPERTS PASSES CRC\\n
    LAYERS * EXPERTS little-endian floats: uses of each expert

A pass is one decoded token or one batch of a prompt, in which an expert is used or not. What was
counted halves in `HALF_LIFE` passes of later sessions, so that it follows what the user does.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from platformdirs import user_cache_dir

from engine.whole_file import write_whole

MAGIC = b"tuiwork-popularity 1"
SUFFIX = ".popularity"
HALF_LIFE = 4096
"""Passes after which an earlier use counts half."""

MOST_FILES = 32
"""Files that are kept; the ones written longest ago go."""

_LONGEST_HEADER = 120
_SAMPLE_BYTES, _SAMPLES = 4096, 16
"""Pages of the weights that are looked at, over all parts; at least one of each."""


@dataclass
class Popularity:
    """Uses by (routed layer, expert), and the passes in which they were counted."""

    uses: np.ndarray
    passes: float

    @classmethod
    def none(cls, n_layer: int, n_expert: int) -> Popularity:
        """Nothing is known yet."""
        return cls(np.zeros((n_layer, n_expert), np.float32), 0.0)

    @property
    def rates(self) -> np.ndarray:
        """The share of passes in which each expert was used, from 0 to 1."""
        if self.passes <= 0:
            return np.zeros_like(self.uses)
        shares: np.ndarray = np.clip(self.uses.astype(float) / self.passes, 0, 1)
        return shares

    def later(self, uses: np.ndarray, passes: float) -> Popularity:
        """With what was counted since; what was known before has faded by so much."""
        kept = 0.5 ** (passes / HALF_LIFE)
        return Popularity((self.uses * kept + uses).astype(np.float32), self.passes * kept + passes)

    def to_bytes(self) -> bytes:
        """As the file holds it."""
        n_layer, n_expert = self.uses.shape
        content = self.uses.astype("<f4").tobytes()
        head = f" {n_layer} {n_expert} {self.passes!r} {zlib.crc32(content)}\n"
        return MAGIC + head.encode() + content

    @classmethod
    def from_bytes(cls, data: bytes, n_layer: int, n_expert: int) -> Popularity | None:
        """What a file says of a model of this shape; None if it is damaged or of another."""
        head, _, content = data.partition(b"\n")
        if len(head) > _LONGEST_HEADER or not head.startswith(MAGIC + b" "):
            return None
        try:
            layers, experts, passes, checksum = head[len(MAGIC) :].decode("ascii").split()
            shape, n_passes = (int(layers), int(experts)), float(passes)
            intact = int(checksum) == zlib.crc32(content)
        except ValueError:
            return None
        if shape != (n_layer, n_expert) or len(content) != 4 * n_layer * n_expert or not intact:
            return None
        uses = np.frombuffer(content, "<f4").reshape(shape).astype(np.float32)
        if not (math.isfinite(n_passes) and n_passes >= 0 and np.isfinite(uses).all()):
            return None
        return cls(uses, n_passes) if (uses >= 0).all() else None


def folder() -> Path:
    """Where the files are; it need not exist."""
    return Path(user_cache_dir("tuiwork", appauthor=False)) / "popularity"


def identity(paths: Sequence[Path], sizes: Sequence[int], data_offsets: Sequence[int]) -> str:
    """A name for what a model's files hold, wherever they lie.

    Made of each part's size and header and of a few pages of its weights, so that two fine-tunes
    of one model differ. Reads some megabytes of a model of any size. Raises OSError.
    """
    digest = hashlib.blake2b(digest_size=20)
    for path, size, start in zip(paths, sizes, data_offsets, strict=True):
        digest.update(f"{size} {start}\n".encode())
        with open(path, "rb") as file:
            digest.update(file.read(start))
            step = max(_SAMPLE_BYTES, (size - start) * len(paths) // _SAMPLES)
            for place in range(start, size, step):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, place))
    return digest.hexdigest()


def read(path: Path, n_layer: int, n_expert: int) -> Popularity | None:
    """What is known of a model of this shape; None: nothing. Raises OSError."""
    most = _LONGEST_HEADER + 1 + 4 * n_layer * n_expert
    try:
        with open(path, "rb") as file:
            return Popularity.from_bytes(file.read(most + 1), n_layer, n_expert)
    except FileNotFoundError:
        return None


def write(path: Path, popularity: Popularity) -> None:
    """Keep it, and forget the models that were used longest ago. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, popularity.to_bytes(), mode=0o600)
    _forget_old(path.parent)


def _forget_old(where: Path) -> None:
    written: list[tuple[float, Path]] = []
    for file in where.glob("*" + SUFFIX):
        with suppress(OSError):  # another process may remove it at the same time
            written.append((file.stat().st_mtime, file))
    for _, file in sorted(written)[:-MOST_FILES]:
        with suppress(OSError):
            file.unlink()
