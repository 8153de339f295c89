"""Pictures of the chat at two sizes. A changed picture is looked at, then kept with
`pytest --snapshot-update`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine import messages as wire
from tests.chat_app import ChatApp, answer, failed, opened, say
from tuiwork.chat.conversation import Conversation, Turn
from tuiwork.chat.dialogs import ContextFullDialog
from tuiwork.chat.history import History
from tuiwork.chat.history_screen import HistoryScreen
from tuiwork.chat.message_views import ReasoningView
from tuiwork.model_picker.probe import Facts
from tuiwork.model_picker.recent import Recent
from tuiwork.model_picker.screen import ModelPicker

SIZES = [(80, 24), (120, 40)]
NOW = 1_800_000_000.0
ANSWER = """\
<think>The user asks about eviction: recency and the budget, with an example.</think>

# How the cache keeps experts

The cache holds whole **experts**. One that is *not* resident is read from the file, and the one
that was used **longest ago** makes room.

1. Look the expert up: a hit costs nothing.
2. On a miss, read it:
   - up, gate and down in one go
   - past the page cache (`O_DIRECT`)

```python
def touch(expert: int, now: int) -> None:
    last_used[expert] = now  # recency, not frequency
```

| Budget | Hits | tok/s |
|:--|--:|--:|
| 2 GiB | 0.0 % | 2.37 |
| 4 GiB | 26.8 % | 3.47 |

> Below one token's demand a cache *costs* more than it saves.

See [the paper](https://example.org/moe). \x1b[31mNot red\x1b[0m, [red]not red[/red].
"""

Compare = Callable[..., bool]
Steps = Callable[[Pilot[None]], Awaitable[None]]


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a picture depends on when it was taken."""
    monkeypatch.setattr(ReasoningView, "clock", lambda _view=None: 0.0)


def picture(compare: Compare, size: tuple[int, int], steps: Steps, **options: Any) -> bool:
    async def before(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, ChatApp)
        app.hear(opened())
        await steps(pilot)
        await pilot.pause()

    return compare(ChatApp(**options), terminal_size=size, run_before=before)


def app_of(pilot: Pilot[None]) -> ChatApp:
    assert isinstance(pilot.app, ChatApp)
    return pilot.app


both_sizes = pytest.mark.parametrize("size", SIZES)
small = pytest.mark.parametrize("size", SIZES[:1])


class TestPictures:
    @both_sizes
    def test_empty(self, snap_compare: Compare, size: tuple[int, int]) -> None:
        async def steps(pilot: Pilot[None]) -> None:
            await pilot.pause()

        assert picture(snap_compare, size, steps)

    @both_sizes
    def test_answered_and_picked(self, snap_compare: Compare, size: tuple[int, int]) -> None:
        async def steps(pilot: Pilot[None]) -> None:
            await say(pilot, "How does the expert cache\ndecide what to keep?")
            await answer(pilot, ANSWER)
            await pilot.press("alt+up")

        assert picture(snap_compare, size, steps)

    @both_sizes
    def test_thinking_and_scrolled_up(self, snap_compare: Compare, size: tuple[int, int]) -> None:
        async def steps(pilot: Pilot[None]) -> None:
            await say(pilot, "Why?")
            await answer(pilot, ANSWER)
            await say(pilot, "And then?")
            app = app_of(pilot)
            app.hear(wire.Text(1, "<think>Let me see what follows from that"))
            app.chat.transcript.view.scroll_home(animate=False)
            await pilot.pause(0.7)
            app.hear(wire.Text(1, ", step by step."))
            await pilot.pause(0.7)

        assert picture(snap_compare, size, steps)

    @small
    def test_failed(self, snap_compare: Compare, size: tuple[int, int]) -> None:
        async def steps(pilot: Pilot[None]) -> None:
            await say(pilot, "Go?")
            message = "/m.gguf: reading 1.2 MiB at byte 5 300 000 000 failed: Input/output error"
            app_of(pilot).hear(wire.Text(1, "It went"), failed(message))

        assert picture(snap_compare, size, steps)

    @small
    def test_context_full(self, snap_compare: Compare, size: tuple[int, int]) -> None:
        async def steps(pilot: Pilot[None]) -> None:
            why = "The prompt has 5 120 tokens; the context holds 4 096."
            pilot.app.push_screen(ContextFullDialog(why))

        assert picture(snap_compare, size, steps)

    @small
    def test_system_prompt(self, snap_compare: Compare, size: tuple[int, int]) -> None:
        async def steps(pilot: Pilot[None]) -> None:
            app_of(pilot).chat.action_system()
            await pilot.pause()
            for area in pilot.app.screen.query("TextArea"):
                area.cursor_blink = False  # type: ignore[attr-defined]

        assert picture(snap_compare, size, steps, system="Answer in rhymes.")

    @both_sizes
    def test_history(self, snap_compare: Compare, size: tuple[int, int], tmp_path: Path) -> None:
        for number, question in enumerate(("Why is the first token slow?", "A haiku on disks")):
            kept = History(tmp_path).begin("Qwen3-30B-A3B", lambda trouble: None)
            talk = Conversation(kept)
            talk.say(question)
            talk.answered(Turn("assistant", "Because the cache is cold.", "eos"))
            kept.close()
            os.utime(kept.path, (NOW - 5_000 * (number + 1),) * 2)

        async def steps(pilot: Pilot[None]) -> None:
            screen = HistoryScreen(History(tmp_path), clock=lambda: NOW)
            pilot.app.push_screen(screen)
            await pilot.pause(0.7)
            screen.query_one("Input").cursor_blink = False  # type: ignore[attr-defined]
            await pilot.press(*"cold")
            await pilot.pause(0.7)

        assert picture(snap_compare, size, steps)

    @both_sizes
    def test_model_picker(
        self, snap_compare: Compare, size: tuple[int, int], tmp_path: Path
    ) -> None:
        there = Path("/models")
        facts = [
            Facts(
                there / "Qwen3-30B-A3B-Q4_K_M.gguf", "Qwen3 30B A3B", "qwen3moe",
                18_600_000_000, 1, 48, 128, 8, 1_200_000_000,
            ),
            Facts(
                there / "gpt-oss-120b-00001-of-00003.gguf", "gpt-oss-120b", "gpt-oss",
                63_400_000_000, 3, 36, 128, 4, 1_900_000_000,
            ),
            Facts(there / "llama-8b.gguf", "Llama 3.1 8B", "llama", 4_900_000_000, n_layer=32),
            Facts(there / "broken.gguf", problem="is cut short; download or copy the file again"),
        ]  # fmt: skip

        async def steps(pilot: Pilot[None]) -> None:
            recent = Recent(tmp_path / "recent.json")
            recent.opened(tmp_path)
            picker = ModelPicker(
                folder=Path("/models"), recent=recent, probe=lambda paths, cancelled: iter(facts)
            )
            pilot.app.push_screen(picker)
            await pilot.pause(0.7)

        assert picture(snap_compare, size, steps)
