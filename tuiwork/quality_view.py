"""`tuiwork quality`: what was measured as a table for the terminal, or as a JSON document.

The document carries every figure unrounded and says null where a figure is unmeasured; the table
rounds, and shows – there. Fractions are 0 to 1 in the document, percent in the table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.policy import TOP_K_THAT_WARNS
from engine.quality import QualityResult
from engine.quality_curves import Verdicts, verdicts
from engine.quality_figures import Figures, SettingRun, summarise
from engine.quality_sets import DROP_RAW, Variant
from engine.quality_stats import FEWEST_FOR_P99, Estimate, MovingBlocks
from engine.stats import CONFIDENCE, FEWEST_TOKENS
from tuiwork.figures import config_document
from tuiwork.tables import UNAVAILABLE, count, wrapped
from tuiwork.text import MIB, one_line

FEWEST_SCORED = 256
"""Below this many tokens the rare large divergences have hardly had a chance to come."""


def document(result: QualityResult) -> dict[str, Any]:
    """Everything that was measured, as plain values."""
    blocks = MovingBlocks(result.n_scored)
    found = verdicts(result.runs, result.reference)
    return {
        "model": dataclasses.asdict(result.model),
        "config": config_document(result.config),
        "text": {
            "name": result.corpus.name,
            "windows": result.n_windows,
            "scored_tokens": result.n_scored,
            "warm_up_tokens": result.warm_up,
        },
        "intervals": {
            "confidence": CONFIDENCE,
            "method": "moving-block bootstrap",
            "block_tokens": blocks.block,
        },
        "reference": _setting_document(result.reference, result, blocks),
        "settings": [_setting_document(run, result, blocks) for run in result.runs],
        "curves": [dataclasses.asdict(curve) for curve in found.curves],
        "at_equal_reads": [_level_document(level) for level in found.levels],
        "renormalising": [
            {**_flat(pair, "difference"), "separated": pair.separated}
            for pair in found.renormalising
        ],
        "turns": [dataclasses.asdict(turn) for turn in found.turns],
        "complete": not result.unfinished and not result.failed,
        "unfinished": result.unfinished,
        "failed": result.failed,
        "notes": notes(result),
    }


def _setting_document(
    run: SettingRun, result: QualityResult, blocks: MovingBlocks
) -> dict[str, Any]:
    figures, cache = summarise(run, result.reference, blocks), run.cache
    return {
        "name": run.variant.name,
        "family": run.variant.family,
        "settings": run.variant.settings,
        "tokens": run.n_tokens,
        **_bounds("ppl", figures.ppl),
        **_bounds("ppl_ratio", figures.ppl_ratio),
        "kl_mean": figures.kl_mean.value,
        "kl_lo": figures.kl_mean.low,
        "kl_hi": figures.kl_mean.high,
        **_bounds("kl_p99", figures.kl_p99),
        "kl_max": figures.kl_max,
        **_bounds("top1", figures.top1),
        **_bounds("reads_saved", figures.reads_saved),
        **_bounds("hit_rate", figures.hit_rate),
        **_bounds("drop_rate", figures.drop_rate),
        **_bounds("substitute_rate", figures.substitute_rate),
        **_bounds("mass_lost", figures.mass_lost),
        "experts_per_token": run.top_k,
        **{
            name: int(run.total(name))
            for name in (
                *("reads", "read_bytes", "hits", "misses", "evictions"),
                *("routed", "dropped", "substituted"),
            )
        },
        "cache": {**dataclasses.asdict(cache), "entry": cache.entry},
        "seconds": run.seconds,
    }


def _bounds(name: str, estimate: Estimate) -> dict[str, float | None]:
    return {name: estimate.value, f"{name}_lo": estimate.low, f"{name}_hi": estimate.high}


def _flat(value: Any, estimate: str) -> dict[str, Any]:
    """A dataclass as a document, one Estimate of it laid flat."""
    plain = dataclasses.asdict(value)
    del plain[estimate]
    return plain | _bounds(estimate, getattr(value, estimate))


def _level_document(level: Any) -> dict[str, Any]:
    return {
        "reads_saved": level.reads_saved,
        "families": [_flat(family, "kl") for family in level.families],
        "separated": level.separated,
    }


def table(result: QualityResult) -> str:
    """The result as text for a terminal of 80 columns."""
    found = verdicts(result.runs, result.reference)
    sections = [
        _head(result),
        _settings_section(result),
        _levels_section(found),
        _renorm_section(found),
        _turn_section(found),
        "\n".join(wrapped(note, 2) for note in notes(result)),
    ]
    return "\n\n".join(section for section in sections if section)


def _head(result: QualityResult) -> str:
    model, cache = result.model, result.reference.cache
    figures = summarise(result.reference, result.reference)
    entry = f"warm after {cache.warm_up_tokens} tokens" if cache.warm_up_tokens else "cold"
    lines = [
        f"{one_line(model.name)} ({one_line(model.arch)}): {model.n_expert} experts, "
        f"top-{model.n_expert_used}",
        f"  Text: {one_line(Path(result.corpus.name).name)}, {result.n_scored} scored tokens in "
        f"{count(result.n_windows, 'window')}, one at a time",
        f"  Cache: {cache.budget_bytes // MIB} MiB, {entry} "
        f"({cache.entry_bytes / MIB:.1f} MiB of experts in it)",
        f"  Lossless: perplexity {_interval(figures.ppl, 4)}, hits {_pct(figures.hit_rate)} %, "
        f"read {result.reference.total('read_bytes') / result.n_scored / MIB:.2f} MiB per token",
    ]
    return "\n".join(wrapped(line, 4) for line in lines)


def _settings_section(result: QualityResult) -> str:
    if not result.runs:
        return ""
    blocks = MovingBlocks(result.n_scored)
    header = ["setting", "ppl", "KL mean", "[95 %]", "p99", "top-1", "saved", "out"]
    rows = [
        _setting_row(run.variant, summarise(run, result.reference, blocks)) for run in result.runs
    ]
    title = (
        "LOSSY settings against the lossless run: KL divergence in nats, how often the likeliest "
        "token is the same (top-1, %), read bytes saved (%), routed experts dropped or substituted "
        "(out, %)"
    )
    return f"{wrapped(title)}\n{_grid(header, rows)}"


def _setting_row(variant: Variant, figures: Figures) -> list[str]:
    kl = figures.kl_mean
    bounds = f"{_number(kl.low)}–{_number(kl.high)}" if kl.interval else UNAVAILABLE
    out = None
    if figures.drop_rate.value is not None and figures.substitute_rate.value is not None:
        out = figures.drop_rate.value + figures.substitute_rate.value
    return [
        variant.name,
        _number(figures.ppl.value, 4),
        _number(kl.value),
        bounds,
        _number(figures.kl_p99.value),
        _pct(figures.top1),
        _pct(figures.reads_saved),
        _pct(Estimate(out)),
    ]


def _levels_section(found: Verdicts) -> str:
    compared = [level for level in found.levels if len(level.families) > 1]
    if not compared:
        return ""
    lines = [
        wrapped(
            "At equal reads saved, the mean KL of each kind, cheapest first (between measured "
            "settings a straight line; < separated, ~ not separated)"
        )
    ]
    for level in compared:
        words = [f"{one.family} {_number(one.kl.value)}" for one in level.families]
        sign = {True: " < ", False: " ~ ", None: ", "}[level.separated]
        text = words[0] + sign + ", ".join(words[1:])
        lines.append(wrapped(f"{100 * level.reads_saved:5.0f} %  {text}", 9))
    return "\n".join(lines)


def _renorm_section(found: Verdicts) -> str:
    if not found.renormalising:
        return ""
    lines = ["Renormalising: mean KL of dropping with and without it"]
    for pair in found.renormalising:
        difference = pair.difference.value or 0.0
        verdict = "unmeasured"
        if pair.separated is not None:
            helps = "it helps" if difference > 0 else "it hurts"
            verdict = helps if pair.separated else "no difference that is more than chance"
        lines.append(
            f"  {pair.fraction:<5g} {_number(pair.kl_with):>8} with "
            f"{_number(pair.kl_without):>8} without: {verdict}"
        )
    return "\n".join(lines)


def _turn_section(found: Verdicts) -> str:
    if not found.turns:
        return ""
    lines = ["Where each curve turns from cheap reads to dear ones, among the measured settings"]
    for turn in found.turns:
        settled = "" if turn.agreement >= CONFIDENCE else ": not settled"
        share = f"in {100 * turn.agreement:.0f} % of the resamples{settled}"
        lines.append(f"  {turn.family}: at {turn.name} ({share})")
    return "\n".join(wrapped(line, 4) for line in lines)


def notes(result: QualityResult) -> list[str]:
    """What a reader must know to not read too much into the figures."""
    found = list(result.notes)
    n, cache = result.n_scored, result.reference.cache
    if n < FEWEST_TOKENS:
        found.append(f"{n} tokens are too few for intervals: none are given")
    elif n < FEWEST_SCORED:
        found.append(
            f"{n} tokens are few: rare, large divergences may be missing, and intervals too narrow"
        )
    if n < FEWEST_FOR_P99:
        found.append(f"a 99th percentile needs {FEWEST_FOR_P99} tokens, so none is given")
    if cache.budget_bytes >= result.model.expert_bytes_total:
        found.append(
            "the cache holds all experts, so only those were cold that had not been read yet. A "
            "smaller --cache-mb shows what dropping costs where memory is short"
        )
    elif not cache.warm_up_tokens:
        found.append("the cache was empty at the start: the first tokens find every expert cold")
    if 0 < result.model.n_expert_used <= TOP_K_THAT_WARNS:
        found.append(
            f"with top-{result.model.n_expert_used} each expert carries much of the answer: these "
            "figures say little about models with more experts per token"
        )
    if any(variant.family == DROP_RAW for variant in result.planned):
        found.append("raw: the survivors' weights are not scaled up (drop-renorm = false)")
    if result.corpus.cut:
        found.append("the text's file is longer than what was read of it")
    if result.unfinished:
        found.append(f"not finished: {', '.join(result.unfinished)}")
    found += [f"{name} failed: {one_line(why)}" for name, why in result.failed.items()]
    return found


def _grid(header: list[str], rows: Sequence[list[str]]) -> str:
    """The first column flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _interval(estimate: Estimate, digits: int = 3) -> str:
    text = _number(estimate.value, digits)
    if estimate.interval is None:
        return text
    return f"{text} ({_number(estimate.low, digits)}–{_number(estimate.high, digits)})"


def _number(value: float | None, digits: int = 3) -> str:
    """A figure to so many significant digits; exactly 0 is shown as 0."""
    if value is None or not math.isfinite(value):
        return UNAVAILABLE
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{places}f}"
    return f"{value:.{digits - 1}e}"


def _pct(estimate: Estimate) -> str:
    value = estimate.value
    return UNAVAILABLE if value is None or not math.isfinite(value) else f"{100 * value:.1f}"
