"""Untrusted text cannot act on a terminal, and amounts read well."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuiwork.text import known, one_line, sanitize, size, size_range


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 漢字 👍", "plain äöü 漢字 👍"),
        ("a\n\tb", "a\n\tb"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\x00\x7f", "a␍b␀␡"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_become_visible(text: str, shown: str) -> None:
    assert sanitize(text) == shown


@given(st.text(st.characters(categories=None)))
def test_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    for character in sanitize(text):
        assert character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    sanitize(text).encode("utf-8")


@given(st.text(), st.integers(min_value=0))
def test_pieces_of_a_text_are_sanitized_as_the_whole(text: str, cut: int) -> None:
    cut = min(cut, len(text))
    assert sanitize(text[:cut]) + sanitize(text[cut:]) == sanitize(text)


def test_one_line_has_one_line() -> None:
    assert one_line("a\n\n b\r\nc\x1b") == "a b c␛"


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (950 * 2**20, "950 MiB"),
        (1023 * 2**20, "0.999 GiB"),
        (17 * 2**30, "17 GiB"),
        (400 * 2**40, "400 TiB"),
    ],
)
def test_sizes(amount: int, shown: str) -> None:
    assert size(amount) == shown


def test_ranges_and_unknowns() -> None:
    assert size_range([]) == "none"
    assert size_range([2048, 2048]) == "2 KiB"
    assert size_range([4096, 2048]) == "2 KiB to 4 KiB"
    assert known(None) == known(-1.0) == known(float("nan")) == "unknown"
    assert known(8.2345, ".1f", "tok/s") == "8.2 tok/s"
