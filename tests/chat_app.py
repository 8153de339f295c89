"""A tiny app around the chat pane: engine events come from a script, wishes are kept."""

from __future__ import annotations

from pathlib import Path

from textual import events
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.strip import Strip

from engine import messages as wire
from engine.config import RunConfig
from engine.results import Answer, ModelInfo
from tuiwork.chat.composer import Composer
from tuiwork.chat.history import History
from tuiwork.chat.message_views import AnswerView, UserView
from tuiwork.chat.pane import ChatPane

MODEL = "Qwen3-30B-A3B"


def opened(ctx: int = 4096) -> wire.Opened:
    """A model is open."""
    info = ModelInfo(
        "/m.gguf", MODEL, "qwen3moe", 48, 128, 8, ctx, 151_936, 1, 1, 1, 1, has_chat_template=True
    )
    return wire.Opened(info, RunConfig(), (), (), 1.0, None, {})


def finished(stop: str = "eos", *, used: int = 1204, n: int = 412) -> wire.Finished:
    """An answer ended."""
    return wire.Finished(1, Answer("", "", [], 10, 0, n, 6.13, 30.0, stop), used)


def failed(message: str, error: str = "ReadError") -> wire.Failed:
    """A request could not be carried out."""
    return wire.Failed(1, message, error, True, 0)


class ChatApp(App[None]):
    """The pane alone on the screen."""

    def __init__(self, folder: Path | None = None, *, system: str = "") -> None:
        super().__init__()
        self.chat = ChatPane(
            system=system,
            history=History(folder) if folder else None,
            keep_history=folder is not None,
        )
        self.asked: list[ChatPane.Ask] = []
        self.counted: list[list[dict[str, str]]] = []
        self.wishes: list[str] = []

    def compose(self) -> ComposeResult:
        """The pane."""
        yield self.chat

    def on_mount(self) -> None:
        """A cursor that does not blink, so that pictures are alike."""
        self.chat.composer.cursor_blink = False
        self.chat.composer.focus()

    def on_chat_pane_ask(self, event: ChatPane.Ask) -> None:
        """Keep it."""
        self.asked.append(event)

    def on_chat_pane_stop(self) -> None:
        """Keep it."""
        self.wishes.append("stop")

    def on_chat_pane_clear_context(self) -> None:
        """Keep it."""
        self.wishes.append("clear")

    def on_chat_pane_count_tokens(self, event: ChatPane.CountTokens) -> None:
        """Keep it."""
        self.counted.append(event.messages)

    def hear(self, *events: wire.Event) -> None:
        """The engine says something."""
        for event in events:
            self.chat.on_engine_event(event)

    def ask(self, text: str) -> None:
        """Send a message without a key or a wait."""
        self.chat._send(Composer.Sent(text))

    @property
    def told(self) -> list[str]:
        """What the model was told last."""
        return [message["content"] for message in self.asked[-1].messages]

    @property
    def user_views(self) -> list[UserView]:
        """What the person said, as shown."""
        return list(self.query(UserView))

    @property
    def answer_views(self) -> list[AnswerView]:
        """What the model said, as shown."""
        return list(self.query(AnswerView))

    def strips(self) -> list[Strip]:
        """What is on the screen, as it is sent to the terminal."""
        return self.screen._compositor.render_strips()

    def screen_text(self) -> str:
        """What can be read on the screen."""
        return "\n".join(strip.text.rstrip() for strip in self.strips())


def burst(app: App[None], *keys: str) -> None:
    """Keys as a terminal gives them to the app when it had no time to look: all at once."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


async def say(pilot: Pilot[None], text: str) -> None:
    """Type a message and send it."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.chat.composer.put(text)
    app.chat.composer.focus()
    await pilot.press("enter")


async def answer(pilot: Pilot[None], text: str, stop: str = "eos") -> None:
    """Let the engine answer in pieces."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    for start in range(0, len(text), 7):
        app.hear(wire.Text(1, text[start : start + 7]))
    app.hear(finished(stop))
    await pilot.pause()
