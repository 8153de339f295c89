"""Times as people say them, and amounts in words."""

from __future__ import annotations

import datetime

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_STEPS = (
    (_MINUTE, "s", 1.0),
    (_HOUR, "min", _MINUTE),
    (_DAY, "h", _HOUR),
    (7 * _DAY, "d", _DAY),
)


def ago(then: float, now: float) -> str:
    """How long ago, or the date if that is longer than a week. Both in seconds since the epoch."""
    passed = max(0.0, now - then)
    if passed < 5:
        return "just now"
    for limit, unit, divisor in _STEPS:
        if passed < limit:
            return f"{passed / divisor:.0f} {unit} ago"
    return datetime.datetime.fromtimestamp(then).strftime("%Y-%m-%d")


def counted(number: int, noun: str) -> str:
    """`1 message`, `3 messages`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def seconds(duration: float) -> str:
    """`0.4 s`, `12 s`, `3 min 5 s`."""
    if duration < 10:
        return f"{duration:.1f} s"
    if duration < _MINUTE:
        return f"{duration:.0f} s"
    return f"{duration // _MINUTE:.0f} min {duration % _MINUTE:.0f} s"


def per_second(rate: float) -> str:
    """A token rate: `6.13 tok/s`, `41.2 tok/s`, `1,030 tok/s`."""
    digits = 2 if rate < 10 else 1 if rate < 100 else 0
    return f"{rate:,.{digits}f} tok/s"
