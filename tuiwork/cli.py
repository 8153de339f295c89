"""The `tuiwork` command: what may be typed, and how every outcome becomes an exit status.

Starting must be quick, and `--help` and mistakes must not wait for native code: no command imports
the engine's heavy modules before its arguments are known to be good.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import App, CycloptsError, Parameter

from engine.errors import InputError, TuiworkError
from tuiwork import __version__, console
from tuiwork.commands.compare import compare
from tuiwork.commands.doctor import doctor
from tuiwork.commands.inspect import inspect
from tuiwork.commands.profiles import profiles_app
from tuiwork.commands.quality import quality
from tuiwork.commands.replay import replay
from tuiwork.commands.run import run
from tuiwork.commands.sweep import sweep
from tuiwork.commands.synth import synth
from tuiwork.commands.tune import tune
from tuiwork.settings import CommonFlags, switch

APP_PROFILE = "app"
"""What the workbench starts from: LOSSY, as it says everywhere."""

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

app = App(
    name="tuiwork",
    help="Run Mixture-of-Experts models bigger than memory: only the experts that a token is "
    "routed to are read from the model's file. Without a command: the workbench with MODEL.",
    help_format="plaintext",
    version=f"tuiwork {__version__}",
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
for _command in (run, inspect, doctor, replay, compare, sweep, quality, tune, synth):
    app.command(_command)
app.command(profiles_app)


@app.default
def chat(
    model: Annotated[
        str | None,
        Parameter(help="the GGUF file; of a split model, its first part; default: a demo model"),
    ] = None,
    /,
    *,
    common: CommonFlags | None = None,
    plain: Annotated[
        bool, switch("chat in the plain terminal: no panels, and lossless by default")
    ] = False,
    no_history: Annotated[bool, switch("keep no conversation on disk")] = False,
) -> int:
    """Open the workbench: chat with a model and watch it stream."""
    from tuiwork.models import open_config

    if model is not None:
        _refuse_misspelt_command(model)
    flags = common or CommonFlags()
    if not plain and _has_screen():
        return _workbench(model, flags, keep_history=not no_history)
    config = open_config(model, flags)
    # Imported here: it loads native code, and all that could be refused before has been.
    from tuiwork.plain_chat import chat as plain_chat

    return plain_chat(config)


def _has_screen() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _workbench(model: str | None, flags: CommonFlags, *, keep_history: bool) -> int:
    from tuiwork.models import open_config

    config = open_config(model, flags, base=[APP_PROFILE])
    # Imported here: --help and mistakes need no Textual.
    from tuiwork.app import make_app
    from tuiwork.screens.flows import is_first_run

    profiles = [Path(name).stem for name in flags.profile] or [APP_PROFILE]
    app = make_app(
        config,
        profile=" + ".join(profiles),
        keep_history=keep_history,
        first_run=is_first_run(),
    )
    app.run()
    return app.return_code or DONE


def _refuse_misspelt_command(word: str) -> None:
    looks_like_path = os.sep in word or word.endswith(".gguf")
    if looks_like_path or Path(word).exists():
        return
    near = difflib.get_close_matches(word, [name for name in app if not name.startswith("-")], n=1)
    hint = f"; did you mean `tuiwork {near[0]}`?" if near else ""
    raise InputError(f"{word!r} is neither a command nor a file{hint}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    console.prepare_streams()
    status = run_command(sys.argv[1:] if arguments is None else arguments)
    sys.exit(status)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit status. Errors become messages on stderr."""
    try:
        status = app(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        _complain(f"{error}\nSee tuiwork --help, or --help after a command.")
        return BAD_INPUT
    except InputError as error:
        _complain(str(error))
        return BAD_INPUT
    except TuiworkError as error:
        _complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output, such as `head`, has what it wanted.
        console.silence_stdout()
        return DONE
    except OSError as error:
        _complain(f"{error.filename or 'output'}: {error.strerror or error}")
        console.silence_stdout()
        return FAILED
    return status if isinstance(status, int) else DONE


def _complain(message: str) -> None:
    console.note(f"tuiwork: {message}")
