"""A sweep's main figures as a table for a terminal of 80 columns."""

from __future__ import annotations

from tuiwork.sweep.results import SweepResult
from tuiwork.tables import UNAVAILABLE, number, section, wrapped
from tuiwork.text import one_line


def summary(result: SweepResult) -> str:
    """The arms' rates, each against the first one's."""
    rows = []
    for n, arm in enumerate(result.arms):
        pair = next((pair for pair in result.pairs if pair.b == n), None)
        interval = arm.pooled.blocked_rate.interval
        rows.append(
            [
                arm.arm.letter,
                str(len(arm.cells)),
                str(len(arm.pooled)),
                number(arm.pooled.rate.tok_s, 3),
                f"{number(interval.low, 3)} – {number(interval.high, 3)}",
                number(pair.ratio, 3) if pair else UNAVAILABLE,
                ("separated" if pair.separated else "not separated") if pair else "",
            ]
        )
    names = [
        wrapped(f"{arm.arm.letter}  {one_line(arm.arm.name)}", indent=3) for arm in result.arms
    ]
    first = result.arms[0].arm.letter
    table = section(
        f"Rates, all cells of an arm together, with 95 % intervals (blocks), and against {first}",
        ["", "cells", "tokens", "tok/s", "interval", "ratio", ""],
        rows,
    )
    doubts = [wrapped(f"! {doubt}", indent=2) for doubt in result.doubts]
    return "\n\n".join(part for part in ("\n".join(names), table, "\n".join(doubts)) if part)
