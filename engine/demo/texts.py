"""Running text of each domain, what training may read apart from what is held out.

Which text is held out depends only on the text: the same one in every run.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.demo import arithmetic, sources
from engine.demo.questions import listed

_N_SENSES = 9000
_BOOKS = ("Ge", "Exo", "Ruth", "1Sm", "Prv", "Eccl", "Jonah", "Mat", "Mark", "Luke", "John")
_PIECE = 700
"""Characters of running text in one document, about."""


@dataclass(frozen=True)
class Texts:
    """The texts of a domain."""

    domain: str
    seen: list[str]
    held_out: list[str]


def all_texts(wordnet: Path, verses: Path, seed: int) -> list[Texts]:
    """The running text of every domain."""
    rng = random.Random(seed)
    return [
        _profiles("geography", [_country(c) for c in sources.countries()], rng),
        _profiles("chemistry", [_element(e) for e in sources.elements()], rng),
        Texts(
            "arithmetic",
            arithmetic.texts(rng, 3000, held_out=False),
            arithmetic.texts(rng, 60, held_out=True),
        ),
        _dictionary(wordnet),
        _python(),
        _prose(verses),
    ]


def _profiles(domain: str, facts: list[list[str]], rng: random.Random) -> Texts:
    """Every subject's sentences in many orders; the orders held out are never seen."""
    seen: list[str] = []
    held_out: list[str] = []
    for sentences in facts:
        texts: set[str] = set()
        for _ in range(40):
            rest = sentences[1:]
            rng.shuffle(rest)
            texts.add(" ".join([sentences[0], *rest[: rng.randint(2, len(rest))]]))
        for text in sorted(texts):
            (held_out if _chosen(text, 40) else seen).append(text)
    return Texts(domain, seen, held_out)


def _country(c: sources.Country) -> list[str]:
    name = c.the
    start = name[0].upper() + name[1:]
    sentences = [
        f"{start} is a country in {c.continent}.",
        f"Its capital is {c.capital}.",
        f"People in {name} pay with the {c.currency}.",
        f"It borders {listed(c.neighbours)}." if c.neighbours else "It has no land borders.",
        f"Its internet domain is {c.domain}.",
    ]
    if c.phone:
        sentences.append(f"Calls to {name} begin with +{c.phone}.")
    if c.cities:
        sentences.append(f"Large cities are {listed(c.cities)}.")
    return sentences


def _element(e: sources.Element) -> list[str]:
    article = "an" if e.kind[0] in "aeiou" else "a"
    sentences = [
        f"{e.name} is {article} {e.kind}.",
        f"Its symbol is {e.symbol}.",
        f"It has the atomic number {e.number}.",
        f"It is in period {e.period}" + (f" and group {e.group}." if e.group else "."),
    ]
    if e.year:
        sentences.append(f"It was discovered in {e.year}.")
    if e.origin:
        sentences.append(f"Its name: {e.origin}.")
    return sentences


def _dictionary(folder: Path) -> Texts:
    texts = []
    for sense in sources.senses(folder)[:_N_SENSES]:
        examples = "".join(f' "{example}"' for example in sense.examples[:2])
        texts.append(f"{sense.word} ({sense.part}): {sense.gloss}.{examples}")
    # Words of one meaning share its text, so the meaning decides.
    return _split("dictionary", texts, lambda text: text.partition(": ")[2], 40)


def _python() -> Texts:
    seen: list[str] = []
    held_out: list[str] = []
    for name, text in sources.python_texts().items():
        code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        pieces = _pieces(re.split(r"\n(?=(?:class|def|@|if|import|from) ?)|\n\n", code), "\n\n")
        (held_out if _chosen(name, 12) else seen).extend(pieces)
    return Texts("python", seen, held_out)


def _prose(path: Path) -> Texts:
    chapters: dict[str, list[str]] = {}
    for chapter, verse in sources.verses(path):
        if re.match(r"\d?[A-Za-z]+", chapter)[0] in _BOOKS:  # type: ignore[index]
            chapters.setdefault(chapter, []).append(verse)
    seen: list[str] = []
    held_out: list[str] = []
    for chapter, verses in chapters.items():
        (held_out if _chosen(chapter, 25) else seen).extend(_pieces(verses, " "))
    return Texts("prose", seen, held_out)


def _pieces(parts: list[str], between: str) -> list[str]:
    pieces = [""]
    for part in parts:
        if len(pieces[-1]) > _PIECE:
            pieces.append("")
        pieces[-1] += (between if pieces[-1] else "") + part
    return [piece[: 2 * _PIECE] for piece in pieces]


def _split(domain: str, texts: list[str], key: Callable[[str], str], one_in: int) -> Texts:
    seen = [text for text in texts if not _chosen(key(text), one_in)]
    return Texts(domain, seen, [text for text in texts if _chosen(key(text), one_in)])


def _chosen(text: str, one_in: int) -> bool:
    return zlib.crc32(text.encode()) % one_in == 0
