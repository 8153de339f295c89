"""Lines of keys: found in every way that TOML lets one write a key."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.toml_lines import KeyPath, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a = 1\nb = 2\n", ("b",), 2),
        ("\n# a = 0\na = 1", ("a",), 3),
        ("[t]\r\na = 1\r\n", ("t", "a"), 2),
        ('s = """\n[t]\na = 1\n"""\n[t]\na = 2', ("t", "a"), 6),
        ("s = '''\na = \"\n'''\nb = 1", ("b",), 4),
        ('s = """x"""""\nb = 1', ("b",), 2),
        ("s = '''x'''''\nb = 1", ("b",), 2),
        ('s = "a # \\" b"\nb = 1', ("b",), 2),
        ("t.a = 1", ("t", "a"), 1),
        ("t . a = 1", ("t", "a"), 1),
        ('"t"."a b" = 1', ("t", "a b"), 1),
        ("'t.x'.a = 1", ("t.x", "a"), 1),
        ('"\\u0061" = 1', ("a",), 1),
        ("t = {x = 1, a = 2}", ("t", "a"), 1),
        ("l = [1, # ]\n 2,\n]\nb = 1", ("b",), 4),
        ("l = [\n \"]\", ['#'],\n {x = 1}, # }\n]\nb = 1", ("b",), 5),
        ("[[t]]\na = 1\n[[t]]\nb = 1", ("t", "b"), 4),
        ("[ t . u ] # c\na = 1", ("t", "u", "a"), 2),
        ("d = 1979-05-27 07:32:00\nb = 1", ("b",), 2),
        ("e = -1.5e+3\nb = inf", ("b",), 2),
    ],
)
def test_a_key_is_found_at_its_line(text: str, key: KeyPath, line: int) -> None:
    tomllib.loads(text)
    assert key_lines(text)[key] == line


def test_an_empty_document_has_no_keys() -> None:
    assert key_lines("") == {}
    assert key_lines("# only a comment") == {}


_KEYS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,5}", fullmatch=True),
    st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=5),
)
_VALUES = st.recursive(
    st.one_of(st.integers(-(2**60), 2**60), st.booleans(), st.text(max_size=12), st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
    max_leaves=8,
)


def _paths(document: dict[str, Any], above: KeyPath = ()) -> set[KeyPath]:
    found: set[KeyPath] = set()
    for name, value in document.items():
        found.add((*above, name))
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                found |= _paths(item, (*above, name))
    return found


@given(st.dictionaries(_KEYS, _VALUES, max_size=5))
def test_the_scanner_sees_the_keys_that_the_reader_sees(document: dict[str, Any]) -> None:
    import tomlkit

    text = tomlkit.dumps(document)
    read = tomllib.loads(text)
    lines = key_lines(text)
    # Lists within lists keep their tables below the outermost key, as the scanner does.
    assert _paths(read) <= set(lines)
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())
