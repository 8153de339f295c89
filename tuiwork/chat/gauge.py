"""How full the context is, in a few characters."""

from __future__ import annotations

from textual.content import Content

from tuiwork.chat.blocks import DIM

CELLS = 8
WARN_AT, ALARM_AT = 0.80, 0.95
_FULL, _EMPTY = "━", "─"


def gauge(used: int | None, ctx: int | None, *, draft: int | None = None) -> Content:
    """`1 204 of 4 096 tokens ━━───── 29 %`; with what the message being written would add."""
    if used is None or not ctx:
        return Content("")
    share = min(1.0, max(used, draft or 0) / ctx)
    full = min(CELLS, round(share * CELLS + 0.49))
    if not used and not draft:
        full = 0
    colour = "$text-error" if share >= ALARM_AT else "$text-warning" if share >= WARN_AT else ""
    count = grouped(used) if not draft or draft <= used else f"{grouped(used)} → {grouped(draft)}"
    return Content.assemble(
        (f"{count} of {grouped(ctx)} tokens ", colour),
        (_FULL * full, colour or "$text-primary"),
        (_EMPTY * (CELLS - full), DIM),
        (f" {share * 100:.0f} %", colour),
    )


def grouped(number: int) -> str:
    """A count with thin groups of three digits."""
    return f"{number:,}".replace(",", "\u202f")
