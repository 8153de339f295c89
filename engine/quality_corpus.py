"""The text that quality is measured on: read, tokenised in pieces, cut into windows.

A text may be any file of anybody's: it is read up to a limit, must be UTF-8, and its tokens are
plain text (`<|im_end|>` written in a text is no control token here).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.demo.held_out import HELD_OUT, held_out_texts
from engine.errors import InputError
from engine.vocabulary import Vocabulary

LARGEST_TEXT_BYTES = 16 * 2**20
"""Some three million tokens: more than anybody decodes one by one."""
FEWEST_IN_WINDOW = 16
"""A last window with fewer scored tokens is left out: its tokens have nearly no context."""

_PIECE_CHARS = 8192
"""Some tokenisers match with recursion: a piece must not be as long as a hostile file likes."""
_FOLDER = Path(__file__).resolve().parent / "quality_text"
DEFAULT_TEXT = "prose"
DEMO_TEXT = "demo"
"""What the demo model's own text is called."""


@dataclass(frozen=True)
class Corpus:
    """A text and where it came from."""

    name: str
    text: str
    cut: bool = False
    """Whether the file was longer than what was read."""


def shipped_texts() -> dict[str, Path]:
    """The texts that come along, by name, and the files that they are in."""
    found = {path.stem: path for path in sorted(_FOLDER.glob("*.txt"))}
    return found | ({DEMO_TEXT: HELD_OUT} if HELD_OUT.exists() else {})


def read_corpus(name_or_path: str | None = None) -> Corpus:
    """A shipped text by its name, or any file; None: the shipped default.

    Raises InputError for what cannot be read as a text in UTF-8.
    """
    shipped = shipped_texts()
    name = name_or_path or DEFAULT_TEXT
    path = Path(name).expanduser()
    if name in shipped and not path.exists():
        text = demo_text() if name == DEMO_TEXT else _decoded(*_read(shipped[name]), path)
        return Corpus(name, text)
    if not path.exists():
        raise InputError(
            f"{name}: there is no such file, and no text of this name comes along; "
            f"those that do: {', '.join(shipped)}"
        )
    raw, cut = _read(path)
    return Corpus(str(path), _decoded(raw, cut, path), cut)


def demo_text() -> str:
    """What the demo model was not trained on, of every kind that it was trained on, mixed.

    The next document is of the kind that had the least so far, so that the beginning of the text
    has all kinds.
    """
    kinds = {kind: iter(documents) for kind, documents in held_out_texts().items()}
    said = dict.fromkeys(kinds, 0)
    found: list[str] = []
    while kinds:
        kind = min(kinds, key=lambda kind: said[kind])
        document = next(kinds[kind], None)
        if document is None:
            del kinds[kind]
            continue
        found.append(document)
        said[kind] += len(document)
    return "\n\n".join(found) + "\n"


def _read(path: Path) -> tuple[bytes, bool]:
    if path.is_dir():
        raise InputError(f"{path}: is a directory; give a text file")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_TEXT_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return raw[:LARGEST_TEXT_BYTES], len(raw) > LARGEST_TEXT_BYTES


def _decoded(raw: bytes, cut: bool, path: Path) -> str:
    if raw.startswith(b"GGUF"):
        raise InputError(f"{path}: is a model, not a text")
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(
            f"{path}: is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 {path}"
        )
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        # A character may be cut at the end of what was read, but not at the end of a file.
        text = decoder.decode(raw.removeprefix(codecs.BOM_UTF8), final=not cut)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "if it is text in another encoding, convert it with iconv"
        ) from None
    if "\0" in text:
        raise InputError(f"{path}: holds NUL characters, so it is data and no text")
    if not text.strip():
        raise InputError(f"{path}: is empty: give a text of at least some hundred words")
    return text


def text_tokens(vocabulary: Vocabulary, text: str, limit: int) -> list[int]:
    """The first `limit` tokens of a text (0: all), as plain text and without a begin token."""
    tokens: list[int] = []
    for piece in pieces(text):
        tokens += vocabulary.tokenize(piece, add_special=False, parse_special=False)
        if limit and len(tokens) >= limit:
            return tokens[:limit]
    return tokens


def begin_token(vocabulary: Vocabulary) -> int | None:
    """The token that the model wants before a text, or None."""
    begin = vocabulary.tokenize("", add_special=True, parse_special=False)
    return begin[0] if vocabulary.adds_bos and begin else None


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of bounded length, cut behind a line or a blank where there is one."""
    position = 0
    while position < len(text):
        end = min(position + _PIECE_CHARS, len(text))
        if end < len(text):
            middle = position + _PIECE_CHARS // 2
            # Before a blank, because tokenisers put it at the beginning of the next word.
            newline, blank = text.rfind("\n", middle, end), text.rfind(" ", middle, end)
            end = newline + 1 if newline >= 0 else blank if blank >= 0 else end
        yield text[position:end]
        position = end


@dataclass(frozen=True)
class Window:
    """Tokens that go through an empty context together."""

    tokens: list[int]
    """What is decoded, begin token included."""
    n_prompt: int
    """The first of them, which are the prompt: read, not scored."""
    targets: list[int]
    """For each decoded token behind the prompt, the text's own next token."""


def cut_windows(
    tokens: Sequence[int], n_ctx: int, n_prompt: int, bos: int | None = None
) -> list[Window]:
    """Windows of at most `n_ctx` tokens, each with a prompt of `n_prompt` and a begin token.

    The text's own last token is only a target, so a window of n tokens scores n - 1 - n_prompt.
    Raises InputError where nothing could be scored.
    """
    head = [] if bos is None else [bos]
    if n_ctx < n_prompt + 2:  # two tokens are scored at least
        raise InputError(
            f"a context of {n_ctx} tokens has no room behind a prompt of {n_prompt}: raise "
            "model.ctx (--ctx) or shorten the warm-up (--warm-up)"
        )
    windows: list[Window] = []
    # The window's last token needs no place in the context: it is never decoded.
    step = n_ctx - len(head) + 1
    for start in range(0, len(tokens), step):
        window = [*head, *tokens[start : start + step]]
        n_scored = len(window) - 1 - n_prompt
        whole = len(window) == n_ctx + 1
        if n_scored >= (2 if whole or not windows else FEWEST_IN_WINDOW):
            windows.append(Window(window[:-1], n_prompt, window[n_prompt + 1 :]))
    if not windows:
        raise InputError(
            f"the text has {len(tokens)} tokens, too few behind a prompt of {n_prompt}: give a "
            "longer text (--text) or shorten the warm-up (--warm-up)"
        )
    return windows
