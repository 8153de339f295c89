"""What a person does in the chat, key by key, with a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from textual import events
from textual.pilot import Pilot

from engine import messages as wire
from tests.chat_app import ChatApp, answer, burst, failed, finished, opened, say
from tuiwork.chat.conversation import Conversation, Turn
from tuiwork.chat.dialogs import ContextFullDialog, EditText
from tuiwork.chat.history import History, load
from tuiwork.chat.history_screen import HistoryScreen
from tuiwork.chat.message_views import NoticeView
from tuiwork.chat.passage import Passage

pytestmark = pytest.mark.asyncio

CODE = "Look:\n\n```python\nx = 1\n```\n\nand\n\n```\nplain\n```\n"


@pytest_asyncio.fixture
async def pilot(tmp_path: Path) -> AsyncIterator[Pilot[None]]:
    """The pane at 80×24 with a model open and its history in a folder of its own."""
    app = ChatApp(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        app.hear(opened())
        await pilot.pause()
        yield pilot


@pytest.fixture
def app(pilot: Pilot[None]) -> ChatApp:
    assert isinstance(pilot.app, ChatApp)
    return pilot.app


def notices(app: ChatApp) -> list[str]:
    return [str(notice.content) for notice in app.query(NoticeView)]


def toasts(app: ChatApp) -> str:
    return " ".join(note.message for note in app._notifications)


class TestTalking:
    async def test_a_question_and_its_answer(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "What is an expert?")
        assert app.told == ["What is an expert?"]
        assert app.chat.composer.text == ""
        await answer(pilot, "A **small** network.")
        text = app.screen_text()
        assert "A small network." in text
        assert "412 tokens · 6.13 tok/s" in text
        assert "1\u202f204 of 4\u202f096" in text

    async def test_the_next_question_tells_the_whole_talk(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "One?")
        await answer(pilot, "<think>hm</think>\nUno.")
        await say(pilot, "Two?")
        assert app.told == ["One?", "Uno.", "Two?"]

    async def test_reasoning_is_shown_while_it_lasts_and_folded_after(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "Why?")
        app.hear(wire.Text(1, "<think>Because of this"))
        await pilot.pause(0.7)
        assert "Thinking · 3 words" in app.screen_text()
        assert "Because of this" in app.screen_text()
        app.hear(wire.Text(1, " and that</think>\n\nTherefore."), finished())
        await pilot.pause(0.7)
        assert "Because" not in app.screen_text()
        assert "· 5 words" in app.screen_text()
        await pilot.press("ctrl+t")
        assert "Because of this and that" in app.screen_text()

    async def test_esc_stops_and_what_came_stays(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "Tell me a story.")
        app.hear(wire.Text(1, "Once upon"))
        await pilot.press("escape")
        assert app.wishes == ["stop"]
        assert "stopping" in app.screen_text()
        await pilot.press("escape")
        assert app.wishes == ["stop"]
        app.hear(finished("cancelled"))
        await pilot.pause()
        assert "Once upon" in app.screen_text()
        assert "stopped" in app.screen_text()

    async def test_a_message_while_it_answers_stays_in_the_composer(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "One?")
        await say(pilot, "Two?")
        assert len(app.asked) == 1
        assert app.chat.composer.text == "Two?"
        assert "Still answering" in toasts(app)

    async def test_before_a_model_is_open_a_message_stays(self) -> None:
        app = ChatApp()
        async with app.run_test() as pilot:
            await say(pilot, "Hello?")
            assert app.asked == []
            assert app.chat.composer.text == "Hello?"
            assert "No model is open yet" in toasts(app)

    async def test_prompt_progress(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "Long one?")
        app.hear(wire.PromptProgress(1, "reading the prompt", 0.43))
        await pilot.pause()
        assert "reading the prompt 43 % · Esc stops" in app.screen_text()

    async def test_go_on_gives_the_answer_so_far_and_adds_to_it(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "Story?")
        await answer(pilot, "Once upon", "length")
        await pilot.press("ctrl+g")
        await pilot.pause()
        assert app.asked[-1].continues
        assert app.told == ["Story?", "Once upon"]
        app.hear(wire.Text(1, " a time."), finished())
        await pilot.pause()
        assert "Once upon a time." in app.screen_text()
        assert [turn.text for turn in app.chat.conversation.turns] == [
            "Story?",
            "Once upon a time.",
        ]
        assert len(app.answer_views) == 1

    async def test_again(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "Number?")
        await answer(pilot, "Four.")
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert app.told == ["Number?"]
        await answer(pilot, "Seven.")
        assert "Four" not in app.screen_text()
        assert [turn.text for turn in app.chat.conversation.turns] == ["Number?", "Seven."]

    async def test_edit_and_send_again(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "First?")
        await answer(pilot, "A.")
        await say(pilot, "Second?")
        await answer(pilot, "B.")
        await pilot.press("alt+up", "k", "k", "k", "e")
        assert app.chat.composer.text == "First?"
        assert "takes back 3 later messages" in app.screen_text()
        await pilot.press("!", "enter")
        await pilot.pause()
        assert app.told == ["First?!"]
        assert len(app.user_views) == 1

    async def test_an_edit_can_be_left(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "First?")
        await answer(pilot, "A.")
        app.chat.action_edit()
        await pilot.press("escape")
        assert app.chat.composer.text == ""
        assert len(app.chat.conversation.turns) == 2

    async def test_an_answer_cannot_be_edited(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "First?")
        await answer(pilot, "A.")
        await pilot.press("alt+up", "e")
        assert "Only your own messages" in toasts(app)

    async def test_the_system_prompt(self, pilot: Pilot[None], app: ChatApp) -> None:
        app.chat.action_system()
        await pilot.pause()
        assert isinstance(app.screen, EditText)
        await pilot.press(*"Rhyme", "ctrl+s")
        await pilot.pause()
        await say(pilot, "Hi")
        assert app.told == ["Rhyme", "Hi"]


class TestComposer:
    @pytest.mark.parametrize("key", ["shift+enter", "ctrl+j", "alt+enter"])
    async def test_several_lines(self, pilot: Pilot[None], app: ChatApp, key: str) -> None:
        await pilot.press("a", key, "b", "enter")
        await pilot.pause()
        assert app.told == ["a\nb"]

    async def test_keys_can_be_moved(self, pilot: Pilot[None], app: ChatApp) -> None:
        app.set_keymap({"chat.send": "ctrl+j", "chat.newline": "enter"})
        await pilot.press("a", "enter", "b")
        assert app.asked == []
        await pilot.press("ctrl+j")
        await pilot.pause()
        assert app.told == ["a\nb"]

    async def test_up_brings_back_what_was_sent_and_down_the_draft(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        for text in ("one", "two"):
            await say(pilot, text)
            await answer(pilot, "ok")
        await pilot.press("n", "e", "w", "up")
        assert app.chat.composer.text == "two"
        await pilot.press("up", "up")
        assert app.chat.composer.text == "one"
        await pilot.press("down", "down")
        assert app.chat.composer.text == "new"

    async def test_up_moves_between_lines_first(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "sent")
        await answer(pilot, "ok")
        await pilot.press("a", "ctrl+j", "b", "up")
        assert app.chat.composer.text == "a\nb"

    async def test_a_large_paste(self, pilot: Pilot[None], app: ChatApp) -> None:
        text = "line of a log\r\n" * 20_000 + "\x1b[31mred\u200b"
        app.chat.composer.post_message(events.Paste(text))
        await pilot.pause()
        assert app.chat.composer.text.count("\n") == 20_000
        assert app.chat.composer.text.endswith("␛[31mred")
        assert app.chat.composer.size.height <= 10

    async def test_nothing_is_sent_for_blanks(self, pilot: Pilot[None], app: ChatApp) -> None:
        await pilot.press("space", "enter")
        assert app.asked == []


class TestCopy:
    async def test_message(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "Why?")
        await answer(pilot, "<think>x</think>Because **so**.\x1b]52;c;aGk=\x07")
        await pilot.press("alt+up", "c")
        assert app.clipboard == "Because **so**.␛]52;c;aGk=␇"

    async def test_code_blocks_one_after_the_other(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "Code?")
        await answer(pilot, CODE)
        await pilot.press("alt+up", "b")
        assert app.clipboard == "x = 1"
        await pilot.press("b")
        assert app.clipboard == "plain"
        assert "block 2 of 2" in toasts(app)

    async def test_a_click_on_code_copies_it(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "Code?")
        await answer(pilot, CODE)
        passage = app.query(Passage).last()
        await pilot.click(passage, offset=(5, 3))
        await pilot.pause()
        assert app.clipboard == "x = 1"

    async def test_text_can_be_selected_with_the_mouse(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "Words?")
        await answer(pilot, "One *two* three.")
        passage = app.query(Passage).last()
        await pilot.mouse_down(passage, offset=(4, 0))
        await pilot.hover(passage, offset=(7, 0))
        await pilot.mouse_up(passage, offset=(7, 0))
        assert app.screen.get_selected_text() == "two"


class TestScrolling:
    async def test_a_reader_who_scrolled_up_is_not_pulled_away(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "Much?")
        app.hear(wire.Text(1, "line\n\n" * 40))
        await pilot.pause(0.7)
        view = app.chat.transcript.view
        assert view.follows
        view.focus()
        await pilot.press("pageup", "pageup")
        await pilot.pause()
        before = view.scroll_y
        app.hear(wire.Text(1, "more\n\n" * 40))
        await pilot.pause(0.7)
        assert view.scroll_y == before
        assert "new text below" in app.screen_text()
        await pilot.press("end")
        await pilot.pause(1.5)
        assert view.follows
        assert "new text below" not in app.screen_text()
        app.hear(wire.Text(1, "most\n\n" * 40))
        await pilot.pause(0.7)
        assert view.follows

    async def test_a_short_answer_begins_at_the_top(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "Hm?")
        await answer(pilot, "Yes.")
        assert app.screen_text().splitlines()[0].endswith("You")


class TestLongConversations:
    @pytest_asyncio.fixture
    async def long(self, pilot: Pilot[None], app: ChatApp, tmp_path: Path) -> None:
        """Sixty exchanges, resumed."""
        kept = History(tmp_path / "other").begin("Tiny", print)
        conversation = Conversation(kept)
        for number in range(60):
            conversation.say(f"Question {number}.")
            conversation.answered(Turn("assistant", f"Answer {number}.", "eos"))
        kept.close()
        app.chat._resume(kept.path)
        await pilot.pause()

    @pytest.mark.usefixtures("long")
    async def test_the_screen_holds_the_newest(self, pilot: Pilot[None], app: ChatApp) -> None:
        assert len(app.chat.transcript.views) == 20
        await say(pilot, "More?")
        assert len(app.told) == 121
        assert len(app.chat.transcript.views) == 21

    @pytest.mark.usefixtures("long")
    async def test_earlier_ones_are_a_key_away(self, pilot: Pilot[None], app: ChatApp) -> None:
        await pilot.press("alt+up", "p")
        await pilot.pause(0.7)
        views = app.chat.transcript.views
        assert [view.number for view in views] == list(range(80, 120))
        assert "Answer 49." in app.screen_text()
        app.chat.transcript.view.scroll_home(animate=False)
        await pilot.pause(0.7)
        assert "80 earlier messages" in app.screen_text()
        await pilot.click("#earlier")
        await pilot.pause(0.7)
        assert len(app.chat.transcript.views) == 60

    @pytest.mark.usefixtures("long")
    async def test_taking_back_all_that_is_shown_shows_what_is_left(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        app.chat.action_edit(90)
        await pilot.press("enter")
        await pilot.pause(0.7)
        assert len(app.told) == 91
        assert "Answer 44." in app.screen_text()


class TestTrouble:
    async def test_a_failed_answer_says_what_and_what_next(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "Go?")
        app.hear(wire.Text(1, "Part"), failed("disk [red]gone[/red]\x1b[2J"))
        await pilot.pause()
        assert "disk [red]gone[/red]␛[2J" in notices(app)[0]
        assert "Ctrl+R tries again" in notices(app)[0]
        assert app.chat.conversation.turns[-1].text == "Part"
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert app.told == ["Go?"]
        assert notices(app) == []

    async def test_a_dead_engine_keeps_the_conversation(
        self, pilot: Pilot[None], app: ChatApp, tmp_path: Path
    ) -> None:
        await say(pilot, "Go?")
        app.hear(
            wire.Text(1, "Part"), wire.EngineDied(None, "SIGKILL", ("last words",), "answering")
        )
        await pilot.pause()
        assert "most likely by the system for lack of memory" in notices(app)[0]
        assert "last words" in notices(app)[0]
        (file,) = tmp_path.glob("*.jsonl")
        assert [turn.text for turn in load(file).conversation.turns] == ["Go?", "Part"]
        app.hear(opened())
        await say(pilot, "Still?")
        assert app.told == ["Go?", "Part", "Still?"]

    async def test_another_model_ends_what_the_old_one_was_asked(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await say(pilot, "Go?")
        app.hear(wire.Text(1, "Part"), wire.OpenProgress("reading the header", 0.1))
        await say(pilot, "Now?")
        assert app.chat.composer.text == "Now?"
        app.hear(opened())
        await pilot.press("enter")
        await pilot.pause()
        assert app.told == ["Go?", "Part", "Now?"]

    async def test_events_of_nothing_asked_change_nothing(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        app.hear(wire.Text(1, "ghost"), finished(), failed("no"), wire.Tokens(1, 5, 4096))
        await pilot.pause()
        assert "ghost" not in app.screen_text()
        assert notices(app) == []


class TestContext:
    async def test_the_draft_is_counted_when_the_writer_pauses(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        await pilot.press("h", "i")
        assert app.counted == []
        await pilot.pause(0.8)
        assert app.counted == [[{"role": "user", "content": "hi"}]]
        app.hear(wire.Tokens(1, 57, 4096))
        await pilot.pause()
        assert "0 → 57 of 4\u202f096" in app.screen_text()

    async def fill(self, pilot: Pilot[None], app: ChatApp) -> None:
        for number in range(3):
            await say(pilot, f"Question {number}")
            await answer(pilot, f"Answer {number}")
        await say(pilot, "One too many")
        app.hear(failed("The prompt does not fit.", "ContextFull"))
        await pilot.pause()
        assert isinstance(app.screen, ContextFullDialog)

    async def test_cancel_gives_the_message_back(self, pilot: Pilot[None], app: ChatApp) -> None:
        await self.fill(pilot, app)
        await pilot.press("escape")
        await pilot.pause()
        assert app.chat.composer.text == "One too many"
        assert len(app.chat.conversation.turns) == 6

    async def test_drop_oldest_drops_until_it_fits(self, pilot: Pilot[None], app: ChatApp) -> None:
        await self.fill(pilot, app)
        await pilot.press("d")
        await pilot.pause()
        app.hear(wire.Tokens(1, 4000, 4096))
        await pilot.pause()
        assert len(app.asked) == 4
        app.hear(wire.Tokens(1, 3000, 4096))
        await pilot.pause()
        assert app.told == ["Question 2", "Answer 2", "One too many"]
        unsent = [view for view in app.chat.transcript.views if view.has_class("-unsent")]
        assert len(unsent) == 4

    async def test_a_new_conversation_begins_with_the_message(
        self, pilot: Pilot[None], app: ChatApp, tmp_path: Path
    ) -> None:
        await self.fill(pilot, app)
        await pilot.press("n")
        await pilot.pause()
        assert app.told == ["One too many"]
        assert "clear" in app.wishes
        assert len(list(tmp_path.glob("*.jsonl"))) == 2


class TestHistory:
    async def test_resume(self, pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, "About cats")
        await answer(pilot, "Purr.")
        await pilot.press("ctrl+n")
        await pilot.pause()
        assert "A new conversation" in app.screen_text()
        await pilot.press("ctrl+l")
        await pilot.pause(0.7)
        assert isinstance(app.screen, HistoryScreen)
        await pilot.press(*"cats", "enter")
        await pilot.pause(0.7)
        assert "Purr." in app.screen_text()
        await say(pilot, "More")
        assert app.told == ["About cats", "Purr.", "More"]
        await pilot.press("up")
        assert app.chat.composer.text == "More"

    async def test_rename_and_delete(
        self, pilot: Pilot[None], app: ChatApp, tmp_path: Path
    ) -> None:
        await say(pilot, "About cats")
        await answer(pilot, "Purr.")
        await pilot.press("ctrl+l")
        await pilot.pause(0.7)
        await pilot.press("f2")
        await pilot.pause()
        await pilot.press("ctrl+a", "ctrl+k", *"Felines", "enter")
        await pilot.pause(0.7)
        assert "Felines" in app.screen_text()
        assert app.chat.conversation.title == "Felines"
        await pilot.press("f8")
        await pilot.pause()
        await pilot.press("n")
        assert len(History(tmp_path).paths()) == 1
        await pilot.press("f8")
        await pilot.pause()
        await pilot.press("y")
        await pilot.pause(0.7)
        assert History(tmp_path).paths() == []
        assert "No conversations yet" in app.screen_text()

    async def test_export(
        self,
        pilot: Pilot[None],
        app: ChatApp,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        await say(pilot, "About cats")
        await answer(pilot, "Purr.")
        app.chat.action_export()
        await pilot.pause()
        assert (tmp_path / "about-cats.md").read_text().endswith("Purr.\n")
        assert "about-cats.md" in toasts(app)

    async def test_without_history_nothing_is_kept(self) -> None:
        app = ChatApp()
        async with app.run_test() as pilot:
            app.hear(opened())
            await say(pilot, "Secret")
            await answer(pilot, "Hush.")
            app.chat.action_history()
            await pilot.pause()
            assert "--no-history" in toasts(app)
            assert app.chat.library.path is None

    async def test_every_action_is_in_the_palette(self, app: ChatApp) -> None:
        titles = [command.title for command in app.chat.palette_commands()]
        assert len(titles) == len(set(titles)) == 13


class TestBursts:
    """Keys count in the order in which they were pressed, however fast they come."""

    async def test_text_and_enter(self, pilot: Pilot[None], app: ChatApp) -> None:
        burst(app, *"hello", "enter", *"next")
        await pilot.pause(0.7)
        assert app.told == ["hello"]
        assert app.chat.composer.text == "next"

    async def test_text_and_new_lines(self, pilot: Pilot[None], app: ChatApp) -> None:
        burst(app, *"one", "ctrl+j", *"two", "shift+enter", *"three", "enter")
        await pilot.pause(0.7)
        assert app.told == ["one\ntwo\nthree"]

    async def test_a_second_message_stays_while_the_first_is_answered(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        burst(app, *"one", "enter", *"two", "enter", *"x")
        await pilot.pause(0.7)
        assert app.told == ["one"]
        assert app.chat.composer.text == "twox"

    async def test_a_name(self, pilot: Pilot[None], app: ChatApp) -> None:
        app.chat.action_rename()
        await pilot.pause(0.3)
        burst(app, *"sea", "enter")
        await pilot.pause(0.7)
        assert app.chat.conversation.title == "sea"

    async def test_a_search_in_the_history(self, pilot: Pilot[None], app: ChatApp) -> None:
        for words in ("about ships", "about trees"):
            await say(pilot, words)
            await answer(pilot, "Yes.")
            app.chat.action_new()
            await pilot.pause(0.3)
        await pilot.press("ctrl+l")
        await pilot.pause(0.7)
        burst(app, *"ships", "enter")
        await pilot.pause(1.5)
        assert app.chat.conversation.title == "about ships"


class TestBeforeTheModel:
    async def test_a_message_waits_for_the_model(self, pilot: Pilot[None], app: ChatApp) -> None:
        app.hear(wire.OpenProgress("loading", 0.2))
        await say(pilot, "early")
        assert app.asked == []
        assert "goes out when the model is open" in app.screen_text()
        app.hear(opened())
        await pilot.pause(0.7)
        assert app.told == ["early"]
        assert app.chat.composer.text == ""

    async def test_one_that_is_written_on_does_not_go_by_itself(
        self, pilot: Pilot[None], app: ChatApp
    ) -> None:
        app.hear(wire.OpenProgress("loading", 0.2))
        await say(pilot, "early")
        await pilot.press("x")
        app.hear(opened())
        await pilot.pause(0.7)
        assert app.asked == []
        assert app.chat.composer.text == "earlyx"

    async def test_nor_when_the_model_does_not_open(self, pilot: Pilot[None], app: ChatApp) -> None:
        app.hear(wire.OpenProgress("loading", 0.2))
        await say(pilot, "early")
        app.hear(wire.OpenFailed("no such file", "ModelError"))
        await pilot.pause(0.3)
        assert "goes out" not in app.screen_text()
        app.hear(opened())
        await pilot.pause(0.7)
        assert app.asked == []
        assert app.chat.composer.text == "early"
