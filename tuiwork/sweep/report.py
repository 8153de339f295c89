"""A sweep's report: one set of facts, as Markdown and as HTML.

Names, prompts and values come from files and people: the HTML template escapes everything, the
Markdown one everything that it marks with `md`.
"""

from __future__ import annotations

import base64
import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.whole_file import write_whole
from tuiwork.sweep.plots import draw_plots, plots_possible
from tuiwork.sweep.quality import KL, Front, Point
from tuiwork.sweep.results import ArmResult, SweepResult
from tuiwork.sweep.store import FinishedCell, Store
from tuiwork.tables import UNAVAILABLE, number
from tuiwork.text import one_line, sanitize

_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~&]|^[-+]|^\d+(?=[.)]))")
_LONGEST_PROMPT = 200
_STATE = (
    ("available_mib", "available memory, MiB", 0),
    ("cpu_mhz", "processor, MHz", 0),
    ("temperature_c", "temperature, °C", 1),
    ("load", "load", 2),
)


def write_report(store: Store, result: SweepResult, front: Front, resume: str) -> list[Path]:
    """Write the report and its plots into the sweep's folder; the files. Raises OSError.

    `resume` is the command that goes on with the sweep.
    """
    plots: dict[str, bytes] = draw_plots(result, front) if plots_possible() else {}
    written = []
    if plots:
        (store.folder / "plots").mkdir(exist_ok=True)
    for name, image in plots.items():
        written.append(store.folder / "plots" / f"{name}.png")
        write_whole(written[-1], image)
    facts = _facts(store, result, front, resume, plots)
    for name, text in _rendered(facts).items():
        written.insert(0, store.folder / name)
        write_whole(written[0], text)
    return written


