"""What takes more than one step: a dialog is shown, and its result is carried out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_state_dir

from engine.config import SETTINGS, RunConfig, check_value, get
from engine.errors import TuiworkError
from engine.profile import parse_value
from tuiwork.text import MIB
from tuiwork.tuning.profiles import to_apply

if TYPE_CHECKING:
    from tuiwork.app import TuiworkApp


async def type_value(app: TuiworkApp, key: str) -> None:
    """Ask for a knob's value and set it."""
    from tuiwork.screens.dialog import TextDialog

    config = app.tuner.wanted()
    if config is None:
        return
    spec = SETTINGS[key]
    now = app.tuner.waiting.get(key, get(config, key))
    text = await app.push_screen_wait(TextDialog(key, spec.doc, str(now)))
    if text is None:
        return
    value = parse_value(spec, text)
    problem = check_value(spec, value)
    if problem:
        app.say(f"{key}: {problem}", is_refusal=True)
    else:
        app.tuner.set({key: value})
        app.workbench.tuning.update_lines()


async def choose_model(app: TuiworkApp) -> None:
    """Choose a model's file and open it, under the settings in force."""
    from tuiwork.model_picker.screen import ModelPicker

    path = await app.push_screen_wait(ModelPicker())
    if path is None:
        return
    config = app.asked() or RunConfig()
    app.open_model(config.replace({"model.path": str(path)}))


async def choose_profile(app: TuiworkApp) -> None:
    """Compare, save and load profiles; a loaded one is applied as far as it can be at once."""
    from tuiwork.screens.profiles import ProfilesScreen

    config = app.asked()
    if config is None:
        app.say("Open a model first: a profile is how one runs.", is_refusal=True)
        return
    chosen = await app.push_screen_wait(ProfilesScreen(config))
    if chosen is None:
        return
    changes = to_apply(config, chosen.config)
    app.meters.profile = chosen.name
    if changes:
        app.tuner.set(changes)
    waiting = len(app.tuner.waiting)
    hint = f"; {waiting} of its settings wait until the model is opened again: F4"
    app.say(f"Profile {chosen.name}{hint if waiting else ' is in force'}.", is_refusal=False)


async def measure_disk(app: TuiworkApp) -> None:
    """Find what the disk gives at most, for the lanes to be measured against."""
    from engine.bandwidth import measure

    opened = app.meters.opened
    if opened is None or not opened.layers:
        app.say("Open a model that streams first.", is_refusal=True)
        return
    if app.busy:
        app.say("Still answering: the disk is measured when it rests.", is_refusal=True)
        return
    app.say("Measuring the disk: some six seconds.", is_refusal=False)
    stream = opened.resolved.stream
    # About one bank's slice: what a lane reads at a time.
    block = max(4096, opened.layers[0].entry_bytes // 3)
    counts = sorted({1, 2, stream.io_threads})
    try:
        rates = await asyncio.to_thread(
            measure,
            Path(opened.info.path),
            block,
            o_direct=stream.o_direct,
            lane_counts=counts,
        )
    except TuiworkError as error:
        app.say(str(error), is_refusal=True)
        return
    best = max(rate.bytes_per_s for rate in rates)
    app.meters.disk_ceiling_bytes_per_s = best
    app.say(f"The disk gives {best / MIB:.0f} MiB/s.", is_refusal=False)


async def welcome(app: TuiworkApp) -> None:
    """Explain the workbench, once."""
    from tuiwork.screens.welcome import WelcomeScreen

    config = app.asked()
    opening = f"Opening {Path(config.model.path).name} meanwhile." if config is not None else ""
    remember_welcome()
    if await app.push_screen_wait(WelcomeScreen(opening, app.workbench.chat)):
        await choose_model(app)


def _welcome_mark() -> Path:
    return Path(user_state_dir("tuiwork", appauthor=False)) / "welcomed"


def is_first_run() -> bool:
    """Whether nobody was welcomed yet."""
    return not _welcome_mark().exists()


def remember_welcome() -> None:
    """Do not explain it again. A folder that cannot be written is no reason to complain."""
    try:
        _welcome_mark().parent.mkdir(parents=True, exist_ok=True)
        _welcome_mark().touch()
    except OSError:
        return
