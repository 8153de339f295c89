"""Sums, differences, products and comparisons of small numbers; a tenth is held out."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from engine.demo.questions import Fact

_SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_PHRASINGS = (
    "{a} {sign} {b}",
    "What is {a} {sign} {b}?",
    "{a}{sign}{b}",
    "Calculate {a} {sign} {b}.",
    "What is {a} {word} {b}?",
    "How much is {a} {sign} {b}?",
    "{a} {sign} {b} = ?",
    "Can you work out {a} {sign} {b}?",
)


def is_held_out(a: int, sign: str, b: int) -> bool:
    """Whether training never shows this sum, in no phrasing."""
    return zlib.crc32(f"{a}{sign}{b}".encode()) % 10 == 0


def sums() -> Iterator[tuple[int, str, int, int]]:
    """Every (a, sign, b, result)."""
    for a in range(100):
        for b in range(100):
            yield a, "+", b, a + b
            if a >= b:
                yield a, "-", b, a - b
    for a in range(13):
        for b in range(13):
            yield a, "*", b, a * b
            if b:
                yield a * b, "/", b, a


def fact(a: int, sign: str, b: int, result: int) -> Fact:
    """A sum as question and answer."""
    kind = "times" if sign in "*/" else "sums"
    texts = tuple(
        p.format(a=a, b=b, sign=sign, word=_SIGNS[sign]).replace("{", "").replace("}", "")
        for p in _PHRASINGS
    )
    return Fact("arithmetic", kind, "", f"{a} {sign} {b} = {result}", texts)


def facts(*, held_out: bool) -> list[Fact]:
    """Questions about sums that are (not) held out."""
    return [fact(a, sign, b, c) for a, sign, b, c in sums() if is_held_out(a, sign, b) == held_out]


def texts(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """Running text: a few sums under each other."""
    all_sums = [s for s in sums() if is_held_out(*s[:3]) == held_out]
    return [
        "\n".join(f"{a} {sign} {b} = {c}" for a, sign, b, c in rng.sample(all_sums, 8))
        for _ in range(count)
    ]
