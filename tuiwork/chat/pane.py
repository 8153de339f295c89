"""The chat side of the workbench as one widget: what the person does with a conversation.

`Answering` has the engine's side. The app passes engine events to `on_engine_event` and carries out
the messages `Ask`, `Stop`, `ClearContext` and `CountTokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from textual import events, on
from textual.app import SystemCommand
from textual.binding import Binding, BindingType

from tuiwork.chat.answering import Answering
from tuiwork.chat.commands import commands_of
from tuiwork.chat.composer import Composer
from tuiwork.chat.conversation import Conversation, Turn
from tuiwork.chat.dialogs import ContextFullDialog, EditText, WhenFull
from tuiwork.chat.export import export
from tuiwork.chat.history import History, HistoryError
from tuiwork.chat.history_screen import HistoryScreen
from tuiwork.chat.message_views import AnswerView, MessageView, UserView
from tuiwork.chat.transcript import HINTS, Scroll, Transcript
from tuiwork.chat.untrusted import visible
from tuiwork.chat.when import counted

SHOWN_TURNS = 20
SHOWN_CHARACTERS = 60_000
"""The newest turns that are on the screen at once; earlier ones are a key away.

With 120 turns on it a flush takes 120 ms: Textual places every widget anew at each new line."""

BUSY = "Still answering: Esc stops it."


class ChatPane(Answering):
    """Conversation and composer."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    ChatPane { background: $background; }
    .-ascii MessageView, .-ascii NoticeView { border-left: ascii $foreground 40%; }
    .-ascii MessageView.-picked { border-left: ascii $accent; }
    .-ascii Composer, .-ascii Composer:focus { border: ascii $foreground 40%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="chat.stop", tooltip="Stop the answer"),
        Binding("ctrl+n", "new", "New chat", id="chat.new", tooltip="Begin a new conversation"),
        Binding("ctrl+l", "history", "Chats", id="chat.history", tooltip="Earlier conversations"),
        Binding("ctrl+r", "regenerate", "Again", id="chat.regenerate", show=False),
        Binding("ctrl+g", "continue", "Go on", id="chat.go-on", show=False),
        Binding("ctrl+t", "thinking", "Thinking", id="chat.fold", show=False),
        Binding("alt+up", "pick(-1)", "Messages", id="chat.pick", show=False),
    ]

    def __init__(
        self,
        *,
        system: str = "",
        history: History | None = None,
        keep_history: bool = True,
        id: str | None = None,
    ) -> None:
        """`keep_history` False keeps nothing on disk; `history` None is the user's own folder."""
        super().__init__((history or History()) if keep_history else None, id)
        self._editing: int | None = None
        self._first_shown = 0
        self.library.new(system)

    def on_unmount(self) -> None:
        """Let go of the conversation's file."""
        self.library.close()

    @property
    def conversation(self) -> Conversation:
        """The open one."""
        return self.library.current

    def palette_commands(self) -> Iterator[SystemCommand]:
        """Everything that can be done here, for the command palette."""
        return commands_of(self)

    def idle_status(self) -> str:
        """Whether an earlier message is being edited, or the name of the conversation."""
        if self.transcript.picked is not None:
            return HINTS
        if self.held:
            return "goes out when the model is open"
        if self._editing is None:
            return "message"
        later = len(self.conversation.turns) - self._editing - 1
        return f"editing; sending takes back {counted(later, 'later message')} · Esc leaves it"

    # Say, stop, again.

    @on(Composer.Sent)
    def _send(self, event: Composer.Sent) -> None:
        """Say it, in place of a message that is being edited if there is one."""
        event.stop()
        if self.opening and not self.exchange.busy:
            self.hold(event.text)
        elif self._may_ask(" Your message stays where you wrote it."):
            if self._editing is not None:
                self._cut(self._editing)
                self._leave_editing()
            self._say(event.text)
        else:
            self.composer.give_back(event.text)

    def _say(self, text: str) -> None:
        self.conversation.say(text)
        n_turns = len(self.conversation.turns)
        for view in self._views(n_turns - 1, n_turns):
            self.transcript.add(view)
        self._leave_oldest()
        self.ask()

    def _may_ask(self, hint: str = "") -> bool:
        if self.exchange.busy:
            self.notify(BUSY + hint)
        elif not self.ready:
            self.notify("No model is open yet." + hint)
        return self.ready and not self.exchange.busy

    def action_stop(self) -> None:
        """Stop the answer; else give up editing; else go back to writing."""
        if self.exchange.stop():
            self.post_message(self.Stop())
        elif self._editing is not None:
            self.composer.put("")
            self._leave_editing()
        else:
            self.composer.focus()
        self.show_status()

    def action_regenerate(self, number: int | None = None) -> None:
        """Answer again, turn `number` or else the last: what came after is taken back."""
        asked = [n for n, turn in enumerate(self.conversation.turns) if turn.role == "user"]
        if number is not None:
            asked = [n for n in asked if n <= number]
        if asked and self._may_ask():
            self._cut(asked[-1] + 1)
            self.ask()

    def action_continue(self) -> None:
        """Go on with the last answer where it ended."""
        turns = self.conversation.turns
        if not turns or turns[-1].role == "user":
            self.notify("There is no answer to go on with.")
        elif self._may_ask():
            self.transcript.cut(len(turns) - 1)
            self.ask(continues=True)

    def action_edit(self, number: int | None = None) -> None:
        """Take your message `number`, or else your last, into the composer."""
        if self.exchange.busy:
            self.notify(BUSY)
            return
        turns = self.conversation.turns
        mine = [n for n, turn in enumerate(turns) if turn.role == "user"]
        if number is None and mine:
            number = mine[-1]
        if number not in mine:
            self.notify("Only your own messages can be edited.")
            return
        self._editing = number
        self.composer.put(turns[number].text)
        self.composer.add_class("-editing")
        self.composer.focus()
        self.show_status()

    def _leave_editing(self) -> None:
        self._editing = None
        self.composer.remove_class("-editing")
        self.show_status()

    def _cut(self, keep: int) -> None:
        self.conversation.cut(keep)
        self.transcript.cut(keep)
        if keep <= self._first_shown:
            self._first_shown = first_shown(self.conversation.turns)
            self.transcript.add_earlier(self._views(self._first_shown, keep))
            self.transcript.show_earlier(self._first_shown)

    # Whole conversations.

    def action_new(self) -> None:
        """Begin a new conversation; the old one is kept."""
        if self.exchange.busy:
            self.notify(BUSY)
            return
        self.library.new(self.conversation.system)
        self._show_conversation()

    def action_history(self) -> None:
        """Choose an earlier conversation."""
        if self.library.history is None:
            self.notify("No conversations are kept (--no-history).")
        elif self.exchange.busy:
            self.notify(BUSY)
        else:
            screen = HistoryScreen(self.library.history, rename=self._rename, delete=self._delete)
            self.app.push_screen(screen, self._resume)

    def _resume(self, path: Path | None) -> None:
        if path is None or path == self.library.path:
            return
        try:
            loaded = self.library.resume(path)
        except HistoryError as error:
            self.notify(visible(str(error)), severity="error", markup=False)
            return
        self._show_conversation()
        for problem in loaded.problems:
            self.notice(f"{path.name}: {problem}.")

    def _rename(self, path: Path, title: str) -> None:
        self.library.rename(path, title)

    def _delete(self, path: Path) -> None:
        if path == self.library.path:
            self.action_new()
        self.library.delete(path)

    def _show_conversation(self) -> None:
        """Show the open conversation from its beginning; the model has not heard it yet."""
        conversation = self.conversation
        self._leave_editing()
        self.transcript.cut(0)
        self._first_shown = first_shown(conversation.turns)
        for view in self._views(self._first_shown, len(conversation.turns)):
            self.transcript.add(view)
        self.transcript.show_earlier(self._first_shown)
        mine = [turn.text for turn in conversation.turns if turn.role == "user"]
        if mine:
            self.composer.remember(mine)
        self.transcript.follow()
        self.composer.focus()
        self.post_message(self.ClearContext())

    def _views(self, start: int, end: int) -> list[MessageView]:
        """The turns `start` to `end` as widgets."""
        views: list[MessageView] = []
        for number, turn in enumerate(self.conversation.turns[start:end], start):
            answer = turn.role == "assistant"
            views.append(AnswerView(turn, model=self.model) if answer else UserView(turn.text))
            views[-1].number = number
            views[-1].set_class(number < self.conversation.first_sent, "-unsent")
        return views

    def _show_earlier(self) -> None:
        """As many turns again, above those that are shown."""
        before = self._first_shown
        if before:
            self._first_shown = first_shown(self.conversation.turns[:before])
            self.transcript.add_earlier(self._views(self._first_shown, before))
            self.transcript.show_earlier(self._first_shown)

    def _leave_oldest(self) -> None:
        """Take off the screen what a flush must not pay for."""
        first = first_shown(self.conversation.turns)
        if first > self._first_shown:
            self._first_shown = first
            self.transcript.leave_before(first)
            self.transcript.show_earlier(first)

    def action_rename(self) -> None:
        """Give the open conversation a name."""

        def named(title: str | None) -> None:
            if title is not None:
                self.conversation.rename(title)

        self._edit_text("Name", self.conversation.title, "The name in the list.", named, True)

    def action_system(self) -> None:
        """Edit the system prompt."""

        def written(text: str | None) -> None:
            if text is not None:
                self.conversation.set_system(text)

        explanation = "The model is told this before the conversation. It counts from now on."
        self._edit_text("System prompt", self.conversation.system, explanation, written, False)

    def _edit_text(
        self,
        title: str,
        text: str,
        explanation: str,
        take: Callable[[str | None], None],
        one_line: bool,
    ) -> None:
        self.app.push_screen(EditText(title, text, explanation, one_line=one_line), take)

    def action_export(self) -> None:
        """Write the open conversation as Markdown into the current folder."""
        try:
            path = export(self.conversation, Path.cwd(), self.model)
        except HistoryError as error:
            self.notify(visible(str(error)), severity="error", markup=False)
        else:
            self.notify(f"Written: {visible(str(path))}", markup=False)

    # The context is full.

    def context_full(self, why: str) -> None:
        """Ask what to do."""
        self.app.push_screen(ContextFullDialog(why), self._decided_when_full)

    def _decided_when_full(self, choice: WhenFull | None) -> None:
        if choice is WhenFull.DROP_OLDEST:
            self.drop_oldest()
            return
        turns = self.conversation.turns
        text = turns[-1].text if turns and turns[-1].role == "user" else ""
        if text:
            self._cut(len(turns) - 1)
        if choice is WhenFull.NEW:
            self.action_new()
            if text:
                self._say(text)
        elif text:
            self.composer.put(text)

    # The messages.

    def action_thinking(self) -> None:
        """Fold or unfold the reasoning of the picked or last answer."""
        self.transcript.fold()

    def action_copy(self) -> None:
        """Copy the picked or last message."""
        self.transcript.copy_message()

    def action_copy_code(self) -> None:
        """Copy the next code block of the picked or last answer."""
        self.transcript.copy_next_code()

    def action_pick(self, step: int = -1) -> None:
        """Go from writing to the messages."""
        self.transcript.view.focus()
        self.transcript.pick_by(step)

    @on(events.DescendantFocus)
    def _focus_moved(self, event: events.DescendantFocus) -> None:
        """Who writes has let go of the message that was picked."""
        if event.widget is self.composer and self.transcript.picked is not None:
            self.transcript.pick(None)

    @on(Transcript.Picked)
    def _picked(self) -> None:
        self.show_status()

    @on(Scroll.Wish)
    def _wish(self, event: Scroll.Wish) -> None:
        event.stop()
        view = self.transcript.picked_or_last
        if view is None:
            return
        match event.what:
            case "edit":
                self.action_edit(view.number)
            case "regenerate":
                self.action_regenerate(view.number)
            case "continue":
                self.action_continue()
            case "earlier":
                self._show_earlier()


def first_shown(turns: Sequence[Turn]) -> int:
    """The first of the newest turns that are shown together; always at least an exchange."""
    budget = SHOWN_CHARACTERS
    for number in range(len(turns) - 1, -1, -1):
        budget -= len(turns[number].text)
        behind = len(turns) - 1 - number
        if (budget < 0 and behind >= 2) or behind >= SHOWN_TURNS:
            return number + 1
    return 0
