"""One measured run, as a process of its own: opens a model, generates, prints one JSON line.

`python -m tests.benchmarks.cell MODEL TRACE N_TOKENS key=value…
[--answered-before] [--interpreted]`, keys as in a
profile. Says on standard error when it began and when each token came, for whoever ends it early.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError

from engine.config import SETTINGS, RunConfig, get
from engine.diagnostics import Diagnostics
from engine.session import Session
from engine.telemetry import TokenRow
from tests.benchmarks.bench import PROGRESS

PROMPT_TOKENS = 28
"""As many as the recorded trace's prompt has, so that it warms the cache as it did there."""


def main() -> None:
    """Run one cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("trace", help="a route trace, or - for random tokens")
    parser.add_argument("tokens", type=int)
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument(
        "--answered-before", action="store_true", help="answer once unmeasured before"
    )
    parser.add_argument("--interpreted", action="store_true", help="load tokens in Python")
    arguments = parser.parse_args()
    started = time.perf_counter()
    report_moment()
    first_token_s: list[float] = []

    def on_token(_token: int) -> None:
        report_moment()
        if not first_token_s:
            first_token_s.append(time.perf_counter() - started)

    with opened(
        arguments.model, arguments.trace, arguments.settings, interpreted=arguments.interpreted
    ) as session:
        opened_s = time.perf_counter() - started
        prompt = prompt_of(session)
        if arguments.answered_before:
            session.generate(prompt, n_predict=arguments.tokens)
        answer = session.generate(prompt, n_predict=arguments.tokens, on_token=on_token)
        rows = [row for row in session.metrics.rows if row.turn == len(session.metrics.turns) - 1]
        model = session.model_info
        print(
            json.dumps(
                {
                    **answer.figures,
                    "open_s": opened_s,
                    "first_token_s": first_token_s[0],
                    "n_prompt": answer.n_prompt,
                    **row_figures(rows),
                    "peak_anon_mib": max(row.rss_anon_mib for row in rows),
                    "budget_mib": rows[-1].cache_budget_mib,
                    "budgets_mib": [row.cache_budget_mib for row in rows],
                    "dense_mib": (model.dense_bytes - model.row_bytes) / 2**20,
                    "resolved": resolved(session),
                    "notes": session.notes,
                }
            )
        )


def opened(
    model: str, trace: str, settings: Sequence[str], *, interpreted: bool = False
) -> Session:
    """The session that a cell measures. Raises InputError for settings that cannot be used."""
    changes: dict[str, Any] = {"model.path": model, "run.ignore-eos": True, "model.ctx": 4096}
    changes |= dict(_typed(setting) for setting in settings)
    options = Diagnostics(
        force_routes=None if trace == "-" else Path(trace),
        random_tokens=1 if trace == "-" else None,
        interpreted=interpreted,
    )
    return Session.open(RunConfig().replace(changes), options=options)


def report_moment() -> None:
    """Say on standard error what time it is, on the clock that all processes share."""
    print(f"{PROGRESS}{time.monotonic():.6f}", file=sys.stderr, flush=True)


def row_figures(rows: Sequence[TokenRow]) -> dict[str, list[float]]:
    """What the benchmarks use of the rows, a list with a figure per token for each."""
    return {
        "wall_ms": [row.wall_ms for row in rows],
        "io_ms": [row.io_ms for row in rows],
        "stall_ms": [row.stall_ms for row in rows],
        "mgmt_ms": [row.mgmt_ms for row in rows],
        "overhead_ms": [row.loop_overhead_ms for row in rows],
        "read_bytes": [row.read_bytes for row in rows],
        "hits": [row.hits for row in rows],
        "misses": [row.misses for row in rows],
        "evictions": [row.evictions for row in rows],
        "routed": [row.experts_routed for row in rows],
        "dropped": [row.experts_dropped for row in rows],
        "mass_discarded": [row.mass_discarded for row in rows],
        "majflt": [row.majflt for row in rows],
        "anon_mib": [row.rss_anon_mib for row in rows],
    }


def resolved(session: Session) -> dict[str, Any]:
    """How the session really streams and routes: nothing automatic is left in it."""
    wanted = [key for key in SETTINGS if key.startswith(("stream.", "routing."))]
    return {key: get(session.resolved, key) for key in wanted}


def prompt_of(session: Session) -> str:
    """A prompt of as many tokens as the recorded trace's."""
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
