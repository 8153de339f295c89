"""What is counted, per token and live, and the token metrics file.

The file's columns and keys are the field's (docs/formats.md); unmeasured is -1, never 0. Memory
and processor figures are this process's, from the kernel.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

MIB = 1 << 20
UNMEASURED = -1.0
NOT_COUNTED = -1
"""Unmeasured, of a whole number."""


@dataclass
class TokenRow:
    """One generated token. Times in milliseconds, sizes in MiB unless the name says bytes."""

    step: int
    steps: int
    wall_ms: float
    io_ms: float
    compute_ms: float
    read_bytes: int
    cache_hit_pct: float
    stall_ms: float
    mgmt_ms: float
    majflt: int
    cpu_ms: float
    dense_resident_frac: float
    turn: int
    majflt_mib: float
    cache_budget_mib: float
    rss_mib: float
    rss_anon_mib: float
    rss_file_mib: float
    swap_mib: float
    mem_available_mib: float
    mem_free_mib: float
    swap_free_mib: float
    loop_overhead_ms: float
    token_id: int
    reads: int
    hits: int
    misses: int
    evictions: int
    experts_routed: int
    experts_dropped: int
    experts_substituted: int
    mass_discarded: float


COLUMNS = [f.name for f in fields(TokenRow)]
_DECIMALS = {"cache_hit_pct": 2, "majflt_mib": 2, "mass_discarded": 6}


@dataclass(frozen=True)
class ProcessUse:
    """This process's faults and processor time so far, and its memory now."""

    major_faults: int
    cpu_ms: float
    rss_mib: float
    rss_anon_mib: float
    rss_file_mib: float
    swap_mib: float
    mem_available_mib: float
    mem_free_mib: float
    swap_free_mib: float

    @classmethod
    def now(cls) -> ProcessUse:
        """Ask the kernel; what it does not tell is unmeasured."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own = _kib_fields("/proc/self/status")
        machine = _kib_fields("/proc/meminfo")
        shared = own.get("RssShmem", UNMEASURED)
        return cls(
            usage.ru_majflt,
            (usage.ru_utime + usage.ru_stime) * 1000,
            _mib(own, "VmRSS"),
            # Shared memory is ours as much as anonymous memory is: nobody else has it open.
            _mib(own, "RssAnon") + max(shared, 0) / 1024,
            _mib(own, "RssFile"),
            _mib(own, "VmSwap"),
            _mib(machine, "MemAvailable"),
            _mib(machine, "MemFree"),
            _mib(machine, "SwapFree"),
        )


def _kib_fields(path: str) -> dict[str, float]:
    values = {}
    try:
        with open(path) as file:
            for line in file:
                name, _, rest = line.partition(":")
                if rest.endswith(" kB\n"):
                    values[name] = float(rest[:-4])
    except OSError:
        pass
    return values


def _mib(values: Mapping[str, float], name: str) -> float:
    return values[name] / 1024 if name in values else UNMEASURED


@dataclass
class TurnFigures:
    """What the work before the first token of a turn cost."""

    n_prompt: int = 0
    n_reused: int = 0
    prefill_s: float = 0.0
    prefill_read_bytes: int = 0
    prefill_reads: int = 0


@dataclass
class Metrics:
    """All rows of a session, and what the summary adds to them."""

    preamble: dict[str, Any] = field(default_factory=dict)
    rows: list[TokenRow] = field(default_factory=list)
    turns: list[TurnFigures] = field(default_factory=list)
    load_s: float = 0.0
    token_demand_bytes: int = 0
    layer_demand_bytes: int = 0

    def summary(self, turn: int | None = None) -> dict[str, float]:
        """The figures of the `# summary` line, over one turn or all."""
        rows = [row for row in self.rows if turn is None or row.turn == turn]
        turns = self.turns if turn is None else self.turns[turn : turn + 1]
        n = len(rows)
        seconds = sum(row.wall_ms + max(row.loop_overhead_ms, 0) for row in rows) / 1000

        def total(name: str) -> float:
            return _sum(getattr(row, name) for row in rows)

        def per_token(name: str, unit: float = 1) -> float:
            amount = total(name)
            return amount / unit / n if n and amount >= 0 else UNMEASURED

        return {
            "tokens": n,
            "s/tok": seconds / n if n else UNMEASURED,
            "tok/s": n / seconds if seconds else UNMEASURED,
            "read_MiB": _in_mib(total("read_bytes")),
            "io_s/tok": per_token("io_ms", 1000),
            "compute_s/tok": per_token("compute_ms", 1000),
            "cache_hit_pct": rows[-1].cache_hit_pct if rows else UNMEASURED,
            "n_prompt": sum(figures.n_prompt for figures in turns),
            "prefill_s": sum(figures.prefill_s for figures in turns),
            "prefill_read_MiB": _in_mib(_sum(figures.prefill_read_bytes for figures in turns)),
            "load_s": self.load_s,
            "token_demand_MiB": self.token_demand_bytes / MIB,
            "layer_demand_MiB": self.layer_demand_bytes / MIB,
            "experts_routed": total("experts_routed"),
            "experts_dropped": total("experts_dropped"),
            "experts_substituted": total("experts_substituted"),
            "mass_discarded": total("mass_discarded"),
            "stall_s/tok": per_token("stall_ms", 1000),
            "mgmt_s/tok": per_token("mgmt_ms", 1000),
            "majflt/tok": per_token("majflt"),
            "cpu_s/tok": per_token("cpu_ms", 1000),
            "reads": total("reads"),
            "hits": total("hits"),
            "misses": total("misses"),
            "evictions": total("evictions"),
        }

    def write_csv(self, path: str | Path) -> None:
        """Write preamble, one row per token and the summary. Raises OSError."""
        lines = ["# tuiwork_metrics v1"]
        lines += [f"# {key}={_one_line(value)}" for key, value in self.preamble.items()]
        lines.append(",".join(COLUMNS))
        lines += [",".join(_cells(row)) for row in self.rows]
        summary = " ".join(f"{key}={_figure(value)}" for key, value in self.summary().items())
        lines.append(f"# summary {summary}")
        text = "\n".join(lines) + "\n"
        # Names of files may hold bytes that are no text; they are shown escaped.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")


def _sum(values: Iterable[float]) -> float:
    """The sum of measured values; of unmeasured ones there is none."""
    amounts = list(values)
    return sum(amounts) if all(amount >= 0 for amount in amounts) else NOT_COUNTED


def _in_mib(n_bytes: float) -> float:
    return n_bytes / MIB if n_bytes >= 0 else UNMEASURED


_ESCAPES = {ord("\\"): "\\\\", ord("\n"): "\\n", ord("\r"): "\\r"}
# What else ends a line for some reader, or moves the cursor of whoever looks at the file.
_ESCAPES |= {
    code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if code not in _ESCAPES
}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F))}


def _one_line(value: Any) -> str:
    return str(value).translate(_ESCAPES)


def _cells(row: TokenRow) -> list[str]:
    cells = []
    for name, value in asdict(row).items():
        if isinstance(value, float):
            value = f"{value:.{_DECIMALS.get(name, 3)}f}"
        cells.append(str(value))
    return cells


def _figure(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
