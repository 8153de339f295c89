"""What `bounds` prints: a table for each limit, and the single rounds' ratios under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tests.benchmarks.bench import WARM_UP, Bench
from tests.benchmarks.bounds_cells import FEWEST_FOR_RATE, LANES, MAPPED, OURS, Plan, Round
from tests.benchmarks.bounds_figures import (
    LimitSummary,
    MappedFigures,
    PathRound,
    middle,
    own_read_mib_s,
)

Figure = Callable[[PathRound], float | None]
COLUMNS: tuple[tuple[str, Figure, str], ...] = (
    ("tok/s", lambda one: one.tokens.tok_s, ".2f"),
    ("ms/token", lambda one: one.tokens.wall_ms, ".1f"),
    ("= wait", lambda one: one.tokens.wait_ms, ".1f"),
    ("+ bookk.", lambda one: one.tokens.bookkeeping_ms, ".1f"),
    ("+ rest", lambda one: one.tokens.rest_ms, ".1f"),
    ("MiB/token", lambda one: one.tokens.read_mib, ".1f"),
    ("hits %", lambda one: one.tokens.hit_pct, ".1f"),
    ("dropped %", lambda one: one.tokens.dropped_pct, ".1f"),
    ("bound ms", lambda one: one.bound_ms, ".1f"),
    ("% of it", lambda one: one.bound_pct, ".0f"),
    ("own bound ms", lambda one: one.own_bound_ms, ".1f"),
    ("% of it", lambda one: one.own_bound_pct, ".0f"),
)
RATIOS: tuple[tuple[str, Figure], ...] = (
    ("times serial", lambda one: one.times_serial),
    ("times memory-mapped", lambda one: one.times_mapped),
)

LEGEND = f"""\
Medians of the rounds. ms/token is everything between tokens: wait, the callback waits for reads;
bookk., the engine's bookkeeping; rest, computing and what lies between tokens. The first {WARM_UP}
tokens are left out. Bounds: what a token takes at least if reads and computing overlap wholly, the
longer of its own MiB at the disk's rate and resident computing. bound: at fio's rate in the same
minutes (same block size, as many readers, drawn from all over the file). own bound: at the best
rate of our own serial reads in the round, where that is higher. % of it: of the rate that the bound
allows; above 100 our reads ran faster than the rate that the bound assumes."""


def report(bench: Bench, plan: Plan, rounds: Sequence[Round], took_s: float) -> Iterator[str]:
    """All lines."""
    residents = [done.resident.token_ms for done in rounds]
    yield (
        f"resident, whole model in memory, every page in place: {_listed(residents, '.1f')} ms per "
        "token; the bounds take the shortest"
    )
    if any(done.resident.major_faults for done in rounds):
        yield "  it read from disk meanwhile: NOT wholly in memory, so the bounds are too high"
    yield (
        f"our own reads, best serial cell of each round: "
        f"{_listed([own_read_mib_s(done) for done in rounds], '.0f')} MiB/s"
    )
    yield LEGEND
    for limit in plan.limits_mib:
        yield ""
        yield from _limit(bench, plan, LimitSummary(limit, rounds))
    yield ""
    yield f"{len(rounds)} of {plan.rounds} rounds, {took_s / 60:.1f} minutes in all"
    if len(rounds) < plan.rounds:
        yield "  another round did not fit the time: spread over fewer rounds is not seen"


def _limit(bench: Bench, plan: Plan, summary: LimitSummary) -> Iterator[str]:
    rates = [part.fio_mib_s for part in summary.parts]
    yield (
        f"limit {summary.limit_mib} MiB, cache {summary.cache_mib} MiB, {bench.tokens} tokens; "
        f"fio with {LANES} readers {_listed(rates, '.0f')} MiB/s"
    )
    header = ["", *(name for name, _, _ in COLUMNS), "x mapped", "x serial"]
    rows = [[MAPPED, _shown(summary.mapped_tok_s, ".2f")]]
    rows += [_row(summary, path) for path in OURS if summary.paths[path]]
    yield from table([header, *rows])
    yield from _indented(_mapped_lines(plan, summary))
    for name, figure in RATIOS:
        for path in OURS:
            values = [figure(one) for one in summary.paths[path]]
            known = [value for value in values if value is not None]
            if len(known) > 1 and set(known) != {1.0}:
                yield f"  {path}, {name}, rounds: {_listed(known, '.2f')}"
    if summary.same_as_serial():
        yield "  best lossless resolved to serial's settings: what differs between the two is noise"
    for failure in summary.failures:
        yield f"  FAILED {failure}"


def _row(summary: LimitSummary, path: str) -> list[str]:
    rounds = summary.paths[path]
    cells = [_shown(middle([figure(one) for one in rounds]), form) for _, figure, form in COLUMNS]
    at_least = summary.at_least(path)
    times = middle([one.times_mapped for one in rounds])
    mapped = f"> {at_least.times:.1f}" if at_least else _shown(times, ".2f")
    return [path, *cells, mapped, _shown(middle([one.times_serial for one in rounds]), ".2f")]


def _mapped_lines(plan: Plan, summary: LimitSummary) -> Iterator[str]:
    """What became of memory-mapped llama.cpp, where a figure does not say it all."""
    for one in summary.mapped:
        if one.tok_s is None:
            yield f"{MAPPED} UNMEASURED: {_progress(one)}; it was not tried again"
        elif not one.done:
            yield f"{MAPPED}: {_progress(one)}; compared over the tokens that both have"
    bounds = [(path, summary.at_least(path)) for path in OURS]
    for path, at_least in bounds:
        if at_least is not None:
            yield f"{path}: more than {at_least.times:.1f} times {MAPPED}, {at_least.over}"


def _progress(one: MappedFigures) -> str:
    came = f"{one.tokens or 'no'} token{'s' * (one.tokens > 1)} in {one.lasted_s:.0f} s"
    return came if one.tokens >= FEWEST_FOR_RATE else f"{came}, {FEWEST_FOR_RATE} are needed"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need; the first to the left, figures to the right."""
    n_columns = max(len(row) for row in rows)
    full = [[*row, *["-"] * (n_columns - len(row))] for row in rows]
    widths = [max(len(row[place]) for row in full) for place in range(n_columns)]
    for first, *others in full:
        figures = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *figures])


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _listed(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
