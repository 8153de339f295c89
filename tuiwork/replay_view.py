"""`tuiwork replay`: a replayed trace as a table for the terminal, a JSON document, or a plot.

The document carries every figure unrounded and says null where a trace cannot tell; the table
rounds, and shows – there.
"""

from __future__ import annotations

import dataclasses
from json import dumps
from pathlib import Path
from typing import Any, TextIO

from engine.replay import Replay, replay
from engine.replay_cache import MIB, POLICIES, CurvePoint
from engine.replay_predict import PREDICTORS
from engine.traces import read_route_trace
from tuiwork.tables import count, number, section, wrapped
from tuiwork.text import one_line, sanitize

MOST_COLUMNS = 6
"""Budgets side by side for which there is room."""


def run(
    path: Path, *, json: bool, plot: Path | None, budgets: list[int] | None, out: TextIO
) -> None:
    """Replay the trace at `path` and write the result to `out`; the plot to its own file.

    `budgets` in MiB; None: eleven that suit the trace. Raises InputError for a trace that cannot
    be replayed, and, before any work, for a plot that cannot be drawn.
    """
    if plot is not None:
        from tuiwork.replay_plot import check_plot, write_plot

        check_plot(plot)
    result = replay(read_route_trace(path), budgets)
    if plot is not None:
        write_plot(result, plot)
    # Pure ASCII: a terminal may act on control characters that JSON leaves as they are.
    text = dumps(document(result), indent=2, ensure_ascii=True) if json else sanitize(table(result))
    out.write(text + "\n")


def document(result: Replay) -> dict[str, Any]:
    """A replay as plain values for JSON."""
    return {
        "trace": _trace_document(result),
        "cache_curve": [
            {"budget_mib": p.budget_mib, "policy": p.policy, "hit_pct": p.hit_pct}
            for p in result.cache_curve
        ],
        "over_budget": [
            {"budget_mib": p.budget_mib, "policy": p.policy, "held_mib": p.held_bytes / MIB}
            for p in result.cache_curve
            if _over_budget(p)
        ],
        "drop_curve": [dataclasses.asdict(point) for point in result.drop_curve],
        "topk_curve": [dataclasses.asdict(point) for point in result.topk_curve],
        "drop_dynamic": [dataclasses.asdict(point) for point in result.drop_dynamic],
        "substitute_curve": [dataclasses.asdict(point) for point in result.substitute_curve],
        "topk_dynamic": [dataclasses.asdict(point) for point in result.topk_dynamic],
        "predictors": [
            {
                "predictor": judged.predictor,
                "hit_pct": judged.hit_pct,
                "layers": [{"layer": n, "hit_pct": pct} for n, pct in judged.layers.items()],
            }
            for judged in result.predictors
        ],
        "popularity": [
            {
                "layer": layer.layer,
                "routed": layer.routed,
                "distinct": layer.distinct,
                "experts_for_half": layer.experts_for_half,
                "counts": layer.counts,
            }
            for layer in result.popularity
        ],
        "notes": result.notes,
    }


def table(result: Replay) -> str:
    """A replay as text for a terminal of 80 columns."""
    sections = [
        _head(result),
        _cache_section(result),
        _drop_section(result),
        _lossy_section(result),
        _topk_section(result),
        _predictor_section(result),
        _layer_section(result),
        "\n".join(wrapped(note, indent=2) for note in result.notes),
    ]
    return "\n\n".join(section for section in sections if section)


def _trace_document(result: Replay) -> dict[str, Any]:
    trace = result.trace
    model = trace.model
    values = {name: value for name, value in vars(trace).items() if name != "model"}
    return {
        "model": model.name,
        "arch": model.arch,
        "n_layer": model.n_layer,
        "n_moe_layer": len(model.expert_bytes),
        "n_expert": model.n_expert,
        "n_expert_used": model.n_expert_used,
        "token_demand_mib": model.token_demand / MIB,
        "layer_demand_mib": model.layer_demand / MIB,
        "all_experts_mib": model.all_experts / MIB,
        **values,
    }


def _head(result: Replay) -> str:
    trace = result.trace
    model = trace.model
    name = one_line(Path(model.name.replace("\\", "/")).name) or "a model without a name"
    arch = one_line(model.arch) or "architecture not told"
    lines = [
        f"{name} ({arch})",
        f"  {len(model.expert_bytes)} MoE layers of {model.n_expert} experts, "
        f"{model.n_expert_used} used per token; {trace.distinct_experts} different ones used",
        f"  A token routes {number(model.token_demand / MIB)} MiB of experts; "
        f"all of them are {number(model.all_experts / MIB)} MiB",
        f"  {count(trace.rows, 'row')}: {count(trace.turns, 'turn')}, "
        f"{count(trace.prefill_tokens, 'prompt token')}, "
        f"{count(trace.decode_tokens, 'decoded token')}",
        f"  Recorded while decoding: hits {number(trace.hit_pct)} %, "
        f"dropped {number(trace.drop_pct)} %, substituted {number(trace.substitute_pct)} %, "
        f"read {number(trace.read_mib)} MiB",
    ]
    return "\n".join(wrapped(line, indent=4) for line in lines)


