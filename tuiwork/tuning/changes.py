"""The changes made while a model was open, each with its place among the tokens.

A change is judged by the tokens right before it, back to the change before, and by those after it,
up to the next. Turning one knob in several steps within a few tokens is one change. The first half
of the tokens since the model was opened is left out: they met an empty cache, and whatever came
after them would look fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.config import SETTINGS
from engine.stats import FEWEST_TOKENS, Comparison, compare
from engine.telemetry import TokenRow
from tuiwork.meters.glyphs import UNICODE, Glyphs, significant
from tuiwork.meters.tokens import TokenHistory, token_ms

MOST_TOKENS = 512
"""Of a side: enough for any interval, and the older ones saw another conversation."""

DISTURBED = 1.5
"""Computing a token does not depend on where its experts are. If its time changed by this factor,
other programs took part in the difference."""

_RESAMPLES = 1000
"""Ten milliseconds of work for the longest runs, so that the screen never waits for it."""

_SHORT_NAMES = {
    "routing.drop-cold-experts": "drop",
    "routing.n-expert-used": "experts/token",
    "routing.cold-policy": "cold policy",
    "routing.drop-renorm": "renorm",
    "stream.cache-mb": "cache",
    "stream.io-threads": "lanes",
}
_UNITS = {"stream.cache-mb": " MiB"}


def short_name(key: str) -> str:
    """A setting as a person says it: `drop`, `cache`, `temp`."""
    return _SHORT_NAMES.get(key, key.rpartition(".")[2])


def value_text(key: str, value: Any) -> str:
    """A setting's value as it is read aloud: `0.75`, `4000 MiB`, `on`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if key == "routing.n-expert-used" and value == 0:
        return "model's own"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value}{_UNITS.get(key, '') if isinstance(value, int) else ''}"


@dataclass
class Change:
    """Settings that changed together between two tokens."""

    before: dict[str, Any]
    after: dict[str, Any]
    from_row: int
    """Rows measured before its first step, since the model was opened."""
    at_row: int
    """Rows measured before its last step: from here on it is in force."""

    @property
    def lossy(self) -> bool:
        """Whether it touches what can change the answer."""
        return any(SETTINGS[key].lossy for key in self.after)

    def title(self, glyphs: Glyphs = UNICODE) -> str:
        """`drop 0.50 → 0.75`, or how many settings changed."""
        if len(self.after) > 2:
            return f"{len(self.after)} settings"
        return ", ".join(
            f"{short_name(key)} {value_text(key, self.before.get(key, '?'))} "
            f"{glyphs.arrow} {value_text(key, value)}"
            for key, value in self.after.items()
        )


@dataclass(frozen=True)
class Effect:
    """What a change did, as far as it can be told."""

    n_before: int
    n_after: int
    speed: Comparison | None = None
    """None while a side has too few tokens."""
    reads_before: float = float("nan")
    """Bytes per token."""
    reads_after: float = float("nan")
    dropped_before: float = float("nan")
    """Share of routed experts that were left out or replaced."""
    dropped_after: float = float("nan")
    compute_before: float = float("nan")
    """Milliseconds per token beside reads and cache management, the median."""
    compute_after: float = float("nan")

    @property
    def disturbed(self) -> bool:
        """Whether the machine itself was faster or slower on one side."""
        low, high = sorted((self.compute_before, self.compute_after))
        return low > 0 and high / low >= DISTURBED


