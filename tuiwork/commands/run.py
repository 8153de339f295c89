"""`tuiwork run`: one prompt, one answer, and its figures."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter, validators

from engine.config import RunConfig
from engine.errors import InputError, TuiworkError
from tuiwork import console
from tuiwork.settings import CommonFlags, switch

if TYPE_CHECKING:
    from engine.results import Answer
    from engine.session import Session

RECORDS = Group("Records", sort_key=5)
DIAGNOSTICS = Group("Diagnostics: for measurements and tests, not for answers", sort_key=6)

PART_OF_SPLIT = re.compile(r"(?P<stem>.+-)\d{5}-of-\d{5}\.gguf$")


@Parameter(name="*")
@dataclass(frozen=True)
class Records:
    """Files that a run leaves."""

    csv: Annotated[Path | None, Parameter(help="token metrics, a row per token", group=RECORDS)] = (
        None
    )
    route_trace: Annotated[
        Path | None, Parameter(help="every routing, for tuiwork replay", group=RECORDS)
    ] = None
    io_trace: Annotated[Path | None, Parameter(help="every read", group=RECORDS)] = None

    def check(self, sources: Sequence[Path]) -> None:
        """Refuse files that cannot be written, before the work and not after it.

        And those that would destroy what the run reads, `sources`, or each other.
        """
        seen = {_place(path): f"is read by this run ({path})" for path in sources}
        for flag, path in (
            ("--csv", self.csv),
            ("--route-trace", self.route_trace),
            ("--io-trace", self.io_trace),
        ):
            if path is None:
                continue
            place = _place(path)
            reason = seen.get(place) or _why_unwritable(path)
            if reason:
                raise InputError(f"{flag} {path}: cannot be written: {reason}")
            if not _is_device(path):
                seen[place] = f"{flag} writes there, too"


@Parameter(name="*")
@dataclass(frozen=True)
class DiagnosticFlags:
    """What makes a run say less about answers and more about the engine."""

    force_routes: Annotated[
        Path | None,
        Parameter(help="take the experts of a recorded run, not the router's", group=DIAGNOSTICS),
    ] = None
    random_tokens: Annotated[
        int | None,
        Parameter(
            help="go on with random tokens of this seed, not the likeliest",
            metavar="SEED",
            validator=validators.Number(gte=0),
            group=DIAGNOSTICS,
        ),
    ] = None
    poison: Annotated[
        bool,
        switch("fill experts that are not loaded with NaN, so that using one shows", DIAGNOSTICS),
    ] = False


def run(
    model: Annotated[
        str | None,
        Parameter(help="the GGUF file; of a split model, its first part; default: a demo model"),
    ] = None,
    /,
    *,
    prompt: Annotated[
        str | None,
        Parameter(
            name=["--prompt", "-p"],
            help="the user's message; - reads it from standard input",
            metavar="TEXT",
            allow_leading_hyphen=True,
        ),
    ] = None,
    json: Annotated[bool, switch("one JSON document on stdout, the text in it")] = False,
    common: CommonFlags | None = None,
    records: Records | None = None,
    diagnostics: DiagnosticFlags | None = None,
) -> int:
    """Answer one prompt, streaming the text to stdout; figures go to stderr."""
    from tuiwork.models import open_config

    common = common or CommonFlags()
    records, diagnostics = records or Records(), diagnostics or DiagnosticFlags()
    text = _read_prompt(prompt)
    if text is not None and not text.strip():
        raise InputError("--prompt: the prompt is empty: give a text to answer")
    # All is checked before a demo model may have to be made.
    more = {"run.prompt": text}
    checked = common.resolve(model, more)
    if not checked.run.prompt.strip():
        raise InputError("give a prompt: -p TEXT, or -p - to read it from standard input")
    _refuse_what_needs_streaming(checked, records, diagnostics)
    records.check(_sources(checked, diagnostics))
    config = open_config(model, common, more)
    return _run(config, json, records, diagnostics, fit_answer=common.n_predict is None)


def _refuse_what_needs_streaming(
    config: RunConfig, records: Records, diagnostics: DiagnosticFlags
) -> None:
    if config.stream.enabled:
        return
    for flag, given in (("--io-trace", records.io_trace), ("--poison", diagnostics.poison)):
        if given:
            raise InputError(
                f"{flag}: with --no-stream no expert is read, so there is nothing to do"
            )


def _sources(config: RunConfig, diagnostics: DiagnosticFlags) -> list[Path]:
    """What a run reads and its records must not overwrite: every part of the model among it."""
    sources = [diagnostics.force_routes] if diagnostics.force_routes is not None else []
    if config.model.path:
        first = Path(config.model.path).expanduser()
        part = PART_OF_SPLIT.match(first.name)
        sources += (
            [path for path in first.parent.iterdir() if path.name.startswith(part["stem"])]
            if part and first.parent.is_dir()
            else [first]
        )
    return sources


def _place(path: Path) -> tuple[int, int] | Path:
    """What makes two names one file: where it is on disk, or the name of one still to come."""
    try:
        status = path.stat()
        return status.st_dev, status.st_ino
    except OSError:
        return Path(os.path.realpath(path))


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _why_unwritable(path: Path) -> str:
    if path.is_dir():
        return "is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "you may not write there"
    return ""


def _read_prompt(prompt: str | None) -> str | None:
    """The prompt's text, or None if there is no flag. Raises InputError for what is no text."""
    source, text = "--prompt", prompt
    if prompt == "-":
        source = "-p -"
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            text = "\udcff"
    # Bytes that are no UTF-8 come as halves of surrogate pairs, by flag or by pipe.
    if text is not None and any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"{source}: is not a text in UTF-8")
    return text


