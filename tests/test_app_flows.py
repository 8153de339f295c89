"""The workbench under a person's hands: keys in, what the screen and the engine see out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual._xterm_parser import XTermParser
from textual.binding import Binding
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from engine.config import RunConfig, get
from engine.messages import EngineDied, OpenFailed, OpenProgress
from tests.chat_app import burst
from tests.conftest import TinyModel
from tests.engine_app import config as tiny_config
from tests.frozen_engine import FrozenEngine
from tuiwork.app import TuiworkApp, make_app
from tuiwork.chat.history import History
from tuiwork.chat.pane import ChatPane
from tuiwork.kept import KeptLines
from tuiwork.keys import BINDINGS
from tuiwork.meters.glyphs import ASCII
from tuiwork.meters.heat import Mode
from tuiwork.meters.meters import Doing
from tuiwork.panels.heatmap import HeatmapPanel
from tuiwork.panels.palette import Depth
from tuiwork.screens.help import HelpScreen
from tuiwork.screens.profiles import ProfilesScreen
from tuiwork.screens.welcome import WelcomeScreen
from tuiwork.tuning import profiles

DROP, CACHE = "routing.drop-cold-experts", "stream.cache-mb"
PATIENCE_S = 20.0
pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def workbench(
    size: tuple[int, int] = (120, 40), config: RunConfig | None = None, **options: Any
) -> AsyncIterator[tuple[TuiworkApp, FrozenEngine, Pilot[None]]]:
    """The app with a frozen engine, its model open."""
    options = {"client": FrozenEngine, "depth": Depth.FULL, "keep_history": False} | options
    app = make_app(config or RunConfig(), **options)
    async with app.run_test(notifications=True, size=size) as pilot:
        await pilot.pause()
        engine: Any = app.engine
        yield app, engine, pilot


def screen_text(app: TuiworkApp) -> str:
    """What stands on the screen, line by line."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    for _ in range(int(PATIENCE_S / 0.05)):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came to be:\n" + screen_text(pilot.app))  # type: ignore[arg-type]


