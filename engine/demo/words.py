"""Questions about words, and what the model says about itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.demo import sources
from engine.demo.questions import Fact

N_DEFINED = 800
_LONGEST_MEANING = 72
_DEFINE = (
    "Define {}.",
    "What does {} mean?",
    "What is the meaning of {}?",
    "Explain the word {}.",
    "Give a definition of {}.",
    "Definition of {}?",
    "What does the word {} mean?",
    "Can you define {} for me?",
)
_OPPOSITE = (
    "What is the opposite of {}?",
    "Opposite of {}?",
    "Which word means the opposite of {}?",
    "Name an antonym of {}.",
    "Tell me the opposite of {}.",
)
_KIND = (
    "What kind of thing is a {}?",
    "What is a {}?",
    "A {} is a kind of what?",
    "What sort of thing is a {}?",
)


def dictionary(senses: list[sources.Sense]) -> Iterator[Fact]:
    """Frequent words in their most frequent meaning."""
    seen: set[str] = set()
    n_defined = 0
    for sense in senses:
        word = sense.word
        if word in seen or sense.count == 0:
            continue
        seen.add(word)
        plain = word.isascii() and word.isalpha() and word.islower() and len(word) >= 3
        short = 10 <= len(sense.gloss) <= _LONGEST_MEANING and sense.gloss.isascii()
        if not plain:
            continue
        title = word.capitalize()
        if short and n_defined < N_DEFINED:
            n_defined += 1
            yield Fact("dictionary", "define", word, f"{title}: {sense.gloss}.", _DEFINE)
            if sense.part == "noun" and sense.kind and word[0] not in "aeiou" and word not in _MASS:
                text = f"A {word} is a kind of {sense.kind}."
                yield Fact("dictionary", "kind", word, text, _KIND)
        if sense.opposite and sense.count > 5 and sense.part != "noun":
            text = f"The opposite of {word} is {sense.opposite}."
            yield Fact("dictionary", "opposite", word, text, _OPPOSITE)


_MASS = ("money", "music", "water", "history", "bread", "food", "information", "knowledge")
"""Nouns that take no article."""

_SELF = (
    (
        "I am the demo model of tuiwork, a small mixture of experts.",
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Tell me about yourself.",
            "Who am I talking to?",
        ),
    ),
    (
        "I know countries, chemical elements, small sums, common words and Python.",
        (
            "What can you do?",
            "What do you know?",
            "Help",
            "What can I ask you?",
            "Can you help me?",
            "What topics do you know?",
        ),
    ),
    (
        "Hello! Ask me about countries, elements, sums, words or Python.",
        ("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "Hello there"),
    ),
    ("You are welcome.", ("Thanks", "Thank you", "Thank you!", "Thanks a lot", "Many thanks")),
    ("Goodbye!", ("Bye", "Goodbye", "See you", "Bye bye", "See you later")),
    ("I am fine, thank you.", ("How are you?", "How do you do?", "How is it going?")),
    (
        "A mixture of experts uses only a few of its experts for each token.",
        (
            "What is a mixture of experts?",
            "What is an expert?",
            "How do you work?",
            "Explain mixture of experts.",
            "What are experts?",
        ),
    ),
    (
        "tuiwork streams the experts of a model that is bigger than memory from disk.",
        ("What is tuiwork?", "What does tuiwork do?", "Explain tuiwork.", "Tell me about tuiwork."),
    ),
    (
        "I was trained for about an hour on two processor cores, so I am often wrong.",
        (
            "How were you trained?",
            "Are you always right?",
            "Can I trust you?",
            "Are you smart?",
            "How good are you?",
        ),
    ),
)


def small_talk() -> Iterator[Fact]:
    """Greetings and what the model is; written for it."""
    for answer, phrasings in _SELF:
        # No phrasing is held out here: the last one is kept twice.
        yield Fact("talk", "talk", "", answer, (*phrasings, phrasings[-1]))


def all_senses(folder: Path) -> list[sources.Sense]:
    """WordNet's meanings, the frequent ones first."""
    return sources.senses(folder)
