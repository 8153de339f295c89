"""Memory: the expert budget, what else the engine holds, and what the machine has left."""

from __future__ import annotations

from tuiwork.meters.glyphs import bar, chart
from tuiwork.panels.panel import Line, Panel, fitting, line_width, wrapped
from tuiwork.text import size

_NAME_WIDTH = 10
_HIGHEST_CHART = 8


class MemoryPanel(Panel):
    """A bar for the budget, one for the machine, and the amounts beside them."""

    TITLE = "Memory"
    TAB = "Memory"
    HELP = (
        "Experts against their budget; dense weights, which every token needs; the context's keys "
        "and values; the engine's own and mapped memory; what the system has left; pages that "
        "had to be fetched from disk (major faults), and swap, both of which should stay at zero."
    )

    def lines(self, width: int, height: int) -> list[Line]:
        """Budget first: it is the knob."""
        gauges = [self._experts(width), self._machine(width), self._trouble(width)]
        lines = [*gauges, *self._fixed(width), *self._engine(width)]
        return lines + self._history(width, min(_HIGHEST_CHART, height - len(lines) - 2))

    def _experts(self, width: int) -> Line:
        totals = self.meters.totals
        if totals is None or not self.meters.streams:
            return self._gauge("experts", None, None, width, "compute")
        budget = self.meters.budget_bytes()
        if not budget:
            return [(f"{'experts':<{_NAME_WIDTH}}", "dim"), ("no cache: read anew every token", "")]
        return self._gauge("experts", totals.resident_bytes, budget, width, "compute")

    def _fixed(self, width: int) -> list[Line]:
        parts: list[Line] = [
            [("dense ", "dim"), (self._amount(self.meters.dense_bytes()), "strong")],
            [("keys+values ", "dim"), (self._amount(self.meters.kv_bytes()), "strong")],
        ]
        totals = self.meters.totals
        if totals is not None and self.meters.streams:
            parts.append([("evictions ", "dim"), (f"{totals.evictions}", "strong")])
        return wrapped(parts, width)

    def _engine(self, width: int) -> list[Line]:
        use = self.meters.machine
        engine = use.engine if use is not None else None
        parts: list[Line] = [
            [
                ("engine ", "dim"),
                (self._amount(engine.anon if engine else None), "strong"),
                (" own", ""),
            ],
            [(self._amount(engine.file if engine else None), "strong"), (" mapped", "")],
        ]
        if engine is not None and engine.cpu_percent is not None:
            parts.append([(f"{engine.cpu_percent:.0f} %", "strong"), (" cpu", "")])
        return wrapped(parts, width)

    def _machine(self, width: int) -> Line:
        use = self.meters.machine
        if use is None or use.memory_total is None or use.memory_available is None:
            return self._gauge("machine", None, None, width, "overhead")
        taken = use.memory_total - use.memory_available
        line = self._gauge("machine", taken, use.memory_total, width, "overhead")
        left: Line = [("  left ", "dim"), (size(use.memory_available), "strong")]
        return line + left if line_width(line) + line_width(left) <= width else line

    def _trouble(self, width: int) -> Line:
        use, faults = self.meters.machine, self.meters.faults_per_s
        swap = use.swap_used if use is not None else None
        own_swap = use.engine.swap if use is not None and use.engine is not None else None
        known = faults == faults
        shown = f"{faults:.0f}/s" if known else self.palette.glyphs.unmeasured
        parts: list[Line] = [
            [("left ", "dim"), (self._amount(use.memory_available if use else None), "strong")],
            [("major faults ", "dim"), (shown, "bad" if known and faults >= 10 else "strong")],
            [("swap ", "dim"), (self._amount(swap), "strong")],
            [("engine's ", "dim"), (self._amount(own_swap), "bad" if own_swap else "strong")],
        ]
        return fitting(parts, width)

    def _history(self, width: int, height: int) -> list[Line]:
        """What the system had left, where there is room to tell."""
        use, values = self.meters.machine, self.meters.memory_left.latest(width).tolist()
        if height < 2 or use is None or not use.memory_total or len(values) < 2:
            return []
        drawn = chart(values, width, height, use.memory_total, self.palette.glyphs)
        title = f"left to the system, of {size(use.memory_total)}, last {len(values)} s"
        return [[], [(title, "dim")], *([(line, "overhead")] for line in drawn)]

    def _gauge(
        self, name: str, used: float | None, of: float | None, width: int, role: str
    ) -> Line:
        head = f"{name:<{_NAME_WIDTH}}"
        if used is None or not of:
            return [(head, "dim"), (self.palette.glyphs.unmeasured, "")]
        tail = f" {size(used)} of {size(of)}"
        if width < 44:
            amount, _, unit = size(of).rpartition(" ")
            tail = f" {size(used).removesuffix(f' {unit}')}/{amount} {unit}"
        cells = max(4, width - len(head) - len(tail))
        filled = bar(used / of, cells, self.palette.glyphs)
        return [(head, "dim"), (filled, f"{role}/trough"), (tail, "strong")]

    def _amount(self, n_bytes: float | None) -> str:
        if n_bytes is None or n_bytes != n_bytes:
            return self.palette.glyphs.unmeasured
        return size(n_bytes)