class ChangeLog:
    """All changes since the model was opened, oldest first."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._effects: dict[int, Effect] = {}

    def add(self, before: Mapping[str, Any], after: Mapping[str, Any], at_row: int) -> None:
        """Note a change that is in force from row `at_row` on.

        The tokens between quick steps of one knob saw values that nobody stayed with: they count
        on neither side.
        """
        last = self.changes[-1] if self.changes else None
        if (
            last is not None
            and last.after.keys() == after.keys()
            and at_row - last.at_row < FEWEST_TOKENS
        ):
            last.after, last.at_row = dict(after), at_row
            if last.before == last.after:
                self.changes.pop()
        else:
            self.changes.append(Change(dict(before), dict(after), at_row, at_row))
        self._effects.clear()

    def forget(self) -> None:
        """Begin anew, as for another model."""
        self.changes = []
        self._effects.clear()

    @property
    def last(self) -> Change | None:
        """The newest change."""
        return self.changes[-1] if self.changes else None

    def effect(self, index: int, tokens: TokenHistory) -> Effect:
        """What change number `index` did so far.

        Computed anew only when a side has grown by an eighth: intervals cost milliseconds, and
        their digits do not move for one token.
        """
        before, after = self._sides(index, tokens)
        known = self._effects.get(index)
        if known is not None and known.n_before == len(before):
            grown = len(after) - known.n_after
            if not grown or (known.speed is not None and grown < max(4, known.n_after // 8)):
                return known
        found = measure(before, after)
        self._effects[index] = found
        return found

    def _sides(self, index: int, tokens: TokenHistory) -> tuple[list[TokenRow], list[TokenRow]]:
        start = self.changes[index - 1].at_row if index else 0
        change = self.changes[index]
        last = index + 1 == len(self.changes)
        end = None if last else self.changes[index + 1].from_row
        if not index:
            start = change.from_row // 2
        return (
            tokens.between(start, change.from_row, most=MOST_TOKENS),
            tokens.between(change.at_row, end, most=MOST_TOKENS),
        )


def measure(before: list[TokenRow], after: list[TokenRow]) -> Effect:
    """Compare the tokens before a change with those after it."""
    if min(len(before), len(after)) < FEWEST_TOKENS:
        return Effect(len(before), len(after))
    return Effect(
        len(before),
        len(after),
        compare(
            [token_ms(row) for row in before],
            [token_ms(row) for row in after],
            resamples=_RESAMPLES,
        ),
        _mean_reads(before),
        _mean_reads(after),
        _left_out(before),
        _left_out(after),
        median(row.compute_ms for row in before),
        median(row.compute_ms for row in after),
    )


def _mean_reads(rows: list[TokenRow]) -> float:
    return sum(row.read_bytes for row in rows) / len(rows)


def _left_out(rows: list[TokenRow]) -> float:
    routed = sum(row.experts_routed for row in rows)
    gone = sum(row.experts_dropped + row.experts_substituted for row in rows)
    return gone / routed if routed else float("nan")


def effect_text(change: Change, effect: Effect, glyphs: Glyphs = UNICODE) -> str:
    """`3.1 → 4.0 tok/s, separated; reads −34 %`, or how many tokens are still missing."""
    if effect.speed is None:
        return _waiting_text(effect)
    speed = effect.speed
    verdict = "separated" if speed.separated else "not separated"
    text = (
        f"{significant(speed.before.tok_s)} {glyphs.arrow} {significant(speed.after.tok_s)} tok/s, "
        f"{verdict}"
    )
    text += f"; reads {_percent_change(effect.reads_before, effect.reads_after, glyphs)}"
    if change.lossy and effect.dropped_after == effect.dropped_after:
        text += f"; left out {100 * effect.dropped_after:.1f} %"
    if effect.disturbed and "routing.n-expert-used" not in change.after:
        # Fewer experts are less to compute; nothing else that can be turned is.
        text += (
            f"; but computing took {significant(effect.compute_before)} ms a token before and "
            f"{significant(effect.compute_after)} after: other programs were at work"
        )
    return text


def interval_text(effect: Effect, glyphs: Glyphs = UNICODE) -> str:
    """`×1.27 (1.19–1.36)`: how many times faster, with its interval."""
    if effect.speed is None:
        return ""
    low, high = effect.speed.interval.low, effect.speed.interval.high
    times = "×" if glyphs is UNICODE else "x"
    dash = "–" if glyphs is UNICODE else "-"
    return f"{times}{effect.speed.ratio:.2f} ({low:.2f}{dash}{high:.2f})"


def _waiting_text(effect: Effect) -> str:
    if effect.n_before < FEWEST_TOKENS:
        tokens = "token" if effect.n_before == 1 else "tokens"
        found = f"only {effect.n_before} {tokens}" if effect.n_before else "no token"
        return f"{found} with a warm cache before it: {FEWEST_TOKENS} needed to compare"
    return f"{effect.n_after} of {FEWEST_TOKENS} tokens until it can be compared"


def _percent_change(before: float, after: float, glyphs: Glyphs) -> str:
    if before <= 0:
        return "unchanged" if after <= 0 else "from none"
    change = 100 * (after / before - 1)
    minus = "−" if glyphs is UNICODE else "-"
    sign = minus if change < 0 else "+"
    return f"{sign}{abs(change):.0f} %"
