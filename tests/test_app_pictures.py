"""How the panels look, at three sizes, with frozen data. After a change that is meant to show:

    pytest tests/test_app_pictures.py --snapshot-update

and look at the pictures: `python scripts/screenshots.py /tmp/pictures --png`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.config import RunConfig
from tests.frozen_engine import FrozenEngine
from tuiwork.app import TuiworkApp
from tuiwork.meters.glyphs import ASCII, Glyphs
from tuiwork.panels.board import PANELS
from tuiwork.panels.palette import Depth

SIZES = ((80, 24), (120, 40), (200, 60))
Compare = Callable[..., bool]
by_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FrozenApp(TuiworkApp):
    """An app in which nothing moves by itself."""

    def _frame(self) -> None:
        return None

    def _ask_machine(self) -> None:
        return None


def frozen_app(
    *, depth: Depth = Depth.FULL, glyphs: Glyphs | None = None, small: bool = False
) -> TuiworkApp:
    """Such an app, about to open its model; a small one where its experts are not the point."""
    shape: dict[str, Any] = {"n_layer": 12, "n_expert": 32, "top_k": 4} if small else {}
    return FrozenApp(
        RunConfig().replace({"routing.drop-cold-experts": 0.5}),
        profile="app",
        client=partial(FrozenEngine, **shape),
        keep_history=False,
        depth=depth,
        glyphs=glyphs,
        clock=Clock(),
    )


async def play(pilot: Pilot[None]) -> TuiworkApp:
    """Sixty tokens, a change, fifty more."""
    app: Any = pilot.app
    engine = app.engine
    await pilot.pause()
    # What the chat looks like is its own pictures' business.
    app.workbench.chat.styles.visibility = "hidden"
    for n_tokens, drop in ((60, 0.0), (50, 0.75)):
        for _ in range(n_tokens):
            engine.tokens(1, drop=drop)
            engine.step(drop=drop)
            for _ in range(2):
                app._clock.now += 0.1
                app.meters.tick(app._clock.now)
        await pilot.pause()
        if not drop:
            engine.set_live({"routing.drop-cold-experts": 0.75})
            await pilot.pause()
    for now_s in (1.0, 2.0):
        app.meters.take_machine(engine.machine_sample(), now_s)
    app.workbench.update_panels()
    await pilot.pause()
    app.workbench.update_panels()
    await pilot.pause()
    return app  # type: ignore[no-any-return]


@by_size
def test_mosaic(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[None]) -> None:
        app = await play(pilot)
        app.set_focus(None)
        await pilot.pause()

    assert snap_compare(frozen_app(), terminal_size=size, run_before=run)


@by_size
@pytest.mark.parametrize("name", [name for name, _ in PANELS])
def test_panel(snap_compare: Compare, name: str, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[None]) -> None:
        app = await play(pilot)
        app.workbench.show_panel([name for name, _ in PANELS].index(name))
        app.workbench.zoom(True)
        await pilot.pause()
        if name == "heatmap":
            await pilot.press("right", "shift+right", "down", "down")
        await pilot.pause()

    assert snap_compare(frozen_app(small=name != "heatmap"), terminal_size=size, run_before=run)


@by_size
def test_tuning(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[None]) -> None:
        app = await play(pilot)
        app.workbench.toggle_tuning()
        await pilot.pause()
        await pilot.press("down", "down")
        await pilot.pause()

    assert snap_compare(frozen_app(small=True), terminal_size=size, run_before=run)


@pytest.mark.parametrize(
    ("depth", "glyphs"),
    [(Depth.SIXTEEN, None), (Depth.NONE, None), (Depth.NONE, ASCII)],
    ids=["sixteen-colours", "no-colour", "ascii"],
)
def test_poor_terminals(snap_compare: Compare, depth: Depth, glyphs: Glyphs | None) -> None:
    async def run(pilot: Pilot[None]) -> None:
        app = await play(pilot)
        app.set_focus(None)
        await pilot.pause()

    app = frozen_app(depth=depth, glyphs=glyphs, small=True)
    assert snap_compare(app, terminal_size=(120, 40), run_before=run)


def test_frozen_is_frozen() -> None:
    engines = [FrozenEngine(lambda _event: None) for _ in range(2)]
    for engine in engines:
        engine.open(RunConfig())
        for _ in range(5):
            engine.step(drop=0.5)
    first, second = (engine.live for engine in engines)
    assert first is not None and second is not None
    assert all((first[name] == second[name]).all() for name in first)
