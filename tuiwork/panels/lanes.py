"""The I/O lanes: what each reads now, how fast it answers, and all of them against the disk."""

from __future__ import annotations

from engine.counters import Counts
from tuiwork.meters.counters import AheadTotals, latency_ms
from tuiwork.meters.glyphs import bar, chart, figure, nice_top, significant, spark
from tuiwork.meters.meters import lanes_in_flight
from tuiwork.panels.panel import Line, Panel, fitting, line_width
from tuiwork.text import MIB

_HIGHEST_CHART = 20


class LanesPanel(Panel):
    """One line for each lane, the total above them."""

    TITLE = "I/O lanes"
    TAB = "Lanes"
    HELP = (
        "Each lane is a thread that reads experts from the disk: MiB/s over the last second, its "
        "history, reads per second, and how long a read takes (median and 99th percentile). "
        "The total stands against what the disk can give, once that was measured. Ahead: experts "
        "that were read while the layer before was computed (prefetch), and how many of them were "
        "used."
    )

    def lines(self, width: int, height: int) -> list[Line]:
        """The total, its history, and as many lanes as fit."""
        meter = self.meters.lanes
        if meter.rates is None or not meter.n_lanes:
            return self._idle(width)
        n_lanes = meter.n_lanes
        n_chart = max(1, min(_HIGHEST_CHART, height - 3 - n_lanes)) if height >= 5 else 0
        room = max(0, height - 2 - n_chart - 1)
        lines = [self._total(width), self._facts(width), *self._history(width, n_chart)]
        shown = n_lanes if n_lanes <= room + 1 else room
        if room + 1 >= 2:
            lines.append(self._heading(width))
        lines += [self._lane(lane, width) for lane in range(min(shown, room))]
        if shown < n_lanes and room:
            lines[-1] = [(f"… and {n_lanes - shown + 1} more lanes", "dim")]
        return lines

    def _idle(self, width: int) -> list[Line]:
        text = "Lanes appear here once experts are read."
        if self.meters.opened is not None and not self.meters.streams:
            text = "Not streaming: nothing is read by lanes."
        return [[(text[:width], "dim")]]

    def _total(self, width: int) -> Line:
        meter, glyphs = self.meters.lanes, self.palette.glyphs
        assert meter.rates is not None
        now = meter.rates.total_bytes_per_s
        ceiling = self.meters.disk_ceiling_bytes_per_s
        measured = ceiling == ceiling
        top = ceiling if measured else meter.best_bytes_per_s or float("nan")
        label = f"{now / MIB:6.0f} MiB/s "
        of = f" of {top / MIB:.0f}" if top == top else ""
        tail = f"{of} {'disk limit' if measured else 'best seen'}" if of else ""
        cells = max(0, width - len(label) - len(tail) - 1)
        if cells < 6:
            return [(label, "strong"), (tail.strip(), "dim")]
        return [
            (label, "strong"),
            (bar(now / top if top else 0, cells, glyphs), "reads/trough"),
            (tail, "dim"),
        ]

    def _facts(self, width: int) -> Line:
        meter, glyphs = self.meters.lanes, self.palette.glyphs
        assert meter.rates is not None
        counts = meter.latency_counts()
        all_lanes = counts.sum(axis=0) if counts is not None else None
        parts: list[Line] = [
            [(f"{meter.rates.reads_per_s.sum():.0f}", "strong"), (" reads/s", "")],
            [(figure(lanes_in_flight(self.meters), ".1f", glyphs), "strong"), (" in flight", "")],
        ]
        if all_lanes is not None:
            parts.append(_latencies(all_lanes, "p50 ", "p99 ", " ms"))
        counters = self.meters.counters
        ahead = AheadTotals.of(counters) if counters is not None else None
        if ahead is not None:
            used = f"{100 * ahead.used / ahead.read:.0f} %"
            parts.append([("ahead ", "dim"), (f"{ahead.read}", "strong"), (f" {used} used", "dim")])
        return fitting(parts, width, "   ")

    def _history(self, width: int, height: int) -> list[Line]:
        values = self.meters.lanes.total_history.latest(width).tolist()
        top = nice_top(max(values, default=0.0) / MIB) * MIB
        return [
            [(line, "reads")] for line in chart(values, width, height, top, self.palette.glyphs)
        ]

    def _heading(self, width: int) -> Line:
        return self._columns(
            "lane",
            "MiB/s",
            "reads/s" if width > 35 else "r/s",
            "p50 ms" if width > 35 else "p50",
            "p99",
            None,
            width,
            "dim",
        )

    def _lane(self, lane: int, width: int) -> Line:
        meter, glyphs = self.meters.lanes, self.palette.glyphs
        assert meter.rates is not None
        counts = meter.latency_counts()
        median = latency_ms(counts[lane], 0.5) if counts is not None else float("nan")
        slow = latency_ms(counts[lane], 0.99) if counts is not None else float("nan")
        return self._columns(
            f"{lane}",
            f"{meter.rates.bytes_per_s[lane] / MIB:.0f}",
            f"{meter.rates.reads_per_s[lane]:.0f}",
            significant(median, glyphs),
            significant(slow, glyphs),
            lane,
            width,
            "",
        )

    def _columns(
        self,
        name: str,
        speed: str,
        reads: str,
        median: str,
        slow: str,
        lane: int | None,
        width: int,
        role: str,
    ) -> Line:
        head: Line = [(f"{name:<4}", "dim"), (f"{speed:>6}", role)]
        tail: Line = [(f"{reads:>8}", role), (f"{median:>7}", role), (f"{slow:>6}", role)]
        if line_width(head) + line_width(tail) > width:
            tail = [(f"{reads:>5}"[:5], role), (f"{median:>6}"[:6], role), (f"{slow:>6}", role)]
        room = width - line_width(head) - line_width(tail) - 2
        if room < 4:
            return [*head, *tail]
        if lane is None:
            return [*head, (" " * (room + 2), ""), *tail]
        history = self.meters.lanes.lane_history[lane].latest(room).tolist()
        top = max(max(ring.latest(room), default=0.0) for ring in self.meters.lanes.lane_history)
        text = spark(history, room, top, self.palette.glyphs)
        return [*head, (" ", ""), (text, "reads"), (" ", ""), *tail]


def _latencies(counts: Counts, median_label: str, slow_label: str, unit: str) -> Line:
    median, slow = latency_ms(counts, 0.5), latency_ms(counts, 0.99)
    return [
        (median_label, "dim"),
        (significant(median), "strong"),
        (f" {slow_label}", "dim"),
        (significant(slow), "strong"),
        (unit, "dim"),
    ]
