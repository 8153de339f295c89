"""Texts of anybody's, and the windows that they are cut into."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import quality_corpus
from engine.demo.held_out import held_out_texts
from engine.errors import InputError
from engine.quality_corpus import cut_windows, pieces, read_corpus, shipped_texts


def test_a_text_comes_along_with_its_origin() -> None:
    found = read_corpus()
    assert found.name == "prose"
    assert 600 < len(found.text.split()) < 3000
    folder = shipped_texts()["prose"].parent
    assert "public domain" in (folder / "ORIGIN.md").read_text()


def test_the_demo_models_own_text_begins_with_all_kinds() -> None:
    if "demo" not in shipped_texts():
        pytest.skip("the demo model's text is not here")
    text = read_corpus("demo").text
    kinds = held_out_texts()
    assert all(document in text for documents in kinds.values() for document in documents)
    start = text[: len(text) // 10]
    assert all(any(d[:40] in start for d in documents) for documents in kinds.values())


def test_any_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text.md"
    path.write_bytes(b"\xef\xbb\xbf" + "schöne Wörter\n".encode())
    assert read_corpus(str(path)).text == "schöne Wörter\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"first\nsecond \xe9\n", "text.txt:2: is not UTF-8: byte 0xe9 at offset 13"),
        (b"ends in half a character \xc3", "text.txt:1: is not UTF-8"),
        ("UTF-16".encode("utf-16"), "is UTF-16, not UTF-8; convert it"),
        (b"GGUF\x03\0\0\0", "is a model, not a text"),
        (b"a\0b", "is data and no text"),
    ],
)
def test_what_is_no_text_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_corpus(str(path))
    assert message in str(caught.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file, and no text of this name.*prose"):
        read_corpus(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="is a directory"):
        read_corpus(str(tmp_path))


def test_a_huge_file_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_corpus, "LARGEST_TEXT_BYTES", 7)
    path = tmp_path / "text.txt"
    path.write_text("äöüäöü")
    found = read_corpus(str(path))
    # Half a character at the end of what was read is no fault of the file.
    assert (found.text, found.cut) == ("äöü", True)


@given(st.text(alphabet="ab \n", max_size=300), st.integers(2, 40))
def test_pieces_make_the_text_again(text: str, longest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality_corpus, "_PIECE_CHARS", longest)
        found = list(pieces(text))
    assert "".join(found) == text
    assert all(0 < len(piece) <= longest for piece in found)


@given(st.integers(2, 400), st.integers(20, 90), st.integers(0, 10), st.booleans())
def test_windows_score_each_token_once_and_fit(
    n: int, n_ctx: int, n_prompt: int, has_bos: bool
) -> None:
    tokens = list(range(1000, 1000 + n))
    bos = 1 if has_bos else None
    try:
        windows = cut_windows(tokens, n_ctx, n_prompt, bos)
    except InputError:
        assert n - 1 - n_prompt + has_bos < 2
        return
    targets = [token for window in windows for token in window.targets]
    assert len(set(targets)) == len(targets)
    for window in windows:
        assert len(window.tokens) <= n_ctx
        assert len(window.targets) == len(window.tokens) - n_prompt
        assert (window.tokens[0] == bos) == has_bos
        # Each target is what comes behind the token that was decoded.
        for decoded, target in zip(window.tokens[n_prompt:], window.targets, strict=True):
            assert target == decoded + 1 or decoded == bos
    # All but prompts, and what is too little for a window, is scored.
    assert len(targets) > n - (len(windows) + 1) * (n_prompt + 1) - 16


def test_a_context_without_room_is_named() -> None:
    with pytest.raises(InputError, match="no room behind a prompt of 64"):
        cut_windows(list(range(500)), 64, 64)
    with pytest.raises(InputError, match="the text has 20 tokens, too few"):
        cut_windows(list(range(20)), 512, 64)
