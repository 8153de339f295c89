"""The chat pane with the real engine, in its own process, on a tiny model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.app import App, ComposeResult
from textual.message import Message
from textual.pilot import Pilot

from engine.messages import Event
from tests.conftest import TinyModel
from tests.engine_app import config
from tuiwork.chat.dialogs import ContextFullDialog
from tuiwork.chat.history import History, load
from tuiwork.chat.pane import ChatPane
from tuiwork.client import EngineClient

pytestmark = pytest.mark.asyncio
PATIENCE_S = 20.0


class EngineChat(App[None]):
    """The pane and an engine, connected as the workbench connects them."""

    class FromEngine(Message):
        """The engine said something."""

        def __init__(self, event: Event) -> None:
            super().__init__()
            self.event = event

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.chat = ChatPane(history=History(folder))
        self.client = EngineClient(self._heard)

    def compose(self) -> ComposeResult:
        """The pane."""
        yield self.chat

    def on_unmount(self) -> None:
        """Leave no process behind."""
        self.client.close()

    def _heard(self, event: Event) -> None:
        self.post_message(self.FromEngine(event))

    def on_engine_chat_from_engine(self, message: FromEngine) -> None:
        """Pass it on."""
        self.chat.on_engine_event(message.event)

    def on_chat_pane_ask(self, message: ChatPane.Ask) -> None:
        """Ask it."""
        self.client.generate(message.messages)

    def on_chat_pane_stop(self) -> None:
        """Stop it."""
        self.client.cancel()

    def on_chat_pane_clear_context(self) -> None:
        """Clear it."""
        self.client.clear()

    def on_chat_pane_count_tokens(self, message: ChatPane.CountTokens) -> None:
        """Count them."""
        self.client.count_tokens(message.messages)


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        await pilot.pause(0.7)


async def test_talk_stop_drop_and_die(tiny_model: TinyModel, tmp_path: Path) -> None:
    app = EngineChat(tmp_path)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = app.chat
        app.client.open(config(tiny_model("tiny"), model__ctx=256, run__n_predict=24))
        await until(pilot, lambda: chat.ready)
        chat.composer.focus()

        await pilot.press(*"hello", "enter")
        await until(pilot, lambda: len(chat.conversation.turns) == 2)
        turn = chat.conversation.turns[1]
        assert (turn.stop_reason, turn.figures["n_generated"]) == ("length", 24)
        assert "of 256 tokens" in str(chat.composer.border_subtitle)

        await pilot.press(*"again")
        await until(pilot, lambda: "→" in str(chat.composer.border_subtitle))

        app.client.set_live({"run.n-predict": 100_000})
        chat.action_new()
        await pilot.press("enter", "escape")
        await until(pilot, lambda: not chat.exchange.busy)
        assert chat.conversation.turns[0].text == "again"

        chat.action_new()
        app.client.set_live({"run.n-predict": 8})
        while not isinstance(app.screen, ContextFullDialog):
            assert len(chat.conversation.turns) < 20
            chat.composer.put("one two three four five six seven eight nine ten " * 3)
            await pilot.press("enter")
            await until(pilot, lambda: not chat.exchange.busy)
            await pilot.pause()
        asked = len(chat.conversation.turns)
        await pilot.press("d")
        await until(pilot, lambda: len(chat.conversation.turns) == asked + 1)
        assert chat.conversation.first_sent > 0
        assert chat.conversation.turns[-1].role == "assistant"

    kept = [load(path).conversation for path in History(tmp_path).paths()]
    assert len(kept) == 3
    assert app.client.running is False
