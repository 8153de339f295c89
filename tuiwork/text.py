"""Text for a person's terminal: untrusted text made harmless, amounts made readable.

A model's answer, a file's name and a model's metadata may hold anything. Escape sequences can
move the cursor, rename the window or answer questions the terminal was never asked, so nothing
reaches a terminal that has not gone through `sanitize`.
"""

from __future__ import annotations

MIB = 2**20

_CONTROL_PICTURES = 0x2400
"""U+2400 and on hold a visible picture of each control character: ␛ for ESC."""

_KEPT = "\n\t"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _visible_forms() -> dict[int, str]:
    forms = {code: chr(_CONTROL_PICTURES + code) for code in range(0x20) if chr(code) not in _KEPT}
    forms[0x7F] = "␡"
    # C1 controls: some terminals take U+009B for ESC [.
    forms.update({code: f"\\x{code:02x}" for code in range(0x80, 0xA0)})
    # Overrides of writing direction make text read as other than it is.
    for first, last in ((0x202A, 0x202E), (0x2066, 0x2069)):
        forms.update({code: f"\\u{code:04x}" for code in range(first, last + 1)})
    # Halves of a surrogate pair (undecodable bytes of a file's name) cannot be encoded.
    forms.update({code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)})
    return forms


_VISIBLE = _visible_forms()


def sanitize(text: str) -> str:
    """`text` with control characters made visible; newline and tab stay.

    Works on any piece of a text by itself, so that it suits streaming.
    """
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """`text` sanitized and on one line, for a table's cell or a status."""
    return sanitize(" ".join(text.split()))


def size(n_bytes: float) -> str:
    """Bytes as a person reads them: `512 B`, `38.2 MiB`, `17.2 GiB`."""
    if n_bytes < 1024:
        return f"{n_bytes:.0f} B"
    amount, unit = float(n_bytes), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount /= 1024
        unit += 1
    return f"{amount:.3g} {_UNITS[unit]}" if amount < 100 else f"{amount:.0f} {_UNITS[unit]}"


def size_range(amounts: list[int]) -> str:
    """One size, or the smallest and the largest where they differ."""
    if not amounts:
        return "none"
    low, high = min(amounts), max(amounts)
    return size(low) if low == high else f"{size(low)} to {size(high)}"


def known(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """A figure, or `unknown` where it was not measured (None, NaN or negative)."""
    if value is None or value != value or value < 0:
        return "unknown"
    return f"{value:{form}}{' ' if unit else ''}{unit}"
