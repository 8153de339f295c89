"""`tuiwork compare`: runs side by side as tables for the terminal, a JSON document, or a plot.

The document carries every figure unrounded and says null where a file cannot tell; the tables
round, and show – there. Runs go by letters, so that the tables fit whatever the files are called.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any, TextIO

from engine.comparability import Caveat
from engine.comparison import Comparison, Pair, compare_runs
from engine.metrics_reader import read_metrics
from engine.run_figures import Run
from engine.stats import CONFIDENCE, Interval
from tuiwork.tables import UNAVAILABLE, number, section, wrapped
from tuiwork.text import one_line, sanitize

_UNCHECKED = {
    "model": "model",
    "context": "context length",
    "threads": "threads",
    "version": "version",
    "sampling": "whether they were sampled",
    "tracing": "whether they were traced",
    "drop rate": "drop rate",
}


def run(paths: Sequence[Path], *, skip: int, json: bool, plot: Path | None, out: TextIO) -> None:
    """Compare the runs in `paths` and write the result to `out`; the plot to its own file.

    Raises InputError for a file that cannot be read or, before any work, for a plot that cannot be
    drawn.
    """
    if plot is not None:
        from tuiwork.compare_plot import check_plot, write_plot

        check_plot(plot)
    result = compare_runs([read_metrics(path) for path in paths], skip)
    if plot is not None:
        write_plot(result, plot)
    # Pure ASCII: a terminal may act on control characters that JSON leaves as they are.
    text = dumps(document(result), indent=2, ensure_ascii=True) if json else sanitize(table(result))
    out.write(text + "\n")


def document(result: Comparison) -> dict[str, Any]:
    """A comparison as plain values for JSON. Times in milliseconds, sizes in MiB, per token."""
    names = [str(run.path) for run in result.runs]

    def files(runs: Sequence[int]) -> list[str]:
        return [names[n] for n in runs]

    return {
        "confidence": CONFIDENCE,
        "runs": [_run_document(run) for run in result.runs],
        "pairs": [_pair_document(pair, result.runs) for pair in result.pairs],
        "warnings": [
            {
                "kind": caveat.kind,
                "message": f"{caveat.text}: {_group_words(caveat, names)}",
                "advice": caveat.advice or None,
                "groups": [{"value": value, "files": files(ns)} for value, ns in caveat.groups],
            }
            for caveat in result.caveats
        ],
        "unchecked": {what: files(runs) for what, runs in result.unchecked.items()},
        "differences": {key: list(values) for key, values in result.differences.items()},
    }


def table(result: Comparison) -> str:
    """A comparison as text for a terminal of 80 columns."""
    letters = _letters(len(result.runs))
    sections = [
        _files_section(result, letters),
        _rates_section(result, letters),
        _figures_section(result, letters),
        _pairs_section(result, letters),
        "\n".join(_caveat_words(caveat, letters) for caveat in result.caveats),
        _unchecked_words(result, letters),
    ]
    return "\n\n".join(text for text in sections if text)


def letters_of(result: Comparison) -> list[str]:
    """What the runs are called in tables and plots."""
    return _letters(len(result.runs))


def _run_document(run: Run) -> dict[str, Any]:
    rate, spent = run.rate, run.token_time
    single, blocked = _known(rate.interval, run), _known(run.blocked_rate.interval, run)
    cumulative = run.decode_hit_pct is None
    return {
        "file": str(run.path),
        "tokens": len(run),
        "skipped": run.skip,
        "tok_s": rate.tok_s,
        "lo": single and single.low,
        "hi": single and single.high,
        "block_lo": blocked and blocked.low,
        "block_hi": blocked and blocked.high,
        "block_tokens": run.block,
        "decode_tok_s": run.decode_tok_s,
        "compute_ms": spent.compute_ms,
        "wait_ms": spent.wait_ms,
        "mgmt_ms": spent.mgmt_ms,
        "loop_overhead_ms": spent.loop_ms,
        "read_mib_per_token": run.read_mib,
        "reads_per_token": run.reads,
        "hit_pct": run.cumulative_hit_pct if cumulative else run.decode_hit_pct,
        "hit_pct_includes_prompt": cumulative,
        "drop_pct": run.drop_pct,
        "substitute_pct": run.substitute_pct,
        "mass_lost_pct": run.mass_lost_pct,
        "majflt_per_token": run.major_faults,
        "preamble": dict(run.metrics.preamble),
    }


def _pair_document(pair: Pair, runs: Sequence[Run]) -> dict[str, Any]:
    before, after = runs[pair.a], runs[pair.b]
    single = _known(pair.independent, before, after)
    blocked = _known(pair.blocked, before, after)
    return {
        "a": str(before.path),
        "b": str(after.path),
        "ratio": pair.ratio,
        "lo": single and single.low,
        "hi": single and single.high,
        "block_lo": blocked and blocked.low,
        "block_hi": blocked and blocked.high,
        "separated": pair.separated,
        "decode_only": pair.decode_only,
        "warnings": list(pair.caveats),
    }


def _known(interval: Interval, *runs: Run) -> Interval | None:
    """The interval, if there is one: one token alone says nothing about chance."""
    return interval if min(map(len, runs)) > 1 else None


def _letters(amount: int) -> list[str]:
    """A, B, … Z, AA, AB, …"""
    names = list(string.ascii_uppercase)
    while len(names) < amount:
        names += [first + second for first in names for second in string.ascii_uppercase]
    return names[:amount]


def _files_section(result: Comparison, letters: Sequence[str]) -> str:
    lines = []
    for n, run in enumerate(result.runs):
        settings = "  ".join(
            f"{one_line(key)}={one_line(values[n])}" for key, values in result.differences.items()
        )
        lines.append(wrapped(f"{letters[n]}  {one_line(str(run.path))}", indent=3))
        if settings:
            lines.append(wrapped(f"   {settings}", indent=3))
    return "\n".join(lines)


def _rates_section(result: Comparison, letters: Sequence[str]) -> str:
    rows = [
        [
            letters[n],
            str(len(run)),
            number(run.rate.tok_s, 3),
            _interval(_known(run.rate.interval, run)),
            _interval(_known(run.blocked_rate.interval, run)),
        ]
        for n, run in enumerate(result.runs)
    ]
    skipped = max((run.skip for run in result.runs), default=0)
    cut = f", without each run's first {skipped}" if skipped else ""
    return section(
        f"Rates{cut}, with 95 % bootstrap intervals: tokens drawn one by one, and in blocks of "
        "neighbours, since those are alike",
        ["", "tokens", "tok/s", "one by one", "in blocks"],
        rows,
    )


def _figures_section(result: Comparison, letters: Sequence[str]) -> str:
    rows = []
    for n, run in enumerate(result.runs):
        spent = run.token_time
        with_prompt = run.decode_hit_pct is None and run.cumulative_hit_pct is not None
        hits = run.cumulative_hit_pct if run.decode_hit_pct is None else run.decode_hit_pct
        rows.append(
            [
                letters[n],
                number(spent.compute_ms),
                number(spent.wait_ms),
                number(spent.mgmt_ms),
                number(spent.loop_ms),
                number(run.reads),
                number(run.read_mib),
                number(hits) + ("*" if with_prompt else " "),
                number(run.drop_pct),
                number(run.major_faults),
            ]
        )
    text = section(
        "Where a token's time goes (ms), and what it takes: experts read, hits and dropped "
        "experts in percent, major page faults",
        ["", "compute", "wait", "manage", "loop", "reads", "MiB", "hit% ", "drop%", "faults"],
        rows,
    )
    if any(row[7].endswith("*") for row in rows):
        text += "\n  * from the run's start on, the prompt included: the file has no hits per token"
    return text


def _pairs_section(result: Comparison, letters: Sequence[str]) -> str:
    rows = [
        [
            f"{letters[pair.b]} / {letters[pair.a]}",
            number(pair.ratio, 3) + ("*" if pair.decode_only else " "),
            _interval(_pair_interval(pair.independent, pair, result)),
            _interval(_pair_interval(pair.blocked, pair, result)),
            _verdict(pair),
        ]
        for pair in result.pairs
    ]
    text = section(
        "Pairs: how many times faster the first is than the second; separated if both intervals "
        "leave out 1",
        ["", "ratio ", "one by one", "in blocks", ""],
        rows,
    )
    if any(pair.decode_only for pair in result.pairs):
        text += "\n  * decodes alone: one file does not tell the time between them"
    return text


def _verdict(pair: Pair) -> str:
    if pair.separated:
        return "separated"
    return "not separated" if pair.enough_tokens else "too few tokens"


def _pair_interval(interval: Interval, pair: Pair, result: Comparison) -> Interval | None:
    return _known(interval, result.runs[pair.a], result.runs[pair.b])


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return UNAVAILABLE
    return f"{number(interval.low, 3)} – {number(interval.high, 3)}"


def _caveat_words(caveat: Caveat, letters: Sequence[str]) -> str:
    advice = f". {caveat.advice[:1].upper()}{caveat.advice[1:]}" if caveat.advice else ""
    return wrapped(f"! {caveat.text}: {_group_words(caveat, letters)}{advice}", indent=2)


def _group_words(caveat: Caveat, names: Sequence[str]) -> str:
    return "; ".join(
        f"{one_line(value)} ({', '.join(names[n] for n in runs)})" for value, runs in caveat.groups
    )


def _unchecked_words(result: Comparison, letters: Sequence[str]) -> str:
    if not result.unchecked:
        return ""
    parts: dict[tuple[int, ...], list[str]] = {}
    for what, runs in result.unchecked.items():
        parts.setdefault(runs, []).append(_UNCHECKED[what])
    words = []
    for runs, whats in parts.items():
        whose = "any file" if len(runs) == len(result.runs) else ", ".join(letters[n] for n in runs)
        words.append(f"{', '.join(whats)} (not told by {whose})")
    return wrapped(f"Could not be compared: {'; '.join(words)}", indent=2)
