"""`tuiwork tune`: what was tried and what was kept, as text for the terminal or as a document."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from engine.tune import TuneResult
from engine.tune_knobs import FRACTION
from engine.tune_search import Trial
from tuiwork.tables import UNAVAILABLE, wrapped
from tuiwork.text import MIB, one_line
from tuiwork.tune_profile import shown, trial_words


def document(result: TuneResult, path: Path) -> dict[str, Any]:
    """Everything that is known, as plain values. Rates in tokens per second, KL in nats."""
    search, plan = result.search, result.plan
    return {
        "model": dataclasses.asdict(result.model),
        "profile": path,
        "complete": result.complete,
        "settings": result.changes,
        "start": search.start,
        "max_kl": plan.rules.max_kl,
        "measured": {
            "text": plan.corpus.name,
            "tokens": plan.n_tokens,
            "warm_up_tokens": plan.warm_up,
            "most_rounds": plan.rules.max_rounds,
            "confidence": plan.rules.confidence,
        },
        "lanes": [
            {"lanes": rate.lanes, "bytes_per_s": rate.bytes_per_s} for rate in result.lane_rates
        ],
        "trials": [_trial_document(trial) for trial in search.trials],
        "whole": _trial_document(search.whole) if search.whole is not None else None,
        "notes": notes(result),
    }


def _trial_document(trial: Trial) -> dict[str, Any]:
    found = trial.comparison
    return {
        "key": trial.key or None,
        "before": trial.before,
        "after": trial.after,
        "tok_s_before": found.before.tok_s,
        "tok_s_after": found.after.tok_s,
        "ratio": found.ratio,
        "lo": found.interval.low,
        "hi": found.interval.high,
        "separated": found.separated,
        "rounds_lo": trial.rounds.low,
        "rounds_hi": trial.rounds.high,
        "round_ratios": trial.round_ratios,
        "verdict": trial.verdict,
        "kl_mean": trial.kl.value,
        "kl_lo": trial.kl.low,
        "kl_hi": trial.kl.high,
        "quality": trial.held,
        "accepted": trial.accepted,
        "reason": trial.reason,
    }


def text(result: TuneResult, path: Path) -> str:
    """What was tried and kept, for a terminal of 80 columns."""
    model = result.model
    lines = [
        f"{one_line(model.name)} ({one_line(model.arch)}): {model.n_expert} experts, "
        f"top-{model.n_expert_used}; cache {result.config.stream.cache_mb} MiB"
    ]
    if result.lane_rates:
        rates = ", ".join(f"{r.lanes}: {r.bytes_per_s / MIB:.0f}" for r in result.lane_rates)
        lines.append(f"Disk, MiB/s with so many readers: {rates}")
    head = "\n".join(wrapped(line, 4) for line in lines)
    lines = [*whole_lines(result), *notes(result)]
    lines += ["", f"Profile: {path}", f"Use it: tuiwork run -p TEXT --profile {path}"]
    tail = "\n".join(wrapped(line, 4) if line else "" for line in lines)
    return "\n\n".join(part for part in (head, _trials(result), tail) if part)


def _trials(result: TuneResult) -> str:
    """What was tried, a line each."""
    if not result.search.trials:
        return ""
    rows = [["setting", "tried", "tok/s", "ratio", "by rounds", "KL", "outcome"]]
    for trial in result.search.trials:
        rows.append(
            [
                trial.key.rpartition(".")[2],
                f"{shown(trial.before)} -> {shown(trial.after)}",
                f"{trial.comparison.after.tok_s:.3g}",
                f"{trial.comparison.ratio:.2f}",
                _by_rounds(trial),
                UNAVAILABLE if trial.kl.value is None else f"{trial.kl.value:.3g}",
                _outcome(trial),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]))
    return "\n".join(lines)


def _by_rounds(trial: Trial) -> str:
    if len(trial.round_ratios) < 2:
        return UNAVAILABLE
    return f"{trial.rounds.low:.2f}–{trial.rounds.high:.2f}"


def _outcome(trial: Trial) -> str:
    if trial.accepted:
        return "kept"
    if trial.held == "broken":
        return "breaks bound"
    if trial.held == "not shown" and trial.verdict == "faster":
        return "bound not shown"
    return "no gain" if trial.verdict == "not separated" else trial.verdict


def whole_lines(result: TuneResult) -> list[str]:
    """How the settings compare with those that the search began with."""
    whole = result.search.whole
    if whole is not None:
        return [f"All together, against the start: {trial_words(whole)}"]
    if not result.complete:
        return ["Stopped; what had been decided by then is in the profile, marked UNFINISHED."]
    if not result.search.trials:
        return ["There was nothing to try."]
    return ["Nothing that was tried was faster than the settings it began with."]


def notes(result: TuneResult) -> list[str]:
    """What a reader must know."""
    found = list(result.notes)
    if result.load > result.place.cpus / 2:
        found.append(
            f"The machine was busy when this began (load {result.load:.1f} on {result.place.cpus} "
            "processors): what is found then may not be what is best when it is quiet."
        )
    if result.place.everything_fits:
        found.append(
            "The cache holds all experts: readers, overlap and dropping would matter only until "
            "each was read once, so they were not tried."
        )
    if result.tuned.routing.drop_cold_experts:
        found.append(
            f"LOSSY: {FRACTION.partition('.')[2]} = {result.tuned.routing.drop_cold_experts:g}. "
            "The bound was held on this text, one token at a time, at this cache size; "
            "`tuiwork quality` measures more."
        )
    return found