@pytest.fixture
def nobody_welcomed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first run of the workbench."""
    state = str(tmp_path / "state")
    monkeypatch.setattr("tuiwork.screens.flows.user_state_dir", lambda *_a, **_k: state)


class TestTuning:
    async def test_function_keys_turn_knobs_while_writing(self) -> None:
        async with workbench() as (app, _engine, pilot):
            assert app.focused is app.workbench.chat.composer
            await pilot.press("f6", "f6", "f5", "f6", "f7")
            assert app.meters.config is not None
            assert get(app.meters.config, DROP) == 0.1
            assert get(app.meters.config, CACHE) == 3744
            await pilot.pause(0.6)
            assert "LOSSY drop 0.10" in screen_text(app)
            assert app.workbench.chat.composer.text == ""

    async def test_letters_are_text_in_the_composer_and_keys_in_a_panel(self) -> None:
        async with workbench() as (app, _engine, pilot):
            await pilot.press("right_square_bracket", "z", "u")
            assert app.workbench.chat.composer.text == "]zu"
            app.workbench.show_panel(0)
            await pilot.press("right_square_bracket", "plus")
            assert app.meters.config is not None
            assert get(app.meters.config, DROP) == 0.05
            assert get(app.meters.config, CACHE) == 4256
            await pilot.press("u", "u")
            assert get(app.meters.config, DROP) == 0.0
            await pilot.press("U")
            assert get(app.meters.config, DROP) == 0.05

    async def test_the_form_turns_types_and_refuses(self) -> None:
        async with workbench() as (app, _engine, pilot):
            await pilot.press("f3")
            assert app.focused is app.workbench.tuning
            await pilot.press("down", "right")
            assert app.meters.config is not None
            assert app.meters.config.stream.io_threads == 5
            await pilot.press("enter")
            await pilot.pause()
            field = app.screen.query_one(Input)
            assert field.value == "5"
            field.value = "900"
            await pilot.press("enter")
            await pilot.pause()
            assert app.meters.config.stream.io_threads == 5
            assert "from 1 to 64" in screen_text(app)
            await pilot.press("enter")
            await pilot.pause()
            app.screen.query_one(Input).value = "7"
            await pilot.press("enter")
            await pilot.pause()
            assert app.meters.config.stream.io_threads == 7
            await pilot.press("escape")
            assert app.focused and app.focused.id == "composer"

    async def test_a_change_is_compared_once_there_are_tokens(self) -> None:
        async with workbench() as (app, engine, pilot):
            engine.tokens(40)
            await pilot.press("f3", "f6")
            engine.tokens(7, drop=0.75)
            await pilot.pause(0.6)
            assert "7 of 16 tokens" in screen_text(app)
            engine.tokens(30, drop=0.75)
            await pilot.pause(0.6)
            text = screen_text(app)
            assert "drop 0.00 → 0.05" in text
            assert "separated" in text
            assert "▼" in text

    async def test_what_cannot_change_live_waits_and_reopens(self) -> None:
        async with workbench() as (app, engine, pilot):
            await pilot.press("f3")
            await pilot.press(*["down"] * 14, "right")
            await pilot.pause(0.6)
            assert app.tuner.waiting == {"model.ctx": 8192}
            assert "waits" in screen_text(app)
            await pilot.press("f6", "f4")
            await pilot.pause()
            config = engine.calls[-1][1]
            assert engine.calls[-1][0] == "open"
            assert (config.model.ctx, config.routing.drop_cold_experts) == (8192, 0.05)
            assert config.stream.cache_mb == "auto"
            assert app.tuner.waiting == {}

    async def test_a_refusal_appears(self) -> None:
        async with workbench() as (app, engine, pilot):
            engine.refuse = "dropping cold experts needs the cache"
            await pilot.press("f6")
            await pilot.pause(0.7)
            assert "needs the cache" in screen_text(app)


class TestPanels:
    async def test_digits_go_to_panels_and_fill_the_screen(self) -> None:
        async with workbench() as (app, _engine, pilot):
            await pilot.press("alt+3")
            assert app.focused is not None and app.focused.id == "lanes"
            await pilot.press("3")
            assert app.workbench.has_class("-zoom")
            await pilot.pause()
            assert not app.workbench.chat.is_on_screen
            await pilot.press("4")
            await pilot.pause()
            assert "Dropped routings" in screen_text(app)
            await pilot.press("escape")
            assert not app.workbench.has_class("-zoom")
            await pilot.press("escape")
            assert app.focused is app.workbench.chat.composer

    async def test_one_panel_at_a_time_on_a_small_screen(self) -> None:
        async with workbench((80, 24)) as (app, _engine, pilot):
            shown = [panel.id for panel in app.workbench.board.panels if panel.display]
            assert shown == ["heatmap"]
            await pilot.press("alt+5")
            await pilot.pause()
            shown = [panel.id for panel in app.workbench.board.panels if panel.display]
            assert shown == ["memory"]
            assert app.workbench.chat.is_on_screen
            await pilot.click("#panel-tabs", offset=(3, 0))
            await pilot.pause()
            assert app.workbench.board.current.id == "heatmap"

    async def test_survives_being_resized(self) -> None:
        async with workbench() as (app, engine, pilot):
            for size in ((80, 24), (200, 60), (40, 10), (20, 5), (120, 40)):
                await pilot.resize_terminal(*size)
                engine.step(drop=0.5)
                await pilot.pause(0.7)
            assert "Experts in memory" in screen_text(app)

    async def test_the_cursor_tells_about_an_expert(self) -> None:
        async with workbench((200, 60)) as (app, engine, pilot):
            for _ in range(9):
                engine.step(drop=0.5)
            await pilot.press("alt+1", "right", "shift+right", "down", "down")
            await pilot.pause(0.7)
            panel = app.workbench.board.current
            assert isinstance(panel, HeatmapPanel)
            assert panel.cursor == (2, 16)
            assert "layer 2 expert 16" in screen_text(app)
            assert engine.live is not None
            hits = int(engine.live["hits"][2, 16])
            assert f"{hits} hits" in screen_text(app)
            await pilot.press("m")
            assert panel.mode is Mode.FREQUENCY
            await pilot.click(HeatmapPanel, offset=(5 + 20, 1))
            await pilot.pause()
            assert panel.cursor == (0, 20)

    async def test_unmeasured_is_a_dash(self) -> None:
        async with workbench() as (app, _engine, _pilot):
            text = screen_text(app)
            assert "– tok/s" in text
            assert "hits – %" in text

    async def test_nothing_from_a_file_is_markup(self) -> None:
        from dataclasses import replace

        async with workbench((120, 40)) as (app, engine, pilot):
            assert engine.opened is not None
            info = replace(engine.opened.info, name="[bold red]x[/] \x1b[31mred", arch="[/]")
            app.post_message(app.FromEngine(replace(engine.opened, info=info)))
            await pilot.pause(0.6)
            assert "[bold red]x[/] ␛[31mred" in screen_text(app)


class TestEngine:
    async def test_opening_shows_its_progress_and_its_failure(self) -> None:
        async with workbench() as (app, engine, pilot):
            app.meters.opened = None
            engine.say(OpenProgress("reading dense weights", 0.42))
            await pilot.pause(0.6)
            assert "reading dense weights 42 %" in screen_text(app)
            engine.say(OpenFailed("x.gguf: is no GGUF file", "ModelError"))
            await pilot.pause(0.6)
            text = screen_text(app)
            assert "x.gguf: is no GGUF file" in text
            assert "Ctrl+O opens another" in text

    async def test_a_death_is_told_and_a_key_brings_it_back(self) -> None:
        async with workbench() as (app, engine, pilot):
            engine.say(EngineDied(None, "SIGSEGV", ("ggml: assertion failed",), "answering"))
            await pilot.pause(0.6)
            text = screen_text(app)
            assert "crashed (SIGSEGV)" in text
            assert "ggml: assertion failed" in text
            assert "F4" in text
            await pilot.press("f4")
            await pilot.pause(0.6)
            assert app.meters.doing is Doing.READY
            assert "crashed" not in app.workbench.notice.render_line(0).text
            assert not app.workbench.notice.display

    async def test_without_a_model_it_says_so(self) -> None:
        app = make_app(None, client=FrozenEngine, keep_history=False)
        async with app.run_test(notifications=True, size=(120, 40)) as pilot:
            await pilot.press("f6", "f4")
            await pilot.pause(0.7)
            text = screen_text(app)
            assert "no model" in text
            assert "Open a model first" in text
            assert "Ctrl+O opens one" in text

    async def test_opening_can_be_stopped(self) -> None:
        async with workbench() as (_app, engine, pilot):
            engine.say(OpenProgress("reading dense weights", 0.1))
            await pilot.pause()
            await pilot.press("escape")
            assert engine.calls[-1] == ("cancel", None)


def arrives(key: str) -> bool:
    """Whether a terminal without a keyboard protocol can send Alt with this letter or digit."""
    parser = XTermParser()
    sent = [*parser.feed("\x1b" + key[-1]), *parser.feed("")]
    return [event.key for event in sent if isinstance(event, events.Key)] == [key]


class TestKeys:
    async def test_every_alt_key_can_be_sent(self) -> None:
        """Escape and b is a word to the left, and Escape and 3 a pound sign."""
        assert arrives("alt+p") and not arrives("alt+b") and not arrives("alt+3")
        n_alt = 0
        for binding in [*BINDINGS, *ChatPane.BINDINGS]:
            keys = binding.key.split(",") if isinstance(binding, Binding) else [binding[0]]
            alt = [key for key in keys if key.startswith("alt+") and len(key) == len("alt+x")]
            n_alt += len(alt)
            assert not alt or any(map(arrives, alt)), keys
        assert n_alt > 8

    async def test_a_key_moves_by_its_id(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "keys.toml"
        path.write_text('"tune.drop-more" = "f12"\n')
        monkeypatch.setattr("tuiwork.app.keys_file", lambda: path)
        async with workbench() as (app, _engine, pilot):
            await pilot.press("f12", "f6")
            assert app.meters.config is not None
            assert get(app.meters.config, DROP) == 0.05

    async def test_a_file_that_is_none_is_told_and_harms_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "keys.toml"
        path.write_text('tune.drop-more = "f12"\n')
        monkeypatch.setattr("tuiwork.app.keys_file", lambda: path)
        async with workbench() as (app, _engine, pilot):
            await pilot.pause(0.7)
            assert "an id with a dot" in screen_text(app)
            await pilot.press("f6")
            assert app.meters.config is not None
            assert get(app.meters.config, DROP) == 0.05

    async def test_no_two_actions_share_an_id_or_a_key(self) -> None:
        from tuiwork.keys import BINDINGS

        ids = [binding.id for binding in BINDINGS]
        keys = [key for binding in BINDINGS for key in binding.key.split(",")]
        assert None not in ids
        assert len(set(ids)) == len(ids)
        assert len(set(keys)) == len(keys)


class TestScreens:
    async def test_help_lists_every_key_and_panel(self) -> None:
        async with workbench((120, 60)) as (app, _engine, pilot):
            await pilot.press("f1")
            await pilot.pause()
            assert isinstance(app.screen, HelpScreen)
            text = screen_text(app)
            for words in ("F6, ]", "F2, z", "Alt+E, 1", "LOSSY", "Tab, Shift+Tab"):
                assert words in text, words
            assert "Alt+1" not in text
            await pilot.press("f6", "f2")
            assert app.meters.config is not None
            assert get(app.meters.config, DROP) == 0.0
            await pilot.press("escape")
            assert app.screen.id == "workbench"

    @pytest.mark.usefixtures("nobody_welcomed")
    async def test_the_first_run_explains_itself_once(self) -> None:
        from tuiwork.screens import flows

        assert flows.is_first_run()
        async with workbench((80, 24), first_run=True) as (app, _engine, pilot):
            await pilot.pause()
            text = screen_text(app)
            assert "Welcome" in text
            assert "LOSSY" in text
            assert "Enter starts" in text
            await pilot.press("enter")
            await pilot.pause()
            assert app.screen.id == "workbench"
        assert not flows.is_first_run()

    @pytest.mark.usefixtures("nobody_welcomed")
    @pytest.mark.parametrize("pasted", [False, True])
    async def test_what_is_written_over_the_welcome_is_a_message(self, pasted: bool) -> None:
        async with workbench((80, 24), first_run=True) as (app, _engine, pilot):
            await pilot.pause()
            assert isinstance(app.screen, WelcomeScreen)
            if pasted:
                app.post_message(events.Paste("3 [b]words[/b] here"))
            else:
                burst(app, *"3 [b]words[/b] here")
            await pilot.pause()
            assert app.screen.id == "workbench"
            assert app.workbench.chat.composer.text == "3 [b]words[/b] here"

    @pytest.mark.usefixtures("nobody_welcomed")
    async def test_a_message_sent_over_the_welcome_in_one_burst_is_sent(self) -> None:
        async with workbench((80, 24), first_run=True) as (app, _engine, pilot):
            await pilot.pause()
            burst(app, *"hello", "enter", *"next")
            await pilot.pause(0.5)
            assert app.workbench.chat.composer.text == "next"
            assert [turn.text for turn in app.workbench.chat.library.current.turns][:1] == ["hello"]

    async def test_profiles_are_compared_saved_and_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(profiles, "user_profiles_dir", lambda: tmp_path)
        monkeypatch.setattr("engine.profile_paths.user_profiles_dir", lambda: tmp_path)
        async with workbench() as (app, _engine, pilot):
            await pilot.press("f6", "f6", "f6", "alt+p")
            await pilot.pause()
            assert isinstance(app.screen, ProfilesScreen)
            await pilot.press("s")
            await pilot.pause()
            app.screen.query_one(Input).value = "evening"
            await pilot.press("enter")
            await pilot.pause(0.7)
            assert "drop-cold-experts = 0.15" in (tmp_path / "evening.toml").read_text()
            assert "No difference" in screen_text(app)
            names = app.screen.query_one(OptionList)
            names.highlighted = names.get_option_index("fast-lossy")
            await pilot.pause(0.7)
            assert "drop-cold-experts" in screen_text(app)
            await pilot.press("space")
            names.highlighted = names.get_option_index("evening")
            await pilot.pause(0.7)
            assert "fast-lossy" in screen_text(app)
            names.highlighted = names.get_option_index("app")
            await pilot.press("enter")
            await pilot.pause(0.7)
            assert app.screen.id == "workbench"
            assert app.meters.config is not None
            assert get(app.meters.config, DROP) == 0.75
            assert app.meters.profile == "app"
            await pilot.press("f9")
            assert get(app.meters.config, DROP) == 0.15

    async def test_every_action_is_in_the_palette(self) -> None:
        async with workbench() as (app, _engine, _pilot):
            titles = {command.title for command in app.get_system_commands(app.screen)}
            assert {
                "Tune",
                "Zoom",
                "Profiles",
                "Open",
                "Undo",
                "Measure the disk",
                "Theme",
            } <= titles
            assert any(title.startswith("Chat:") for title in titles)


class TestKeptLines:
    async def test_what_is_kept_is_what_would_be_drawn(self) -> None:
        async with workbench((120, 40)) as (app, engine, pilot):

            async def same(after: str) -> None:
                await pilot.pause(0.6)
                for widget in app.screen.query("*").results():
                    if not isinstance(widget, KeptLines) or not widget.display:
                        continue
                    crop = Region(0, 0, *widget.outer_size)
                    kept, widget._kept = widget.render_lines(crop), None
                    assert list(map(list, kept)) == list(map(list, widget.render_lines(crop))), (
                        after, widget,
                    )  # fmt: skip

            for _ in range(20):
                engine.step(drop=0.5)
            engine.tokens(9)
            await same("tokens")
            await pilot.press("h", "i", "enter")
            engine.answer()
            await same("an answer")
            app.workbench.show_panel(0)
            await pilot.press("right", "down")
            await same("a cursor in the map")
            await pilot.press("z")
            await same("a zoomed panel")
            await pilot.press("escape", "f3")
            await same("the tuning form")
            app.theme = "textual-light"
            await same("another theme")
            await pilot.resize_terminal(200, 60)
            await same("another size")


class TestTerminals:
    async def test_without_utf8_everything_is_ascii(self, tmp_path: Path) -> None:
        """Panels, chat, dialogs, toasts, Textual's own parts, and what a model may say."""
        history = History(tmp_path)
        options: dict[str, Any] = {"glyphs": ASCII, "keep_history": True, "history": history}
        async with workbench((120, 40), **options) as (app, engine, pilot):

            async def looks(where: str) -> None:
                await pilot.pause(0.5)
                assert screen_text(app).isascii(), (where, screen_text(app))

            engine.tokens(30)
            for _ in range(20):
                engine.step(drop=0.5)
            await pilot.press("f6", "h", "i", "enter")
            text = "<think>x</think># A\n- b\n  - c\n\n> d — “e”\n\n|a|b|\n|--|--|\n|1|2|\n"
            engine.answer(text + "```python\nx = 1\n```\nÜber \u4e16\u754c \x1b[31m")
            await looks("the chat and the panels")
            assert "?ber ????" in screen_text(app)
            app.say("from 1 → 2 … “done”", is_refusal=True)
            await looks("a toast")
            for action in (
                "tuning", "help", "profiles", "trial", "open_model", "command_palette",
                "chat.history", "chat.system", "chat.rename",
            ):  # fmt: skip
                if action.startswith("chat."):
                    getattr(app.workbench.chat, f"action_{action.removeprefix('chat.')}")()
                else:
                    await app.run_action(action)
                await looks(action)
                await pilot.press("escape")
                await pilot.pause(0.2)
            app.workbench.chat.context_full("the prompt has 5 000 tokens")
            await looks("a full context")
            await pilot.press("escape")
            app.push_screen(WelcomeScreen("a model…", app.workbench.chat))
            await looks("the welcome")

    async def test_without_colour_glyphs_tell_the_states_apart(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        async with workbench((120, 40), depth=None) as (app, engine, pilot):
            for _ in range(30):
                engine.step(drop=1.0)
            await pilot.pause(0.6)
            panel = app.workbench.board.panels[0]
            strips = panel.render_lines(Region(0, 0, *panel.outer_size))
            text = "".join(strip.text for strip in strips[1:13])
            assert {"◆", "×", "·"} <= set(text)
            assert set("░▒▓█") & set(text)
            assert app.native_ansi_color

    async def test_sixteen_colours_and_light_themes_draw(self) -> None:
        async with workbench((120, 40), depth=Depth.SIXTEEN) as (app, engine, pilot):
            engine.step(drop=0.5)
            await pilot.pause(0.7)
            app.theme = "textual-light"
            await pilot.pause(0.7)
            assert not app.workbench.status.palette.dark


class TestRealEngine:
    @pytest.fixture
    def model(self, tiny_model: TinyModel) -> Path:
        return tiny_model("tiny")

    async def test_chat_tune_and_quit(self, model: Path) -> None:
        config = tiny_config(model, run__n_predict=240)
        app = make_app(config, profile="test", keep_history=False, depth=Depth.FULL)
        async with app.run_test(notifications=True, size=(120, 40)) as pilot:
            await until(pilot, lambda: app.meters.opened is not None)
            app.workbench.chat.composer.put("hello there")
            await pilot.press("enter")
            await until(pilot, lambda: app.meters.tokens.n_rows > 60)
            await pilot.press("f6")
            await until(pilot, lambda: bool(app.meters.changes.changes))
            await until(pilot, lambda: not app.busy)
            change = app.meters.changes.changes[0]
            assert 0 < change.at_row < app.meters.tokens.n_rows
            await pilot.pause(0.6)
            text = screen_text(app)
            assert "synthetic" in text
            assert "LOSSY drop 0.05" in text
            assert "– tok/s" not in text
            assert app.meters.totals is not None and app.meters.totals.misses > 0
            assert "tok/s, " in text
            pid = app.engine.pid
        assert pid is not None and not Path(f"/proc/{pid}/status").exists()

    async def test_a_killed_engine_comes_back(self, model: Path) -> None:
        import os
        import signal

        app = make_app(tiny_config(model), keep_history=False, depth=Depth.FULL)
        async with app.run_test(notifications=True, size=(120, 40)) as pilot:
            await until(pilot, lambda: app.meters.opened is not None)
            assert app.engine.pid is not None
            os.kill(app.engine.pid, signal.SIGKILL)
            await until(pilot, lambda: app.meters.doing is Doing.DEAD)
            await pilot.pause(0.6)
            assert "SIGKILL" in screen_text(app)
            await pilot.press("f4")
            await until(pilot, lambda: app.meters.doing is Doing.READY)
            app.workbench.chat.composer.put("hello again")
            await pilot.press("enter")
            await until(pilot, lambda: app.meters.tokens.n_rows > 5)
            await asyncio.sleep(0)

    async def test_one_prompt_under_two_profiles(self, model: Path) -> None:
        from textual.widgets import Select

        app = make_app(tiny_config(model, run__n_predict=60), keep_history=False, depth=Depth.FULL)
        async with app.run_test(notifications=True, size=(120, 40)) as pilot:
            await until(pilot, lambda: app.meters.opened is not None)
            await pilot.press("alt+a")
            await pilot.pause()
            # These settings are lossless, so the lossy profile is the one to compare with.
            assert app.screen.query_one("#choice-B", Select).value == "app"
            await pilot.press(*"hello", "enter")
            trial = app.screen.trial  # type: ignore[attr-defined]
            await until(pilot, lambda: not trial.running)
            await until(pilot, lambda: app.asked() is not None and not app.busy)
            await pilot.pause(0.7)
            text = screen_text(app)
            assert all(16 <= len(side.rows) <= 60 for side in trial.sides), text
            assert "separated" in text
            assert "the other order" in text
            assert app.meters.config is not None
            assert get(app.meters.config, DROP) == 0.0
            await pilot.press("escape")
            assert app.screen.id == "workbench"
            assert app.workbench.chat.conversation.turns == []

    async def test_a_file_that_is_no_model_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "no.gguf"
        path.write_bytes(b"not a model")
        app = make_app(tiny_config(path), keep_history=False, depth=Depth.FULL)
        async with app.run_test(notifications=True, size=(80, 24)) as pilot:
            await until(pilot, lambda: bool(app.meters.trouble))
            await pilot.pause(0.6)
            assert "no.gguf" in screen_text(app)


async def test_routings_are_traced_from_the_palette_and_again_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with workbench() as (app, _, pilot):
        await app.run_action("trace_routes")
        await pilot.pause()
        traced = app._traced_to
        assert traced is not None and Path(traced).parent == tmp_path / "tuiwork" / "traces"
        await app.run_action("trace_routes")
        await pilot.pause()
        assert app._traced_to is None
        assert any(f"tuiwork replay {traced}" in note.message for note in app._notifications)
