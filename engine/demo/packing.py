"""Rows for training: documents one after the other, as many as fit. Needs numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GO_ON = 0.35
"""How often an exchange is followed by one more in the same conversation."""
END_WEIGHT = 5

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Documents of one kind; document i is `ids[bounds[i]:bounds[i + 1]]`."""

    name: str
    ids: Any
    weights: Any
    bounds: Any

    @property
    def is_text(self) -> bool:
        """Running text, not a conversation."""
        return self.name.startswith("text ")


@dataclass(frozen=True)
class Rows:
    """Token ids, loss weights and document numbers, each [rows, length]."""

    ids: Ids
    weights: npt.NDArray[np.float32]
    documents: Ids


class Packer:
    """Draws rows; after `seed` with the same numbers it draws the same ones."""

    def __init__(self, path: Path, shares: Mapping[str, float], end: int) -> None:
        """`path` is what `corpus` wrote, `end` the id of the token that ends a document."""
        with np.load(path) as arrays:
            self._groups = [
                Group(name, *(arrays[f"{name}/{part}"] for part in ("ids", "weights", "bounds")))
                for name in shares
            ]
        # The shares count tokens, but documents are drawn.
        lengths = np.array([len(g.ids) / (len(g.bounds) - 1) for g in self._groups])
        chances = np.array([shares[g.name] for g in self._groups]) / lengths
        self._chances = chances / chances.sum()
        chats = np.array([not g.is_text for g in self._groups])
        self._chat_chances = chances * chats / (chances * chats).sum()
        self._end = end
        self.rng = np.random.default_rng(0)

    def seed(self, *numbers: int) -> None:
        """Begin anew with these numbers, so that nothing need be kept to go on later."""
        self.rng = np.random.default_rng(numbers)

    def rows(self, count: int, length: int) -> Rows:
        """`count` full rows of `length` tokens."""
        ids = np.zeros((count, length), np.int64)
        weights = np.zeros((count, length), np.float32)
        documents = np.zeros((count, length), np.int64)
        for row in range(count):
            at, number = 0, 0
            while at < length:
                some, their = self._document(length - at)
                some, their = some[: length - at], their[: length - at]
                stop = at + len(some)
                ids[row, at:stop], weights[row, at:stop] = some, their
                documents[row, at:stop] = number
                # What begins a document cannot be known from the one before.
                weights[row, at] = 0
                at, number = stop, number + 1
        return Rows(ids, weights / np.float32(10), documents)

    def _document(self, room: int) -> tuple[Any, Any]:
        group = self._groups[self.rng.choice(len(self._groups), p=self._chances)]
        pieces = [self._draw(group)]
        if group.is_text:
            surplus = len(pieces[0][0]) + 1 - room
            if surplus > 0:
                start = self.rng.integers(0, surplus + 1)
                return pieces[0][0][start:], pieces[0][1][start:]
        else:
            while self.rng.random() < GO_ON:
                # More often than not people stay with their subject.
                if self.rng.random() < 0.5:
                    group = self._groups[self.rng.choice(len(self._groups), p=self._chat_chances)]
                pieces.append(self._draw(group))
        pieces.append((np.array([self._end]), np.array([END_WEIGHT])))
        ids, weights = zip(*pieces, strict=True)
        return np.concatenate(ids), np.concatenate(weights)

    def _draw(self, group: Group) -> tuple[Any, Any]:
        i = self.rng.integers(len(group.bounds) - 1)
        part = slice(group.bounds[i], group.bounds[i + 1])
        return group.ids[part], group.weights[part]


def held_out_rows(texts: list[list[int]], count: int, length: int, end: int) -> tuple[Rows, int]:
    """The first `count` rows of held-out documents, unseen ends cut off, and their documents."""
    ids = np.full((count, length), end, np.int64)
    weights = np.zeros((count, length), np.float32)
    documents = np.full((count, length), -1, np.int64)
    row = at = number = 0
    for text in texts:
        some = [*text, end][:length]
        if at + len(some) > length:
            row, at = row + 1, 0
        if row == count:
            break
        stop = at + len(some)
        ids[row, at:stop] = some
        weights[row, at + 1 : stop] = 1
        documents[row, at:stop] = number
        at, number = stop, number + 1
    return Rows(ids, weights, documents), number