def _cache_section(result: Replay) -> str:
    points = {(p.budget_mib, p.policy): p for p in result.cache_curve}
    budgets = list(dict.fromkeys(p.budget_mib for p in result.cache_curve))
    rows = [
        [str(budget), *(_hit_cell(points[budget, policy]) for policy in POLICIES)]
        for budget in budgets
    ]
    text = section(
        "Cache: hits in percent of decode look-ups, had the cache had this size and policy",
        ["MiB", *(f"{policy} " for policy in POLICIES)],
        rows,
    )
    if any(_over_budget(point) for point in result.cache_curve):
        text += "\n  * held more than the budget: a cache keeps what the layer's last call needed"
    return text


def _hit_cell(point: CurvePoint) -> str:
    return number(point.hit_pct) + ("*" if _over_budget(point) else " ")


def _over_budget(point: CurvePoint) -> bool:
    return point.held_bytes > point.budget_mib * MIB


def _drop_section(result: Replay) -> str:
    rows = [
        [f"{point.frac:.2f}", number(point.io_saved_pct), number(point.mass_lost_pct, 2)]
        for point in result.drop_curve
    ]
    return section(
        "Dropping cold experts below this fraction of a uniform share, miss by miss as recorded: "
        "percent of the read bytes that it saves, and of the routing weight that it loses",
        ["fraction", "saved", "lost"],
        rows,
    )


def _lossy_section(result: Replay) -> str:
    rows = []
    for drop, other in zip(result.drop_dynamic, result.substitute_curve, strict=True):
        rows.append(
            [
                str(drop.budget_mib),
                f"{drop.frac:.2f}",
                number(drop.io_saved_pct),
                number(drop.static_io_saved_pct),
                number(drop.mass_lost_pct, 2),
                number(drop.static_mass_lost_pct, 2),
                number(drop.drop_pct),
                number(drop.read_mib_per_token),
                number(other.io_saved_pct),
                number(other.replaced_mass_pct, 2),
            ]
        )
    return section(
        "Dropping with its effect on the engine's cache of this size, beside the figure miss by "
        "miss (static); drop%: of the routed experts. Substituting: any resident expert of the "
        "layer steps in; mass: the routing weight that it takes over",
        ["MiB", "frac", "saved", "static", "lost", "static", "drop%", "MiB/tok", "saved", "mass"],
        rows,
        above="dropping".center(54) + "substituting",
    )


def _topk_section(result: Replay) -> str:
    if not result.topk_curve:
        return ""
    dynamic = {(point.k, point.budget_mib): point for point in result.topk_dynamic}
    budgets = list(dict.fromkeys(point.budget_mib for point in result.topk_dynamic))
    shown = budgets[:MOST_COLUMNS]
    rows = [
        [
            str(point.k),
            number(point.mass_lost_pct, 2),
            number(point.io_saved_pct),
            *(number(dynamic[point.k, budget].io_saved_pct) for budget in shown),
        ]
        for point in result.topk_curve
    ]
    title = (
        "Fewer experts per token: percent of the routing weight lost, and of the read bytes "
        "saved while decoding, as recorded and with its effect on the engine's cache of this many "
        "MiB (which the prompt then warms less)"
    )
    if len(shown) < len(budgets):
        title += f"; the first {len(shown)} of {len(budgets)} sizes"
    return section(title, ["kept", "lost", "recorded", *map(str, shown)], rows)


def _predictor_section(result: Replay) -> str:
    lines = ["Guessing a token's experts: percent of the routed slots guessed right"]
    for judged in result.predictors:
        meaning = PREDICTORS[judged.predictor]
        line = f"{number(judged.hit_pct):>6}  {judged.predictor}: {meaning}"
        lines.append(wrapped(line, indent=8))
    return "\n".join(lines)


def _layer_section(result: Replay) -> str:
    rows = []
    for layer in result.popularity:
        top = " ".join(f"{expert}:{share:.1f}" for expert, share in layer.top(4))
        guesses = [number(judged.layers.get(layer.layer)) for judged in result.predictors]
        counted = [str(layer.distinct), str(layer.experts_for_half)]
        rows.append([str(layer.layer), *guesses, *counted, top])
    return section(
        "By layer: guessed right (percent), different experts used, how few of them take half of "
        "the routed slots, and the most popular experts with their percentage of the slots",
        ["layer", "previous", "so-far", "overall", "used", "for half", "most popular"],
        rows,
    )