def _run(
    config: RunConfig,
    as_json: bool,
    records: Records,
    diagnostics: DiagnosticFlags,
    *,
    fit_answer: bool,
) -> int:
    # Imported here: all that could be refused without native code has been.
    from engine.diagnostics import Diagnostics
    from tuiwork.figures import answer_line, chosen_line, run_document
    from tuiwork.opening import open_session

    options = Diagnostics(
        force_routes=diagnostics.force_routes,
        random_tokens=diagnostics.random_tokens,
        poison=diagnostics.poison,
        route_trace=records.route_trace,
        io_trace=records.io_trace,
    )
    with open_session(config, options) as session:
        console.note(chosen_line(session))
        told = list(session.notes)
        for line in told:
            console.note(line)
        answered = False
        try:
            answer = _answer(session, config, as_json, fit_answer)
            answered = True
            if as_json:
                console.write_json(run_document(session, answer))
            console.note(answer_line(answer))
            for line in session.notes:
                if line not in told:
                    console.note(line)
        finally:
            # Last, so that a full disk costs no answer; and what was measured until a failure is
            # worth keeping.
            if records.csv is not None and (answered or session.metrics.rows):
                _write_metrics(session, records.csv)
    return 130 if answer.stop_reason == "cancelled" else 0


def _write_metrics(session: Session, path: Path) -> None:
    try:
        session.metrics.write_csv(path)
    except OSError as error:
        raise TuiworkError(f"{path}: writing the metrics failed: {error.strerror}") from error


def _answer(session: Session, config: RunConfig, as_json: bool, fit_answer: bool) -> Answer:
    from tuiwork.interrupt import cancel_on_interrupt
    from tuiwork.plain_chat import after_bar
    from tuiwork.progress import ProgressBar

    prompt: str | list[dict[str, str]] = config.run.prompt
    if not config.run.raw and not session.model_info.has_chat_template:
        console.note("This model has no chat template: it goes on from the prompt as it is.")
    elif not config.run.raw:
        prompt = [{"role": "user", "content": config.run.prompt}]
        if config.run.system:
            prompt.insert(0, {"role": "system", "content": config.run.system})
    with ProgressBar() as bar, cancel_on_interrupt(session.cancel):
        answer = session.generate(
            prompt,
            fit_answer=fit_answer,
            on_text=None if as_json else after_bar(bar),
            progress=bar,
        )
    if not as_json:
        console.write("\n")
    return answer
