"""A made-up sweep for tests: a plan, and cells that look as if they had run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import SETTINGS, RunConfig, get
from tests.metrics_samples import OWN, metrics_text
from tuiwork.sweep.plan import Arm, Cell, Plan
from tuiwork.sweep.store import ANSWER, RECORD, RESOLVED, TOKENS, Store


def arm(letter: str, varied: Mapping[str, Any], **settings: Any) -> Arm:
    """An arm of the defaults with some settings varied."""
    config = RunConfig().replace({"model.path": "/m/a.gguf", **varied, **settings})
    return Arm(letter, "", dict(varied), {key: get(config, key) for key in SETTINGS})


def plan(**changes: Any) -> Plan:
    """Two arms, the second dropping, two prompts, two rounds."""
    arms = (arm("A", {}), arm("B", {"routing.drop-cold-experts": 0.75}))
    return Plan(**{"arms": arms, "prompts": ("why?", "how?"), **changes})


def finish(
    store: Store,
    cell: Cell,
    wall_ms: float,
    *,
    tokens: int = 80,
    record: Mapping[str, Any] | None = None,
    preamble: Mapping[str, object] | None = None,
    **columns: Any,
) -> None:
    """Put a cell into the folder as a run would have left it."""
    fraction = cell.arm.settings["routing.drop-cold-experts"]
    times = [wall_ms, wall_ms * 1.1] * (tokens // 2)
    text = metrics_text(
        times, preamble={**OWN, "drop_cold_experts": fraction, **(preamble or {})}, **columns
    )
    entry = {"available_mib": 9000.0, "cpu_mhz": 2000.0, "temperature_c": None, "load": 0.5}
    plain: dict[str, Any] = {
        "cell": cell.id,
        "started": 1.7e9,
        "seconds": 8.0,
        "host": "here",
        "at_once": 1,
        "entry": entry,
        "cool_down": None,
        "resolved": cell.arm.profile_document,
    }
    files = {
        TOKENS: text,
        ANSWER: "{}",
        RESOLVED: "",
        RECORD: json.dumps({**plain, **(record or {})}),
    }
    store.finish(cell, {name: content.encode() for name, content in files.items()})


def folder_with(path: Path, of: Plan) -> Store:
    """A sweep's folder that belongs to a plan."""
    store = Store(path)
    store.prepare()
    store.adopt(of)
    return store
