"""`tuiwork sweep`: many runs of a matrix of settings, interleaved, resumable, with a report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter, validators

from engine.errors import InputError, TuiworkError
from tuiwork import console
from tuiwork.settings import switch

if TYPE_CHECKING:
    from tuiwork.sweep.matrix import Wishes
    from tuiwork.sweep.plan import Plan
    from tuiwork.sweep.runner import Result
    from tuiwork.sweep.store import Store

MATRIX = Group("What runs", sort_key=1)
HOW = Group("How it runs", sort_key=2)
REPORT = Group("The report", sort_key=3)

DEFAULT_OUT = "sweep"


def _repeated(help: str, metavar: str, group: Group, *names: str) -> Parameter:
    return Parameter(
        name=list(names) or None,
        help=help,
        metavar=metavar,
        negative="",
        show_default=False,
        consume_multiple=False,
        group=group,
        allow_leading_hyphen=True,
    )


@Parameter(name="*")
@dataclass(frozen=True)
class MatrixFlags:
    """What runs."""

    vary: Annotated[
        list[str] | None,
        _repeated(
            "a setting and the values to try: cache-mb=1500,4000; may be repeated: every "
            "combination runs",
            "KEY=A,B,C",
            MATRIX,
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        _repeated("a setting of every run; may be repeated", "KEY=VALUE", MATRIX),
    ] = None
    prompt: Annotated[
        list[str] | None,
        _repeated("what is asked; may be repeated", "TEXT", MATRIX, "--prompt", "-p"),
    ] = None
    prompt_file: Annotated[
        list[Path] | None, _repeated("a file with a prompt; may be repeated", "FILE", MATRIX)
    ] = None
    rounds: Annotated[
        int | None,
        Parameter(
            help="how often each cell runs; every second round goes backwards [default: 2]",
            metavar="N",
            validator=validators.Number(gte=1, lte=1000),
            group=MATRIX,
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class HowFlags:
    """How it runs."""

    out: Annotated[
        Path | None,
        Parameter(help="the sweep's folder [default: ./sweep]", metavar="DIR", group=HOW),
    ] = None
    resume: Annotated[
        Path | None,
        Parameter(help="go on with the sweep in this folder", metavar="DIR", group=HOW),
    ] = None
    cool_down: Annotated[
        list[str] | None,
        _repeated(
            "wait before each cell: max-temperature=60 (°C), max-load=0.5, min-available-mb=8000; "
            "give-up-after=300 (s) ends the wait; may be repeated",
            "CONDITION=N",
            HOW,
        ),
    ] = None
    dask: Annotated[
        str | None,
        Parameter(
            help="run cells on a Dask cluster, or on N new local workers",
            metavar="ADDRESS|local:N",
            group=HOW,
        ),
    ] = None
    dry_run: Annotated[bool, switch("only say what would run, and in which order", HOW)] = False


@Parameter(name="*")
@dataclass(frozen=True)
class ReportFlags:
    """What the report shows."""

    skip: Annotated[
        int,
        Parameter(
            help="leave out each cell's first N tokens",
            metavar="N",
            validator=validators.Number(gte=0),
            group=REPORT,
        ),
    ] = 0
    quality: Annotated[
        Path | None,
        Parameter(help="figures of tuiwork quality --json, to show speed against", group=REPORT),
    ] = None


def sweep(
    *what: Annotated[
        str,
        Parameter(
            help="a model (.gguf), a sweep's TOML file, and profiles to run side by side",
            metavar="MODEL|FILE|PROFILE",
        ),
    ],
    matrix: MatrixFlags | None = None,
    how: HowFlags | None = None,
    report: ReportFlags | None = None,
) -> int:
    """Run a matrix of settings over profiles and prompts, and write a report about it."""
    from tuiwork.sweep.store import Store

    matrix, how, report = matrix or MatrixFlags(), how or HowFlags(), report or ReportFlags()
    if report.quality is not None:
        from tuiwork.sweep.quality import read_quality

        read_quality(report.quality)  # a mistake shows before the work, not after it
    if how.dask is not None:
        from tuiwork.sweep.farm import check_farm

        check_farm(how.dask)
    store = Store((how.resume or how.out or Path(DEFAULT_OUT)).expanduser())
    if how.resume is not None:
        if what or matrix != MatrixFlags() or how.out is not None or how.cool_down:
            raise InputError(
                "--resume goes on with what the folder's sweep runs: leave out models, profiles, "
                "--vary, --set, --prompt, --rounds, --cool-down and --out"
            )
        plan = _planned(store)
    else:
        plan = _new_plan(_wishes(what, matrix, how.cool_down or []))
    if how.dry_run:
        _show_plan(plan)
        return 0
    return _run_plan(plan, store, how, report)


def _planned(store: Store) -> Plan:
    plan = store.plan() if store.folder.is_dir() else None
    if plan is None:
        raise InputError(f"--resume {store.folder}: there is no sweep to go on with")
    return plan


def _wishes(what: Sequence[str], flags: MatrixFlags, cool_down: Sequence[str]) -> Wishes:
    """What is to run: the sweep file's wishes, and over them the command line's."""
    from engine.profile import parse_set
    from tuiwork.sweep.matrix import (
        check_prompt,
        parse_cool_down,
        parse_vary,
        read_prompt,
    )

    wishes = _named(what)
    varied = dict(parse_vary(text) for text in flags.vary or [])
    if varied:
        wishes.matrices = [{**matrix, **varied} for matrix in wishes.matrices or [{}]]
    wishes.settings |= dict(parse_set(text) for text in flags.set or [])
    prompts = [check_prompt(text, "--prompt") for text in flags.prompt or []]
    for path in flags.prompt_file or []:
        where = f"--prompt-file {path}"
        prompts.append(check_prompt(read_prompt(path, "--prompt-file"), where))
    wishes.prompts = prompts or wishes.prompts
    wishes.rounds = flags.rounds or wishes.rounds
    wishes.cool_down |= dict(parse_cool_down(text) for text in cool_down)
    return wishes


def _named(what: Sequence[str]) -> Wishes:
    """The wishes of the sweep file among some names, with the model and profiles among them."""
    from tuiwork.sweep.matrix import Wishes, is_sweep_file, read_sweep

    models = [word for word in what if _is_model(Path(word).expanduser())]
    others = [Path(word) for word in what if word not in models]
    files = [path for path in others if path.suffix == ".toml" and path.is_file()]
    sweeps = [path for path in files if is_sweep_file(path)]
    for found, kind in ((models, "model"), (sweeps, "sweep file")):
        if len(found) > 1:
            raise InputError(f"{found[1]}: is a second {kind}; a sweep has one")
    wishes = read_sweep(sweeps[0]) if sweeps else Wishes()
    profiles = [str(path) for path in others if path not in sweeps]
    wishes.profiles = profiles or wishes.profiles
    if models:
        wishes.model = str(Path(models[0]).expanduser().absolute())
    return wishes


def _is_model(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return path.is_file() and file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False


def _new_plan(wishes: Wishes) -> Plan:
    from tuiwork.models import DEMO_PROFILE, demo_model
    from tuiwork.sweep.matrix import make_arms, make_plan, prompts_of

    # All is checked before a demo model may have to be made.
    arms = make_arms(wishes)
    prompts_of(wishes, arms)
    if not all(arm.settings["model.path"] for arm in arms):
        # As everywhere: without a model, the demo model, and below all its own settings.
        wishes.model = str(demo_model())
        arms = make_arms(wishes, [DEMO_PROFILE])
    return make_plan(wishes, arms)


def _show_plan(plan: Plan) -> None:
    for arm in plan.arms:
        console.say(f"{arm.letter}  {arm.name}")
    console.say()
    console.say(" ".join(cell.id for cell in plan.cells))


def _run_plan(plan: Plan, store: Store, how: HowFlags, report: ReportFlags) -> int:
    """Run what the folder lacks, and write the report, with the folder held."""
    from tuiwork.sweep.runner import Runner

    if how.dask is None:
        plan.cool_down.require_measured()
    store.prepare()
    with store.locked():
        store.adopt(plan)
        runner = Runner(plan, store)
        if how.dask is None or not runner.left:
            result = runner.run()
        else:
            from tuiwork.sweep.farm import connected

            with connected(how.dask) as farm:
                result = runner.run(farm)
        trouble = _report(plan, store, report, only_table=bool(result.trouble))
    return _end(result, store, trouble)


def _report(plan: Plan, store: Store, flags: ReportFlags, *, only_table: bool) -> str:
    """The report's main table to stdout, and all of it to the folder; what went wrong, or nothing.

    `only_table` leaves the folder alone, which cannot take anything.
    """
    from tuiwork.sweep.quality import front, read_quality
    from tuiwork.sweep.report import write_report
    from tuiwork.sweep.results import collect
    from tuiwork.sweep.summary import summary

    result = collect(plan, store.finished(plan), store.failures(plan), flags.skip)
    if not result.arms:
        return ""
    quality = read_quality(flags.quality) if flags.quality is not None else None
    console.write(summary(result) + "\n")
    if only_table:
        return ""
    try:
        written = write_report(store, result, front(result.arms, quality), _resume(store))
    except OSError as error:
        return f"the report could not be written: {error.strerror}"
    console.note(f"Report: {written[0]} and {written[1].name}")
    return ""


def _resume(store: Store) -> str:
    return f"tuiwork sweep --resume {shlex.quote(str(store.folder))}"


def _end(result: Result, store: Store, trouble: str) -> int:
    """Say how far the sweep got, and how to go on; the exit status."""
    kept = f"{result.done} of {result.total} cells are done and kept"
    trouble = result.trouble or trouble
    if trouble:
        raise TuiworkError(
            f"{store.folder}: {trouble}. {kept}; when that is mended, go on with: {_resume(store)}"
        )
    if result.stopped:
        console.note(f"Stopped: {kept}. Go on with: {_resume(store)}")
        return 130
    if result.failed:
        raise TuiworkError(
            f"{result.failed} of {result.total} cells failed; {kept}. "
            f"Try the failed ones again with: {_resume(store)}"
        )
    return 0
