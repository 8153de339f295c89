"""A/B on the screen: a prompt, two profiles, the two answers side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Input, Select, Static

from engine.config import RunConfig
from engine.errors import TuiworkError
from engine.messages import Event
from engine.profile import list_profiles
from tuiwork.screens.profiles import IN_FORCE
from tuiwork.text import one_line, sanitize
from tuiwork.tuning.profiles import settings_of
from tuiwork.tuning.trial import Side, Trial

if TYPE_CHECKING:
    from tuiwork.app import TuiworkApp

_REDRAW_S = 0.2


class TrialScreen(Screen[None]):
    """Enter in the prompt runs both sides; Escape stops, then closes."""

    DEFAULT_CSS = """
    TrialScreen {
        #prompt { border: round $foreground 25%; }
        #prompt:focus { border: round $accent; }
        .side {
            width: 1fr; border: round $foreground 25%; border-title-color: $accent; padding: 0 1;
        }
        Select { width: 1fr; }
        #verdict { height: auto; padding: 0 2; text-style: bold; }
        .figures { height: auto; color: $foreground 70%; }
        #sides { height: 1fr; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Stop, close", id="trial.close"),
        Binding("f5", "swap", "Run in the other order", id="trial.swap"),
    ]

    def __init__(self, app: TuiworkApp, in_force: RunConfig, prompt: str) -> None:
        super().__init__()
        self._workbench_app = app
        self._in_force = in_force
        self._prompt = prompt
        self._shown: tuple[str, str] = ("", "")
        self.trial: Trial | None = None

    def compose(self) -> ComposeResult:
        """The prompt, the profiles, the answers, the verdict."""
        names = [IN_FORCE, *(entry.name for entry in list_profiles() if not entry.error)]
        options = [(Text(one_line(name)), name) for name in names]
        prompt = Input(self._prompt, placeholder="The prompt for both", id="prompt")
        prompt.border_title = Content("prompt: Enter runs A, then B")
        yield prompt
        with Horizontal(id="sides"):
            for place, letter in enumerate("AB"):
                with Vertical(classes="side") as side:
                    side.border_title = Content(letter)
                    default = self._opponent(names) if place else IN_FORCE
                    yield Select(options, value=default, allow_blank=False, id=f"choice-{letter}")
                    yield Static(classes="figures", id=f"figures-{letter}")
                    with VerticalScroll():
                        yield Static(id=f"answer-{letter}")
        yield Static(id="verdict")
        yield Footer(compact=True)

    def _opponent(self, names: list[str]) -> str:
        """What a person most likely wants beside the settings in force: the other side of lossy."""
        lossy = self._in_force.routing.drop_cold_experts or self._in_force.routing.n_expert_used
        wanted = "default" if lossy else "app"
        return wanted if wanted in names else names[-1]

    def on_mount(self) -> None:
        """Write the prompt first."""
        self.query_one("#prompt").focus()
        self.set_interval(_REDRAW_S, self._redraw)

    @on(Input.Submitted, "#prompt")
    def _run(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self._start(event.value, [str(self._choice(letter)) for letter in "AB"])

    def action_swap(self) -> None:
        """Run again with A and B changed over, so that each is second once."""
        if self.trial is not None and self.trial.running:
            return
        first, second = (self.query_one(f"#choice-{letter}", Select) for letter in "AB")
        first.value, second.value = second.value, first.value
        prompt = self.query_one("#prompt", Input).value
        if prompt.strip():
            self._start(prompt, [str(self._choice(letter)) for letter in "AB"])

    def action_leave(self) -> None:
        """Stop a trial that runs; else close."""
        if self.trial is not None and self.trial.running:
            self.trial.stop()
        else:
            self.dismiss(None)

    def take(self, event: Event) -> bool:
        """Take in an event; returns whether it was the trial's."""
        return self.trial is not None and self.trial.take(event)

    def _choice(self, letter: str) -> object:
        return self.query_one(f"#choice-{letter}", Select).value

    def _start(self, prompt: str, names: list[str]) -> None:
        app = self._workbench_app
        if app.busy:
            self.notify("Still answering: Esc stops it.")
            return
        try:
            sides = [Side(name, self._settings(name)) for name in names]
            words: str | list[dict[str, str]] = [{"role": "user", "content": prompt}]
            if app.meters.opened is not None and not app.meters.opened.info.has_chat_template:
                words = prompt
            self._shown = ("", "")
            n_predict = self._in_force.run.n_predict
            self.trial = Trial(app.engine, self._in_force, (sides[0], sides[1]), words, n_predict)
            self.trial.start()
        except TuiworkError as error:
            self.notify(str(error), severity="error", markup=False)

    def _settings(self, name: str) -> RunConfig:
        return self._in_force if name == IN_FORCE else settings_of(name)

    def _redraw(self) -> None:
        trial = self.trial
        if trial is None:
            return
        texts = (trial.sides[0].text, trial.sides[1].text)
        for letter, side, shown in zip("AB", trial.sides, self._shown, strict=True):
            if side.text != shown:
                self.query_one(f"#answer-{letter}", Static).update(Text(sanitize(side.text)))
            words = side.figures()
            if side.left_out:
                words += f"; not tried, needs reopening: {', '.join(side.left_out)}"
            self.query_one(f"#figures-{letter}", Static).update(Text(words))
        self._shown = texts
        verdict = trial.trouble or trial.verdict()
        if not trial.running and not trial.trouble:
            verdict += ". B found the cache as A left it: F5 runs them in the other order."
        self.query_one("#verdict", Static).update(Text(verdict))
