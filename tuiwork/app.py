"""The workbench app: it passes what the engine says to the panels and the chat, and keys back.

`make_app` is how it is made, by the command line and by tests alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from platformdirs import user_state_path
from textual import on
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen

from engine.config import RunConfig
from engine.errors import TuiworkError
from engine.messages import (
    EngineDied,
    Event,
    Opened,
    OpenFailed,
    TraceRefused,
    Tracing,
)
from tuiwork.ascii_filter import AsciiFilter
from tuiwork.chat.history import History
from tuiwork.chat.pane import ChatPane
from tuiwork.client import EngineClient
from tuiwork.keys import BINDINGS, OWN_ACTIONS, commands_of, keys_file, read_keymap
from tuiwork.meters.glyphs import Glyphs
from tuiwork.meters.meters import Doing, Meters
from tuiwork.panels.palette import Depth
from tuiwork.panels.terminal import is_ascii, palette_of
from tuiwork.screens import flows
from tuiwork.screens.trial import TrialScreen
from tuiwork.screens.workbench import Workbench
from tuiwork.tuning.control import Tuner
from tuiwork.tuning.knobs import BY_KEY
from tuiwork.tuning.panel import TuningPanel

UPDATES_PER_S = 10
_FRAME_GAP_S = 1 / UPDATES_PER_S
_MACHINE_GAP_S = 1.0
"""Memory does not move faster than a person reads it, and asking costs a millisecond."""


class TuiworkApp(App[None]):
    """Chat with a model, watch it stream, turn its knobs."""

    CSS_PATH = Path(__file__).with_name("app.tcss")
    TITLE = "tuiwork"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [*BINDINGS]

    class FromEngine(Message):
        """The engine said something."""

        def __init__(self, event: Event) -> None:
            super().__init__()
            self.event = event

    def __init__(
        self,
        config: RunConfig | None,
        *,
        profile: str = "",
        client: Callable[[Callable[[Event], None]], Any] = EngineClient,
        glyphs: Glyphs | None = None,
        depth: Depth | None = None,
        keep_history: bool = True,
        history: History | None = None,
        first_run: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ansi_color=True if _no_colour() else None)
        self._config = config
        self._glyphs, self._depth = glyphs, depth
        self._clock = clock
        self._keep_history = keep_history
        self._traced_to: str | None = None
        self._history = history
        self._first_run = first_run
        self._tick = 0
        self._ascii = AsciiFilter(enabled=False)
        self.meters = Meters()
        self.meters.profile = profile
        self.engine: EngineClient = client(self._heard)
        self.tuner = Tuner(self.engine, self.meters, self.say)
        self.workbench: Workbench

    def get_default_screen(self) -> Screen[None]:
        """The workbench, with the chat in it."""
        palette = palette_of(self, self._glyphs, self._depth)
        system = self._config.run.system if self._config is not None else ""
        chat = ChatPane(
            system=system, history=self._history, keep_history=self._keep_history, id="chat"
        )
        chat.opening = self._config is not None
        chat.paced = True
        self.workbench = Workbench(self.meters, palette, chat, id="workbench")
        self.set_class(is_ascii(palette), "-ascii")
        self._ascii.enabled = is_ascii(palette)
        return self.workbench

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's, and what this terminal needs."""
        filters = super().get_line_filters()
        return [*filters, self._ascii] if self._ascii.enabled else filters

    def get_key_display(self, binding: Binding) -> str:
        """A key's name, in words where its sign cannot be shown."""
        name = super().get_key_display(binding)
        return name.replace("⏎", "enter") if self._ascii.enabled else name

    def on_mount(self) -> None:
        """Start the clocks, and the engine if there is a model to open."""
        if _no_colour():
            self.theme = "ansi-dark"
        try:
            self.set_keymap(read_keymap(keys_file()))
        except TuiworkError as error:
            self.say(str(error), is_refusal=True)
        self.theme_changed_signal.subscribe(self, lambda _theme: self._use_palette())
        self.set_interval(_FRAME_GAP_S, self._frame)
        self.set_interval(_MACHINE_GAP_S, self._ask_machine)
        self.call_after_refresh(self.workbench.focus_chat)
        if self._config is not None:
            self.call_after_refresh(self.open_model, self._config)
        if self._first_run:
            self.run_worker(flows.welcome(self))

    def on_unmount(self) -> None:
        """Leave nothing behind."""
        self.engine.close()

    def open_model(self, config: RunConfig) -> None:
        """Open a model in place of the one that is open."""
        self._config = config
        self.meters.attach(None)
        self.meters.opened = None
        self.meters.trouble = ""
        self.meters.doing = Doing.OPENING
        self.meters.stage, self.meters.fraction = "starting the engine", 0.0
        self.workbench.notice.on_tick(0)
        self.workbench.chat.model_is_coming()
        self.engine.open(config)

    @property
    def _at_workbench(self) -> bool:
        """Whether nothing lies over the workbench; while the app ends there is no screen."""
        return bool(self.screen_stack) and self.screen is self.workbench

    @property
    def busy(self) -> bool:
        """Whether the engine works on an answer or opens a model."""
        return self.meters.doing in (Doing.PROMPT, Doing.ANSWERING, Doing.OPENING)

    def asked(self) -> RunConfig | None:
        """What was asked for: settings as opened, with every change since; None: no model."""
        return None if self._config is None else self.tuner.config_to_reopen(self._config)

    # What the engine says. `_heard` runs in a thread of the client's.

    def _heard(self, event: Event) -> None:
        self.post_message(self.FromEngine(event))

    def on_tuiwork_app_from_engine(self, message: FromEngine) -> None:
        """Pass an event on to all that it concerns."""
        event = message.event
        if not self.screen_stack:
            return  # the last words of an engine while the app ends
        self.meters.take(event)
        self.tuner.take(event)
        if isinstance(event, Opened):
            self.meters.attach(self.engine.live)
        if isinstance(self.screen, TrialScreen) and self.screen.take(event):
            return
        self.workbench.notice.take(event)
        self.workbench.tuning.waiting = self.tuner.waiting
        self.workbench.chat.on_engine_event(event)
        if isinstance(event, (Tracing, TraceRefused)):
            self._on_trace(event)
        if isinstance(event, (Opened, OpenFailed, EngineDied)):
            self._traced_to = None
            self.workbench.update_panels()

    def _on_trace(self, event: Tracing | TraceRefused) -> None:
        if isinstance(event, TraceRefused):
            self.say(event.message, is_refusal=True)
            return
        before, self._traced_to = self._traced_to, event.path
        if event.path is not None:
            self.say(f"Every routing is written to {event.path}", is_refusal=False)
        elif before is not None:
            self.say(f"The route trace is complete: tuiwork replay {before}", is_refusal=False)

    # What the chat asks for.

    @on(ChatPane.Ask)
    def _ask(self, message: ChatPane.Ask) -> None:
        opened = self.meters.opened
        raw = opened is not None and not opened.info.has_chat_template
        self._command(lambda: self.engine.generate(message.raw if raw else message.messages))

    @on(ChatPane.Stop)
    def _stop(self) -> None:
        self.engine.cancel()

    @on(ChatPane.ClearContext)
    def _clear_context(self) -> None:
        if self.engine.running:
            self._command(self.engine.clear)

    @on(ChatPane.CountTokens)
    def _count_tokens(self, message: ChatPane.CountTokens) -> None:
        if self.meters.opened is not None and self.meters.opened.info.has_chat_template:
            self._command(lambda: self.engine.count_tokens(message.messages))

    def _command(self, send: Callable[[], object]) -> None:
        try:
            send()
        except TuiworkError as error:
            self.say(str(error), is_refusal=True)

    # What the tuning form asks for.

    def on_tuning_panel_turned(self, message: TuningPanel.Turned) -> None:
        """Turn a knob."""
        self.action_turn(message.knob.key, message.direction)

    def on_tuning_panel_typing(self, message: TuningPanel.Typing) -> None:
        """Ask for a knob's value."""
        self.run_worker(flows.type_value(self, message.knob.key))

    # Keys and the command palette.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dialogs have their own keys: the workbench's do nothing there."""
        if action == "stop_opening" and self.meters.doing is not Doing.OPENING:
            return False
        return self._at_workbench or action not in OWN_ACTIONS

    def action_turn(self, key: str, direction: int) -> None:
        """Turn a knob by a step."""
        self.tuner.turn(BY_KEY[key], direction)
        self.workbench.tuning.waiting = self.tuner.waiting
        self.workbench.tuning.update_lines()

    def action_undo(self) -> None:
        """Take the latest change back."""
        self.tuner.undo()

    def action_redo(self) -> None:
        """Repeat what was taken back."""
        self.tuner.redo()

    def action_zoom(self) -> None:
        """Let the current panel fill the screen."""
        self.workbench.zoom()

    def action_tuning(self) -> None:
        """Open or close the tuning form."""
        self.workbench.toggle_tuning()

    def action_panel(self, number: int) -> None:
        """Go to a panel."""
        self.workbench.show_panel(number)

    def action_board(self) -> None:
        """Give the chat the whole screen, or share it."""
        self.workbench.toggle_board()

    def action_stop_opening(self) -> None:
        """Give up on the model that is being opened."""
        self.engine.cancel()

    def action_write(self) -> None:
        """Go to the composer."""
        self.workbench.focus_chat()

    def action_leave_panel(self) -> None:
        """One step back towards the chat."""
        self.workbench.back()

    def action_reopen(self) -> None:
        """Open the model again, in a new process if the old one died."""
        if self._config is None:
            self.say("No model to open again; Ctrl+O opens one.", is_refusal=True)
            return
        config = self.asked()
        assert config is not None
        self.open_model(config)

    def action_open_model(self) -> None:
        """Choose a model and open it."""
        self.run_worker(flows.choose_model(self))

    def action_profiles(self) -> None:
        """Save, load and compare settings."""
        self.run_worker(flows.choose_profile(self))

    def action_trial(self) -> None:
        """One prompt under two profiles, side by side."""
        config = self.asked()
        if config is None or self.meters.opened is None or self.busy:
            self.say("Open a model and let it finish first.", is_refusal=True)
            return
        said = [turn.text for turn in self.workbench.chat.conversation.turns if turn.role == "user"]
        self.push_screen(TrialScreen(self, config, said[-1] if said else ""))

    def action_measure_disk(self) -> None:
        """Find what the disk gives at most."""
        self.run_worker(flows.measure_disk(self), group="disk", exclusive=True)

    def action_trace_routes(self) -> None:
        """Write routings to a new file from the next token on, or stop writing."""
        path = None if self._traced_to is not None else str(new_trace_file())
        self._command(lambda: self.engine.trace_routes(path))

    def action_help(self) -> None:
        """Keys and panels."""
        from tuiwork.screens.help import HelpScreen

        self.push_screen(HelpScreen())

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Everything that can be done, by name."""
        yield from super().get_system_commands(screen)
        if screen is self.workbench:
            yield from self.workbench.chat.palette_commands()
            yield from commands_of(self)

    def _use_palette(self) -> None:
        self.workbench.use_palette(palette_of(self, self._glyphs, self._depth))

    def _frame(self) -> None:
        """One tenth of a second has passed."""
        self.meters.tick(self._clock())
        self.workbench.chat.flush()
        if self._at_workbench:
            self._tick += 1
            self.workbench.on_tick(self._tick)

    def _ask_machine(self) -> None:
        self.meters.take_machine(self.engine.machine_sample(), self._clock())

    def say(self, text: str, is_refusal: bool) -> None:
        """Tell the person something, above whatever they look at."""
        self.notify(text, severity="warning" if is_refusal else "information", markup=False)


def _no_colour() -> bool:
    import os

    return os.environ.get("NO_COLOR") is not None


def make_app(config: RunConfig | None, **options: Any) -> TuiworkApp:
    """The app, ready to run; `config` None opens no model."""
    return TuiworkApp(config, **options)


def new_trace_file() -> Path:
    """A file for a route trace that is not there yet, under the user's state directory."""
    folder = user_state_path("tuiwork") / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.now():%Y-%m-%d-%H%M%S}.route.csv"
