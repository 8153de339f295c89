"""Conversations on disk: append-only files, cut lines, search, export; nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuiwork.chat.conversation import INTERRUPTED, Conversation, Turn
from tuiwork.chat.export import as_markdown, export
from tuiwork.chat.history import FileJournal, History, HistoryError, load, replay
from tuiwork.chat.library import Library


def no_trouble(text: str) -> None:
    raise AssertionError(text)


def journal(path: Path) -> FileJournal:
    return FileJournal(path, "Tiny", no_trouble)


def answer(text: str) -> Turn:
    return Turn("assistant", text, "eos", {"n_generated": 3.0, "tok_s": 2.5})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "talks" / "one.jsonl"


def talk(file: Path) -> Conversation:
    """A conversation of two exchanges, in a file that is let go of."""
    kept = journal(file)
    conversation = Conversation(kept)
    conversation.set_system("Be brief.")
    conversation.say("What is an expert?")
    conversation.answered(answer("<think>Easy.</think>\n\nA small network."))
    conversation.say("And a router?")
    conversation.answered(answer("It chooses experts."))
    kept.close()
    return conversation


class TestFile:
    def test_what_was_said_comes_back(self, file: Path) -> None:
        said = talk(file)
        loaded = load(file)
        assert loaded.conversation.turns == said.turns
        assert loaded.conversation.system == "Be brief."
        assert (loaded.model, loaded.problems) == ("Tiny", ())

    def test_nothing_is_written_before_somebody_speaks(self, file: Path) -> None:
        kept = journal(file)
        Conversation(kept).set_system("Be brief.")
        kept.close()
        assert not file.parent.exists()

    def test_it_is_the_users_own(self, file: Path) -> None:
        talk(file)
        assert file.stat().st_mode & 0o077 == 0
        assert file.parent.stat().st_mode & 0o077 == 0

    def test_a_cut_last_line_costs_only_itself(self, file: Path) -> None:
        said = talk(file)
        file.write_bytes(file.read_bytes()[:-9])
        loaded = load(file)
        assert loaded.conversation.turns == said.turns[:-1]
        assert "last line is cut short" in loaded.problems[0]

    def test_after_a_cut_line_the_next_is_whole(self, file: Path) -> None:
        talk(file)
        file.write_bytes(file.read_bytes()[:-9])
        kept = journal(file)
        kept.said(Turn("user", "Still there?"))
        kept.close()
        loaded = load(file)
        assert loaded.conversation.turns[-1].text == "Still there?"
        assert len(loaded.problems) == 1

    def test_an_answer_without_an_end_is_kept_as_far_as_it_came(self, file: Path) -> None:
        kept = journal(file)
        Conversation(kept).say("Tell me a story.")
        kept.piece("Once upon ")
        kept.piece("a time")
        kept.close()
        turns = load(file).conversation.turns
        assert turns[1] == Turn("assistant", "Once upon a time", INTERRUPTED)

    def test_an_answer_that_went_on_is_one(self, file: Path) -> None:
        kept = journal(file)
        conversation = Conversation(kept)
        conversation.say("Tell me a story.")
        conversation.answered(answer("Once"))
        conversation.reopen()
        kept.piece(" upon")
        assert load(file).conversation.turns[1].text == "Once upon"
        conversation.answered(answer("Once upon a time"))
        kept.close()
        assert [turn.text for turn in load(file).conversation.turns] == [
            "Tell me a story.",
            "Once upon a time",
        ]

    def test_what_an_edit_took_back_is_still_in_the_file(self, file: Path) -> None:
        talk(file)
        loaded = load(file)
        loaded.conversation.journal = kept = journal(file)
        loaded.conversation.cut(2)
        loaded.conversation.say("And a token?")
        kept.close()
        assert [turn.text for turn in load(file).conversation.turns][2:] == ["And a token?"]
        assert b"And a router?" in file.read_bytes()

    def test_two_programs_do_not_mix_their_turns(self, file: Path) -> None:
        talk(file)
        first = journal(file)
        first.said(Turn("user", "mine"))
        troubles: list[str] = []
        second = FileJournal(file, "Tiny", troubles.append)
        second.said(Turn("user", "theirs"))
        first.close()
        assert "another tuiwork has this conversation open" in troubles[0]
        assert load(file).conversation.turns[-1].text == "mine"

    def test_a_full_disk_is_told_once_and_the_talk_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "talks").write_text("in the way")
        troubles: list[str] = []
        kept = FileJournal(tmp_path / "talks" / "one.jsonl", "Tiny", troubles.append)
        conversation = Conversation(kept)
        conversation.say("Hello")
        conversation.say("Hello?")
        assert len(troubles) == 1
        assert "no longer kept" in troubles[0]

    @pytest.mark.parametrize(
        "line",
        [
            b"{",
            b"[]",
            b"null",
            b'{"kind": "user"}',
            b'{"kind": "user", "text": 3}',
            b'{"kind": "cut", "keep": -1}',
            b'{"kind": "from a newer version"}',
            b'{"kind": "reopen"}',
            b"\xff\xfe",
            b"[" * 100_000,
        ],
    )
    def test_a_damaged_line_in_the_middle_costs_only_itself(self, file: Path, line: bytes) -> None:
        said = talk(file)
        lines = file.read_bytes().split(b"\n")
        lines.insert(1, line)
        loaded = replay(lines)
        assert loaded.conversation.turns == said.turns
        assert loaded.problems == ("line 2 cannot be read and was left out",)

    def test_a_lost_question_does_not_cost_the_answer_before(self, file: Path) -> None:
        talk(file)
        lines = [line for line in file.read_bytes().split(b"\n") if b"And a router?" not in line]
        texts = [turn.said for turn in replay(lines).conversation.turns]
        assert texts == ["What is an expert?", "A small network.", "It chooses experts."]


texts = st.text(
    st.characters(codec=None, categories=["L", "N", "P", "Zs", "Cc", "Cf", "Cs", "So"]),
    max_size=30,
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), texts),
        st.tuples(st.just("answer"), texts),
        st.tuples(st.just("cut"), st.integers(0, 6)),
        st.tuples(st.just("system"), texts),
        st.tuples(st.just("title"), texts),
        st.tuples(st.just("go on"), texts),
        st.tuples(st.just("forget"), st.none()),
    ),
    max_size=25,
)


def perform(conversation: Conversation, what: str, value: object) -> None:
    turns = conversation.turns
    mine = bool(turns) and turns[-1].role == "user"
    if what == "say" and not mine:
        conversation.say(str(value))
    elif what == "answer" and mine:
        conversation.answered(answer(str(value)))
    elif what == "go on" and turns and not mine:
        conversation.answered(answer(conversation.reopen() + str(value)))
    elif what == "cut" and isinstance(value, int):
        conversation.cut(value)
    elif what == "system":
        conversation.set_system(str(value))
    elif what == "title":
        conversation.rename(str(value))
    elif what == "forget":
        conversation.forget_oldest()


class TestAnyConversation:
    @given(steps, st.integers(0, 40))
    def test_reading_gives_what_was_there_and_a_crash_costs_one_fact(
        self, tmp_path_factory: pytest.TempPathFactory, done: list[tuple[str, object]], cut: int
    ) -> None:
        file = tmp_path_factory.mktemp("talk") / "one.jsonl"
        kept = journal(file)
        conversation = Conversation(kept)
        for what, value in done:
            perform(conversation, what, value)
        kept.close()
        if not file.exists():
            assert not conversation.turns
            return
        loaded = load(file)
        assert loaded.problems == ()
        assert loaded.conversation.turns == conversation.turns
        assert loaded.conversation.messages() == conversation.messages()
        assert loaded.conversation.title == conversation.title
        whole = file.read_bytes()
        lines = whole.splitlines()
        cut = min(cut, len(lines[-1]))
        damaged = replay((whole[: len(whole) - cut] if cut else whole).split(b"\n"))
        assert len(damaged.problems) <= 1
        before = replay(lines[:-1]).conversation.turns
        assert damaged.conversation.turns in (before, conversation.turns)


class TestFolder:
    @pytest.fixture
    def history(self, tmp_path: Path) -> History:
        history = History(tmp_path)
        for number, (name, words) in enumerate(
            [("Cats", "Purring"), ("Dogs", "Barking"), ("Birds", "Singing in the morning")]
        ):
            kept = history.begin(f"Model {number}", no_trouble)
            conversation = Conversation(kept)
            conversation.say(f"Tell me about {name}")
            conversation.answered(answer(words))
            kept.close()
            os.utime(kept.path, (1000 + number, 1000 + number))
        return history

    def test_the_newest_comes_first(self, history: History) -> None:
        titles = [summary.title for summary in history.summaries()]
        assert titles == ["Tell me about Birds", "Tell me about Dogs", "Tell me about Cats"]

    def test_search_looks_at_words_whatever_their_case(self, history: History) -> None:
        found = list(history.summaries("SINGING"))
        assert [summary.snippet for summary in found] == ["Singing in the morning"]
        assert list(history.summaries("fish")) == []

    def test_search_looks_at_names(self, history: History) -> None:
        path = history.paths()[0]
        history.rename(path, "Feathers")
        assert [summary.path for summary in history.summaries("feather")] == [path]

    def test_delete(self, history: History) -> None:
        history.delete(history.paths()[0])
        assert len(history.paths()) == 2

    def test_resume_goes_on_in_the_same_file(self, history: History) -> None:
        path = history.paths()[0]
        loaded = history.resume(path, no_trouble)
        loaded.conversation.say("More")
        assert load(path).conversation.turns[-1].text == "More"

    def test_a_broken_file_is_listed_with_its_problem(self, history: History) -> None:
        (history.folder / "broken.jsonl").write_bytes(b"\x00\x01")
        broken = [summary for summary in history.summaries() if summary.problems]
        assert [summary.path.name for summary in broken] == ["broken.jsonl"]

    def test_no_folder_is_no_conversations(self, tmp_path: Path) -> None:
        assert list(History(tmp_path / "none").summaries()) == []


class TestLibrary:
    def test_without_a_history_nothing_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        library = Library(None, no_trouble)
        library.new("Be brief.").say("Hello")
        assert list(tmp_path.iterdir()) == []

    def test_renaming_the_open_conversation_needs_no_second_lock(self, tmp_path: Path) -> None:
        library = Library(History(tmp_path), no_trouble)
        library.new("").say("Hello")
        assert library.path is not None
        library.rename(library.path, "Greeting")
        assert library.current.title == "Greeting"
        assert load(library.path).conversation.title == "Greeting"

    def test_a_conversation_that_cannot_be_resumed_leaves_the_open_one(
        self, tmp_path: Path
    ) -> None:
        library = Library(History(tmp_path), no_trouble)
        library.new("").say("Hello")
        with pytest.raises(HistoryError):
            library.resume(tmp_path / "gone.jsonl")
        library.current.say("Still here")
        assert library.path is not None
        assert load(library.path).conversation.turns[-1].text == "Still here"


class TestExport:
    def test_it_is_markdown_without_reasoning_or_escapes(self) -> None:
        conversation = Conversation(system="Be brief.")
        conversation.say("Hi")
        conversation.answered(answer("<think>hm</think>**Hello** \x1b[31m"))
        assert as_markdown(conversation, "Tiny") == (
            "# Hi\n\n> System: Be brief.\n\n## You\n\nHi\n\n## Tiny\n\n**Hello** ␛[31m\n"
        )

    def test_a_name_that_is_taken_is_not_overwritten(self, tmp_path: Path) -> None:
        conversation = Conversation()
        conversation.say("../../etc/passwd, please")
        names = [export(conversation, tmp_path).name for _ in range(2)]
        assert names == ["etc-passwd-please.md", "etc-passwd-please-2.md"]

    def test_a_folder_that_cannot_be_written_is_an_error_for_people(self, tmp_path: Path) -> None:
        with pytest.raises(HistoryError, match="cannot be written"):
            export(Conversation(), tmp_path / "none")


class TestMessages:
    def test_reasoning_is_not_told_again(self, file: Path) -> None:
        told = talk(file).messages()
        assert [message["content"] for message in told] == [
            "Be brief.",
            "What is an expert?",
            "A small network.",
            "And a router?",
            "It chooses experts.",
        ]

    def test_an_answer_to_go_on_with_is_told_whole(self) -> None:
        conversation = Conversation()
        conversation.say("Why?")
        conversation.answered(answer("<think>Because"))
        assert conversation.messages()[-1] == {"role": "assistant", "content": "<think>Because"}

    def test_forgetting_drops_whole_exchanges_but_never_the_last(self, file: Path) -> None:
        conversation = talk(file)
        assert conversation.forget_oldest()
        assert [m["content"] for m in conversation.messages()][1:] == [
            "And a router?",
            "It chooses experts.",
        ]
        assert not conversation.forget_oldest()

    def test_a_line_is_one_line_of_ascii(self, file: Path) -> None:
        kept = journal(file)
        kept.said(Turn("user", "a\nb\u2028c\ud800\x1b\x00é"))
        kept.close()
        raw = file.read_bytes()
        assert raw.isascii()
        assert raw.count(b"\n") == 2
        assert json.loads(raw.splitlines()[1])["text"] == "a\nb\u2028c\ud800\x1b\x00é"
