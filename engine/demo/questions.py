"""Questions and answers made from the sources by templates.

Each kind of question has several phrasings; the last one is held out: training never shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from engine.demo import sources


@dataclass(frozen=True)
class Fact:
    """One thing to know."""

    domain: str
    kind: str
    asked: str
    """what the question is about, as it stands in the question"""
    answer: str
    phrasings: tuple[str, ...]
    follow_up: str = "And {}?"

    def questions(self) -> list[str]:
        """The phrasings that training may show."""
        return [phrasing.format(self.asked) for phrasing in self.phrasings[:-1]]

    @property
    def held_out_question(self) -> str:
        """The phrasing that training never shows."""
        return self.phrasings[-1].format(self.asked)


_CAPITAL = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Name the capital of {}.",
    "Capital of {}?",
    "Tell me the capital of {}.",
    "What city is the capital of {}?",
    "Do you know the capital of {}?",
    "Please tell me what the capital of {} is.",
)
_CAPITAL_OF = (
    "Which country has the capital {}?",
    "{} is the capital of which country?",
    "Of which country is {} the capital?",
    "What country is {} the capital of?",
)
_CONTINENT = (
    "Which continent is {} in?",
    "On which continent is {}?",
    "What continent is {} on?",
    "Where is {}?",
    "Where in the world is {}?",
)
_CURRENCY = (
    "What is the currency of {}?",
    "Which currency does {} use?",
    "What money is used in {}?",
    "Currency of {}?",
    "With what currency do people pay in {}?",
)
_NEIGHBOURS = (
    "Which countries border {}?",
    "What are the neighbours of {}?",
    "Which countries are next to {}?",
    "Name the neighbours of {}.",
    "What countries does {} have a border with?",
)
_DOMAIN = (
    "What is the internet domain of {}?",
    "What is the top level domain of {}?",
    "Internet domain of {}?",
    "Which internet domain belongs to {}?",
)
_PHONE = (
    "What is the calling code of {}?",
    "What is the phone code of {}?",
    "Calling code of {}?",
    "With which code do I call {}?",
)
_CITY = (
    "In which country is {}?",
    "Where is the city {}?",
    "Which country is {} in?",
    "What country does the city {} belong to?",
)


def geography() -> Iterator[Fact]:
    """Countries and cities."""
    for c in sources.countries():
        name = c.the
        start = name[0].upper() + name[1:]
        kind = "geography"
        yield Fact(kind, "capital", name, f"The capital of {name} is {c.capital}.", _CAPITAL)
        if c.capital != c.name:
            text = f"{c.capital} is the capital of {name}."
            yield Fact(kind, "capital of", c.capital, text, _CAPITAL_OF)
        yield Fact(kind, "continent", name, f"{start} is in {c.continent}.", _CONTINENT)
        text = f"The currency of {name} is the {c.currency}."
        yield Fact(kind, "currency", name, text, _CURRENCY)
        text = (
            f"{start} borders {listed(c.neighbours)}."
            if c.neighbours
            else (f"{start} has no land borders.")
        )
        yield Fact(kind, "neighbours", name, text, _NEIGHBOURS)
        text = f"The internet domain of {name} is {c.domain}."
        yield Fact(kind, "domain", name, text, _DOMAIN)
        if c.phone:
            text = f"The calling code of {name} is +{c.phone}."
            yield Fact(kind, "phone", name, text, _PHONE)
        for city in c.cities:
            yield Fact(kind, "city", city, f"{city} is in {name}.", _CITY)


_SYMBOL = (
    "What is the chemical symbol of {}?",
    "What is the symbol for {}?",
    "Which symbol does {} have?",
    "Chemical symbol of {}?",
    "What is the symbol of the element {}?",
    "How is {} written in chemistry?",
)
_OF_SYMBOL = (
    "Which element has the symbol {}?",
    "What element is {}?",
    "What does the chemical symbol {} stand for?",
    "Which chemical element is written {}?",
)
_NUMBER = (
    "What is the atomic number of {}?",
    "Atomic number of {}?",
    "Which atomic number does {} have?",
    "How many protons does {} have?",
    "Tell me the atomic number of {}.",
)
_OF_NUMBER = (
    "Which element has the atomic number {}?",
    "What is element {}?",
    "Element number {}?",
    "What element has {} protons?",
)
_KIND = (
    "What kind of element is {}?",
    "Is {} a metal?",
    "What type of element is {}?",
    "To which kind of elements does {} belong?",
)
_YEAR = (
    "When was {} discovered?",
    "In which year was {} discovered?",
    "What year was {} found?",
)
_ORIGIN = (
    "Where does the name {} come from?",
    "What is the origin of the name {}?",
    "Why is {} called that?",
)
_PLACE = (
    "Where is {} in the periodic table?",
    "In which group and period is {}?",
    "What is the place of {} in the periodic table?",
)


def chemistry() -> Iterator[Fact]:
    """The elements."""
    for e in sources.elements():
        name, low, kind = e.name, e.name.lower(), "chemistry"
        yield Fact(kind, "symbol", low, f"The symbol of {low} is {e.symbol}.", _SYMBOL)
        yield Fact(kind, "of symbol", e.symbol, f"{e.symbol} is {low}.", _OF_SYMBOL)
        yield Fact(kind, "number", low, f"The atomic number of {low} is {e.number}.", _NUMBER)
        text = f"Element {e.number} is {low}."
        yield Fact(kind, "of number", str(e.number), text, _OF_NUMBER)
        article = "an" if e.kind[0] in "aeiou" else "a"
        yield Fact(kind, "kind", low, f"{name} is {article} {e.kind}.", _KIND)
        text = (
            f"{name} was discovered in {e.year}." if e.year else f"{name} is known since antiquity."
        )
        if e.year or e.number < 90:
            yield Fact(kind, "year", low, text, _YEAR)
        if e.origin:
            yield Fact(kind, "origin", low, f"{e.origin}.", _ORIGIN)
        place = f"group {e.group}, period {e.period}" if e.group else f"period {e.period}"
        yield Fact(kind, "place", low, f"{name} is in {place}.", _PLACE)


_PYTHON = (
    "What does {} do?",
    "What does {} do in Python?",
    "What is {} for in Python?",
    "Explain {}.",
    "What does {} return?",
    "Tell me about {}.",
    "What is the purpose of {}?",
)
_MODULE = (
    "What is the module {} for?",
    "What does the {} module do?",
    "Explain the Python module {}.",
    "Tell me about the {} module.",
    "What can I do with the module {}?",
)
_WHERE = (
    "Which module has {}?",
    "In which module is {}?",
    "From which module do I import {}?",
    "Where do I find {} in Python?",
)


def python() -> Iterator[Fact]:
    """The standard library."""
    things = sources.python_things()
    homes = Counter(thing.name.rpartition(".")[2] for thing in things)
    for thing in things:
        text = f"{thing.about}."
        if thing.module:
            called = f"{thing.name}()" if thing.module == "builtins" else thing.name
            yield Fact("python", "does", called, text, _PYTHON)
        else:
            yield Fact("python", "module", thing.name, text, _MODULE)
        short = thing.name.rpartition(".")[2]
        if thing.module not in ("", "builtins", "os.path") and homes[short] == 1:
            text = f"{short} is in the module {thing.module}."
            yield Fact("python", "where", short, text, _WHERE)


def listed(names: list[str]) -> str:
    """Names as a sentence has them."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
