"""Text that training never read, a list of documents for each domain. Needs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

HELD_OUT = Path(__file__).parent / "held-out.json"
TOKENS = 3000
"""About so many are read of each domain, unless another number is asked for."""


def held_out_texts(path: Path = HELD_OUT) -> dict[str, list[str]]:
    """The documents by domain."""
    texts: dict[str, list[str]] = json.loads(path.read_text())
    return texts


def enough(documents: Iterable[Sequence[int]], most_tokens: int) -> Iterator[Sequence[int]]:
    """The first documents that have about `most_tokens` together, their first ones left out."""
    n_tokens = 0
    for document in documents:
        if n_tokens >= most_tokens:
            return
        n_tokens += len(document) - 1
        yield document
