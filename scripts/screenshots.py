# ruff: noqa: TID251  The ban on importing the screen is for engine/, and this is about the screen.
"""Pictures of the app, for the README and for whoever changes how it looks.

    python scripts/screenshots.py [FOLDER] [--size 120x40] [--only NAME] [--png]

Frozen data (tests/frozen_engine.py), so that a picture changes only when the app does. SVG always;
PNG too where Chromium is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from textual.pilot import Pilot

from engine.config import RunConfig
from tests.frozen_engine import ANSWER, FrozenEngine
from tuiwork.app import TuiworkApp, make_app
from tuiwork.meters.glyphs import ASCII
from tuiwork.panels.palette import Depth

Scene = Callable[[TuiworkApp, FrozenEngine, Pilot[None]], Awaitable[None]]

ROOT = Path(__file__).resolve().parents[1]
SIZES = ("80x24", "120x40", "200x60")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def talk(app: TuiworkApp, engine: FrozenEngine, pilot: Pilot[None]) -> None:
    """A conversation under way, after one change."""
    chat = app.workbench.chat
    chat.composer.put("What did the lighthouse keeper see?")
    await pilot.press("enter")
    await run_tokens(app, engine, pilot, 60)
    await pilot.press("f6", "f6", "f6", "f6", "f6")
    await run_tokens(app, engine, pilot, 50, drop=0.75)
    engine.answer(ANSWER)
    await pilot.pause(0.3)


async def run_tokens(
    app: TuiworkApp, engine: FrozenEngine, pilot: Pilot[None], n: int, drop: float = 0.0
) -> None:
    """Tokens at five a second, with the counters sampled ten times a second."""
    clock = app._clock
    assert isinstance(clock, Clock)
    for _ in range(n):
        engine.tokens(1, drop=drop)
        engine.step(drop=drop)
        for _ in range(2):
            clock.now += 0.1
            app.meters.tick(clock.now)
    await pilot.pause()


async def start(_app: TuiworkApp, _engine: FrozenEngine, pilot: Pilot[None]) -> None:
    """Just opened."""
    await pilot.pause()


async def tuning(app: TuiworkApp, engine: FrozenEngine, pilot: Pilot[None]) -> None:
    """The tuning form beside a conversation."""
    await talk(app, engine, pilot)
    await pilot.press("f3")
    await pilot.pause(0.2)


def zoomed(number: int) -> Scene:
    """One panel over the whole screen."""

    async def scene(app: TuiworkApp, engine: FrozenEngine, pilot: Pilot[None]) -> None:
        await talk(app, engine, pilot)
        app.workbench.show_panel(number)
        app.workbench.zoom(True)
        await pilot.pause(0.2)
        if number == 0:
            await pilot.press("right", "shift+right", "down", "down", "down")
            await pilot.pause(0.2)

    return scene


SCENES: dict[str, Scene] = {
    "start": start,
    "talk": talk,
    "tuning": tuning,
    "experts": zoomed(0),
    "time": zoomed(1),
    "lanes": zoomed(2),
    "drops": zoomed(3),
    "memory": zoomed(4),
    "run": zoomed(5),
}


async def shoot(name: str, size: tuple[int, int], folder: Path, *, ascii_only: bool) -> Path:
    """Play a scene and write what the screen shows."""
    clock = Clock()
    app = make_app(
        RunConfig().replace({"routing.drop-cold-experts": 0.5}),
        profile="app",
        client=FrozenEngine,
        glyphs=ASCII if ascii_only else None,
        clock=clock,
        depth=None if "NO_COLOR" in os.environ else Depth.FULL,
        keep_history=False,
    )
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        engine = app.engine
        assert isinstance(engine, FrozenEngine)
        await SCENES[name](app, engine, pilot)
        app.meters.take_machine(engine.machine_sample(), 1.0)
        app.meters.take_machine(engine.machine_sample(), 2.0)
        app.workbench.update_panels()
        await pilot.pause(0.1)
        path = folder / f"{name}-{size[0]}x{size[1]}{'-ascii' if ascii_only else ''}.svg"
        path.write_text(app.export_screenshot(title="tuiwork"))
    return path


def to_png(svg: Path) -> None:
    """Convert with Chromium, at twice the size."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("no chromium here: only the SVG was written")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text())
    assert box is not None
    width, height = (int(float(part)) for part in box.groups())
    page = svg.with_suffix(".html")
    page.write_text(f'<body style="margin:0"><img src="{svg.name}" width="{width}"></body>')
    subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            f"--window-size={width},{height}",
            f"--screenshot={svg.with_suffix('.png')}",
            page.resolve().as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    page.unlink()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--only", choices=SCENES, action="append")
    parser.add_argument("--ascii", action="store_true", help="as on a terminal without UTF-8")
    parser.add_argument("--png", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for size in options.size or SIZES:
        width, _, height = size.partition("x")
        for name in options.only or SCENES:
            shape = (int(width), int(height))
            svg = asyncio.run(shoot(name, shape, options.folder, ascii_only=options.ascii))
            if options.png:
                to_png(svg)


if __name__ == "__main__":
    main()
