"""GGUF headers changed on purpose: what a damaged download or a bad tool may leave."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
TEXT, LIST = 8, 9
U32, I32, F32, U64 = 4, 5, 6, 10
_ALIGNMENT = 32


class Header:
    """The values and tensors of a GGUF, to be changed and written again with the same weights."""

    def __init__(self, path: Path) -> None:
        self._bytes, self._at = path.read_bytes(), 4
        version, n_tensors, n_values = self._next("I"), self._next("Q"), self._next("Q")
        self._version = version
        self.values: dict[str, tuple[int, Any]] = {}
        for _ in range(n_values):
            key = self._text().decode()
            kind = self._next("I")
            self.values[key] = (kind, self._value(kind))
        self.tensors: dict[str, tuple[list[int], int, int]] = {}
        """Shape, type and offset by name."""
        for _ in range(n_tensors):
            name = self._text().decode()
            shape = [self._next("Q") for _ in range(self._next("I"))]
            self.tensors[name] = (shape, self._next("I"), self._next("Q"))
        self._weights = self._bytes[-(-self._at // _ALIGNMENT) * _ALIGNMENT :]

    def write(self, path: Path) -> Path:
        """Write the header as it is now, and the weights behind it."""
        head = b"GGUF" + struct.pack("<IQQ", self._version, len(self.tensors), len(self.values))
        for key, (kind, value) in self.values.items():
            head += _text_bytes(key.encode()) + struct.pack("<I", kind) + _value_bytes(kind, value)
        for name, (shape, kind, offset) in self.tensors.items():
            head += _text_bytes(name.encode()) + struct.pack("<I", len(shape))
            head += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
        path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + self._weights)
        return path

    def _next(self, form: str) -> Any:
        size = struct.calcsize(form)
        self._at += size
        return struct.unpack_from("<" + form, self._bytes, self._at - size)[0]

    def _text(self) -> bytes:
        length = self._next("Q")
        self._at += length
        return self._bytes[self._at - length : self._at]

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == LIST:
            inner = self._next("I")
            return inner, [self._value(inner) for _ in range(self._next("Q"))]
        return self._next(_SCALARS[kind])


def changed(source: Path, target: Path, change: Callable[[Header], Any]) -> Path:
    """A copy of the model `source` at `target` whose header `change` has changed."""
    header = Header(source)
    change(header)
    return header.write(target)


def with_value(key: str, kind: int, value: Any) -> Callable[[Header], None]:
    """A change that gives a header this value."""

    def change(header: Header) -> None:
        header.values[key] = (kind, value)

    return change


def with_template(source: str) -> Callable[[Header], None]:
    """A change that gives a model this chat template."""
    return with_value("tokenizer.chat_template", TEXT, source.encode())


def _text_bytes(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value_bytes(kind: int, value: Any) -> bytes:
    if kind == TEXT:
        return _text_bytes(value)
    if kind == LIST:
        inner, items = value
        head = struct.pack("<IQ", inner, len(items))
        return head + b"".join(_value_bytes(inner, item) for item in items)
    return struct.pack("<" + _SCALARS[kind], value)
