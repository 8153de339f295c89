"""`tuiwork synth`: a synthetic model, to try a shape without downloading anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from engine.errors import InputError
from tuiwork import console
from tuiwork.settings import switch
from tuiwork.text import size


def synth(
    out: Annotated[str | None, Parameter(help="the file to write")] = None,
    /,
    *,
    shape: Annotated[
        str, Parameter(help="a named shape, or one with changes: tiny,n-layer=6 (see --list)")
    ] = "tiny",
    seed: Annotated[int, Parameter(help="the same seed gives the same bytes")] = 1,
    shards: Annotated[
        int | None, Parameter(help="files to split the model into; default: the shape's own")
    ] = None,
    chat_template: Annotated[
        bool,
        Parameter(
            help="leave the chat template out",
            negative="--no-chat-template",
            name="",
            show_default=False,
        ),
    ] = True,
    force: Annotated[bool, switch("replace a file that exists")] = False,
    list: Annotated[bool, switch("name the shapes and stop")] = False,
) -> int:
    """Write a synthetic model: random weights in a real file, for tests and measurements."""
    if list:
        return _list_shapes()
    if not out:
        raise InputError("synth: give the file to write, or --list")
    # Imported here: it loads native code, which --list and a missing argument can do without.
    from engine.synth import shape_from_text, write_model
    from tuiwork.progress import ProgressBar

    described = shape_from_text(shape)
    with ProgressBar() as bar:
        files = write_model(
            Path(out).expanduser(),
            described,
            seed=seed,
            shards=shards,
            chat_template=chat_template,
            force=force,
            progress=lambda done, total: bar("writing", done / max(1, total)),
        )
    console.note(f"{described.name}: {size(sum(file.stat().st_size for file in files))} written")
    for file in files:
        console.say(str(file))
    return 0


def _list_shapes() -> int:
    from engine.synth_shapes import SHAPES

    console.table([(shape.name, shape.description) for shape in SHAPES.values()])
    return 0
