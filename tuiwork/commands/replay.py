"""`tuiwork replay`: what cache sizes and lossy settings would have done to a recorded run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tuiwork import console
from tuiwork.settings import switch


def replay(
    trace: Annotated[Path, Parameter(help="a route trace, as run --route-trace writes it")],
    /,
    *,
    budget: Annotated[
        list[int] | None,
        Parameter(
            help="a cache size in MiB; may be repeated; default: eleven that suit the trace",
            metavar="MIB",
            negative="",
            consume_multiple=False,
        ),
    ] = None,
    plot: Annotated[Path | None, Parameter(help="draw it into this file, PNG or SVG")] = None,
    json: Annotated[bool, switch("one JSON document on stdout")] = False,
) -> int:
    """Replay a recorded run's routing: cache curves, and what lossy settings would cost."""
    # Imported here: it needs numpy, which other commands' start must not wait for.
    from tuiwork.replay_view import run

    run(trace, json=json, plot=plot, budgets=budget or None, out=sys.stdout)
    if plot is not None:
        console.note(f"Drawn into {plot}")
    return 0
