"""One measured run, as a process of its own: opens a model, generates, prints one JSON line.

`python -m tests.benchmarks.cell MODEL TRACE N_TOKENS key=value…`, keys as in a profile.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError

from engine.config import RunConfig
from engine.diagnostics import Diagnostics
from engine.session import Session

PROMPT_TOKENS = 28
"""As many as the recorded trace's prompt has, so that it warms the cache as it did there."""


def main() -> None:
    """Run one cell."""
    model, trace, n_tokens, *settings = sys.argv[1:]
    changes: dict[str, Any] = {"model.path": model, "run.ignore-eos": True, "model.ctx": 4096}
    changes |= dict(_typed(setting) for setting in settings)
    options = Diagnostics(
        force_routes=None if trace == "-" else Path(trace),
        random_tokens=1 if trace == "-" else None,
    )
    started = time.perf_counter()
    first_token_s: list[float] = []

    def on_token(_token: int) -> None:
        if not first_token_s:
            first_token_s.append(time.perf_counter() - started)

    with Session.open(RunConfig().replace(changes), options=options) as session:
        opened_s = time.perf_counter() - started
        answer = session.generate(_prompt(session), n_predict=int(n_tokens), on_token=on_token)
        rows = session.metrics.rows
        print(
            json.dumps(
                {
                    **answer.figures,
                    "open_s": opened_s,
                    "first_token_s": first_token_s[0],
                    "n_prompt": answer.n_prompt,
                    "wall_ms": [row.wall_ms for row in rows],
                    "io_ms": [row.io_ms for row in rows],
                    "stall_ms": [row.stall_ms for row in rows],
                    "mgmt_ms": [row.mgmt_ms for row in rows],
                    "overhead_ms": [row.loop_overhead_ms for row in rows],
                    "read_bytes": [row.read_bytes for row in rows],
                    "hits": [row.hits for row in rows],
                    "misses": [row.misses for row in rows],
                    "routed": [row.experts_routed for row in rows],
                    "dropped": [row.experts_dropped for row in rows],
                    "mass_discarded": [row.mass_discarded for row in rows],
                    "peak_anon_mib": max(row.rss_anon_mib for row in rows),
                    "budget_mib": rows[-1].cache_budget_mib,
                    "dense_mib": session.model_info.dense_bytes / 2**20,
                    "notes": session.notes,
                }
            )
        )


def _prompt(session: Session) -> str:
    text = ""
    while len(session.tokenize(text + "x")) <= PROMPT_TOKENS:
        text += "x" if len(text) % 3 else " "
    return text


def _typed(setting: str) -> tuple[str, Any]:
    key, _, text = setting.partition("=")
    try:
        return key, tomlkit.parse(f"value = {text}").unwrap()["value"]
    except ParseError:
        return key, text


if __name__ == "__main__":
    main()
