"""`tuiwork run`: one prompt, one answer, and its figures."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from engine.config import RunConfig
from engine.errors import InputError
from tuiwork import console
from tuiwork.settings import CommonFlags, switch

if TYPE_CHECKING:
    from engine.results import Answer
    from engine.session import Session

RECORDS = Group("Records", sort_key=5)
DIAGNOSTICS = Group("Diagnostics: for measurements and tests, not for answers", sort_key=6)


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

    def check(self) -> None:
        """Refuse files that cannot be written, before the work and not after it."""
        for path in (self.csv, self.route_trace, self.io_trace):
            if path is not None:
                _refuse_unwritable(path)


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
    records.check()
    # All is checked before a demo model may have to be made.
    more = {"run.prompt": text}
    if not common.resolve(model, more).run.prompt.strip():
        raise InputError("give a prompt: -p TEXT, or -p - to read it from standard input")
    config = open_config(model, common, more)
    return _run(config, json, records, diagnostics, fit_answer=common.n_predict is None)


def _refuse_unwritable(path: Path) -> None:
    reason = ""
    if path.is_dir():
        reason = "is a directory"
    elif not path.parent.is_dir():
        reason = f"there is no directory {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "you may not write there"
    if reason:
        raise InputError(f"{path}: cannot be written: {reason}")


def _read_prompt(prompt: str | None) -> str | None:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InputError("-p -: standard input is not a text") from None


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
    from engine.session import Session
    from tuiwork.figures import answer_line, chosen_line, run_document
    from tuiwork.progress import ProgressBar

    options = Diagnostics(
        force_routes=diagnostics.force_routes,
        random_tokens=diagnostics.random_tokens,
        poison=diagnostics.poison,
        route_trace=records.route_trace,
        io_trace=records.io_trace,
    )
    with ProgressBar() as bar:
        session = Session.open(config, progress=bar, options=options)
    with session:
        console.note(chosen_line(session))
        for line in session.notes:
            console.note(line)
        try:
            answer = _answer(session, config, as_json, fit_answer)
        finally:
            # What was measured until a failure is worth keeping.
            if records.csv is not None and session.metrics.rows:
                session.metrics.write_csv(records.csv)
        if as_json:
            console.write_json(run_document(session, answer))
        console.note(answer_line(answer))
    return 130 if answer.stop_reason == "cancelled" else 0


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
