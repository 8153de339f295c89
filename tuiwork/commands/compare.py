"""`tuiwork compare`: whether runs differ in speed, and by how much."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from engine.errors import InputError
from tuiwork import console
from tuiwork.settings import switch


def compare(
    *csv: Annotated[Path, Parameter(help="token metrics of a run each, as run --csv writes them")],
    skip: Annotated[
        int,
        Parameter(
            help="leave out each run's first N tokens",
            metavar="N",
            validator=validators.Number(gte=0),
        ),
    ] = 0,
    plot: Annotated[Path | None, Parameter(help="draw it into this file, PNG or SVG")] = None,
    json: Annotated[bool, switch("one JSON document on stdout")] = False,
) -> int:
    """Compare runs: rates and ratios with intervals, and what makes a pair incomparable."""
    if not csv:
        raise InputError(
            "give the CSV files of runs to compare, as `tuiwork run --csv` writes them"
        )
    # Imported here: it needs numpy, which other commands' start must not wait for.
    from tuiwork.compare_view import run

    run(csv, skip=skip, json=json, plot=plot, out=sys.stdout)
    if plot is not None:
        console.note(f"Drawn into {plot}")
    return 0
