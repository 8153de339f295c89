"""Token metrics for tests: the field's shared runs, and small ones made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "metrics"
PUBLISHED = {"off": 2.549, "050": 2.564, "075": 3.938, "100": 4.702}
"""Tokens per second of the shared runs by dropped fraction, as published."""

OWN = {
    "version": "0.1.0",
    "llama_cpp": "0.3.36",
    "path": "/models/a.gguf",
    "n_expert_used": 2,
    "n_ctx": 4096,
    "threads": 2,
    "temp": 0.0,
    "drop_cold_experts": 0.0,
    "route_traced": 0,
    "io_traced": 0,
    "random_tokens": -1,
    "forced_routes": 0,
}
"""A preamble that leaves nothing unchecked."""


def shared_runs() -> list[Path]:
    """The four shared runs; skips the test that asks where they are not."""
    paths = [SHARED / f"qwen3.6-35b-drop-{name}.csv" for name in PUBLISHED]
    if not all(path.exists() for path in paths):
        pytest.skip("the shared example runs are not here")
    return paths


def metrics_text(
    wall_ms: Sequence[float | str],
    *,
    preamble: Mapping[str, object] = OWN,
    summary: str | None = None,
    **columns: Sequence[object] | object,
) -> str:
    """A metrics file; a column is given as its values, or as the one value of every token."""
    n = len(wall_ms)
    whole = {"step": list(range(1, n + 1)), "wall_ms": list(wall_ms)} | {
        name: list(value) if isinstance(value, (list, tuple)) else [value] * n
        for name, value in ({"experts_routed": 16, "experts_dropped": 0} | columns).items()
    }
    lines = ["# tuiwork_metrics v1", *(f"# {key}={value}" for key, value in preamble.items())]
    lines.append(",".join(whole))
    lines += [",".join(map(str, row)) for row in zip(*whole.values(), strict=True)]
    lines.append(summary if summary is not None else f"# summary tokens={n} n_prompt=9")
    return "\n".join(lines) + "\n"