def _rendered(facts: Mapping[str, Any]) -> dict[str, str]:
    # Imported here: it is only needed at a sweep's end.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).parent / "templates"
    texts = {}
    for name, is_html in (("report.md", False), ("report.html", True)):
        environment = Environment(
            loader=FileSystemLoader(folder),
            autoescape=is_html,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["md"] = _markdown
        # Whatever a terminal or a browser might take for a command is made visible first.
        texts[name] = sanitize(environment.get_template(f"{name}.j2").render(facts))
    return texts


def _markdown(text: object) -> str:
    """A text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", one_line(str(text)))


def _facts(
    store: Store,
    result: SweepResult,
    front: Front,
    resume: str,
    plots: Mapping[str, bytes],
) -> dict[str, Any]:
    plan = result.plan
    finished = [cell.finished for cell in result.cells]
    return {
        "description": plan.description or "Sweep",
        "models": sorted(plan.models),
        "written": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "done": len(finished),
        "total": len(plan.cells),
        "missing": result.missing,
        "resume": resume,
        "rounds": plan.rounds,
        "prompts": [_prompt(text) for text in plan.prompts],
        "skipped": result.cells[0].run.skip,
        "arms": [_arm(result, n) for n in range(len(result.arms))],
        "by_prompt": _by_prompt(result) if len(plan.prompts) > 1 else [],
        "first": result.arms[0].arm.letter,
        "front": _front(front),
        "doubts": result.doubts,
        "failures": dict(result.failures),
        "state_names": [title for _, title, _ in _STATE],
        "state": [_state(arm) for arm in result.arms],
        "resolved": _resolved(result.arms),
        "images": {name: base64.b64encode(image).decode() for name, image in plots.items()},
        "cells": [_cell(store, cell) for cell in finished],
    }


def _prompt(text: str) -> str:
    words = one_line(text)
    return words if len(words) <= _LONGEST_PROMPT else words[:_LONGEST_PROMPT] + " …"


def _arm(result: SweepResult, n: int) -> dict[str, Any]:
    arm = result.arms[n]
    run, spent = arm.pooled, arm.pooled.token_time
    pair = next((pair for pair in result.pairs if pair.b == n), None)
    paired = result.paired_ratios(0, n) if n else []
    rates = arm.cell_rates
    return {
        "letter": arm.arm.letter,
        "name": arm.arm.name,
        "cells": len(arm.cells),
        "tokens": len(run),
        "tok_s": number(run.rate.tok_s, 3),
        "single": _range(run.rate.interval.low, run.rate.interval.high, 3),
        "blocks": _range(run.blocked_rate.interval.low, run.blocked_rate.interval.high, 3),
        "spread": _range(min(rates), max(rates), 3),
        "ratio": number(pair.ratio, 3) if pair else UNAVAILABLE,
        "ratio_single": _range(pair.independent.low, pair.independent.high, 3) if pair else "",
        "ratio_blocks": _range(pair.blocked.low, pair.blocked.high, 3) if pair else "",
        "verdict": _verdict(pair.separated, pair.enough_tokens) if pair else "",
        "paired": _range(min(paired), max(paired), 3) if paired else UNAVAILABLE,
        "faster": f"{sum(ratio > 1 for ratio in paired)} of {len(paired)}" if paired else "",
        "compute": number(spent.compute_ms),
        "wait": number(spent.wait_ms),
        "mgmt": number(spent.mgmt_ms),
        "loop": number(spent.loop_ms),
        "read_mib": number(run.read_mib),
        "reads": number(run.reads),
        "hit": number(run.decode_hit_pct),
        "drop": number(run.drop_pct),
        "mass": number(run.mass_lost_pct, 2),
        "faults": number(run.major_faults),
    }


def _verdict(separated: bool, enough: bool) -> str:
    return "separated" if separated else "not separated" if enough else "too few tokens"


def _range(low: float, high: float, digits: int) -> str:
    return f"{number(low, digits)} – {number(high, digits)}"


def _by_prompt(result: SweepResult) -> list[dict[str, Any]]:
    """Each arm's rate for each prompt, over the rounds."""
    rows = []
    for number_, _ in enumerate(result.plan.prompts, start=1):
        rates = []
        for arm in result.arms:
            runs = [cell.run for cell in arm.cells if cell.finished.cell.prompt == number_]
            seconds = sum(float(run.token_ms.sum()) for run in runs) / 1000
            rates.append(number(sum(map(len, runs)) / seconds if runs else None, 3))
        rows.append({"prompt": number_, "rates": rates})
    return rows


def _front(front: Front) -> dict[str, Any]:
    return {
        "measure": front.measure,
        "points": [_point(point, front) for point in front.points],
        "unknown": list(front.unknown),
        "note": front.note,
        "is_measured": front.measure == KL,
    }


def _point(point: Point, front: Front) -> dict[str, Any]:
    digits = 5 if front.measure == KL else 2
    known = point.cost_low is not None and point.cost_high is not None
    return {
        "letter": point.arm.arm.letter,
        "tok_s": number(point.arm.pooled.rate.tok_s, 3),
        "cost": number(point.cost, digits),
        "interval": _range(point.cost_low or 0.0, point.cost_high or 0.0, digits) if known else "",
        "on_front": point.on_front,
    }


def _state(arm: ArmResult) -> dict[str, Any]:
    """The machine at the start of an arm's cells: the range of each figure."""
    entries = [cell.finished.record.get("entry") or {} for cell in arm.cells]
    cells = []
    for key, _, digits in _STATE:
        values = [float(entry[key]) for entry in entries if entry.get(key) is not None]
        if not values:
            cells.append(UNAVAILABLE)
        elif min(values) == max(values):
            cells.append(number(values[0], digits))
        else:
            cells.append(_range(min(values), max(values), digits))
    return {"letter": arm.arm.letter, "cells": cells}


def _resolved(arms: Sequence[ArmResult]) -> list[str]:
    """What automatic settings became in the runs, with the arms of which that is so."""
    words: dict[str, list[str]] = {}
    for arm in arms:
        for key in ("stream.cache-mb", "stream.overlap", "model.threads", "model.batch"):
            table, _, name = key.partition(".")
            got = {
                str((cell.finished.record.get("resolved") or {}).get(table, {}).get(name))
                for cell in arm.cells
            }
            if got != {str(arm.arm.settings[key])}:
                words.setdefault(f"{name} = {', '.join(sorted(got))}", []).append(arm.arm.letter)
    return [f"{text} ({', '.join(letters)})" for text, letters in words.items()]


def _cell(store: Store, finished: FinishedCell) -> dict[str, Any]:
    record = finished.record
    entry, waited = record.get("entry") or {}, record.get("cool_down")
    started = datetime.datetime.fromtimestamp(float(record.get("started", 0))).astimezone()
    return {
        "id": finished.cell.id,
        "path": str((finished.folder / "tokens.csv").relative_to(store.folder)),
        "started": started.strftime("%H:%M:%S"),
        "seconds": number(float(record.get("seconds", 0.0))),
        "host": str(record.get("host", "")),
        "state": [number(entry.get(key), digits) for key, _, digits in _STATE],
        "waited": UNAVAILABLE if waited is None else _waited(waited),
    }


def _waited(waited: Mapping[str, Any]) -> str:
    words = f"{number(float(waited.get('seconds', 0.0)), 0)} s"
    if not waited.get("gave_up"):
        return words
    return f"{words}, gave up: {'; '.join(map(str, waited.get('unmet', [])))}"
