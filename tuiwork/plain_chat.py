"""A chat in the plain terminal: a line in, text out as it comes, one line of figures.

Without a terminal (a pipe, a service, CI) it answers one prompt and ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable

from engine.config import RunConfig
from engine.errors import InputError, TuiworkError
from engine.results import Answer
from engine.session import Session
from tuiwork import console
from tuiwork.figures import answer_line, chosen_line
from tuiwork.interrupt import cancel_on_interrupt
from tuiwork.opening import open_session
from tuiwork.progress import ProgressBar

PROMPT_WITHOUT_TERMINAL = "What is the capital of France?"
_SILENCE_S = 1.0
"""How long a pipe may say nothing before it is taken for one that never will."""
_HELP = """/new   begin a new conversation; the expert cache stays warm
/help  this list
/quit  leave, as Ctrl-D does
Ctrl-C stops an answer."""


def chat(config: RunConfig) -> int:
    """Open the model and chat until the user leaves; return the exit status."""
    with open_session(config) as session:
        console.note(chosen_line(session))
        conversation = Conversation(session)
        if not sys.stdin.isatty():
            return _answer_once(conversation, config)
        _converse(conversation)
    return 0


class Conversation:
    """What was said so far, in the form the model takes it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._turns: list[dict[str, str]] = []
        self._told: list[str] = []
        self._tell_news()
        self._raw = session.config.run.raw or not session.model_info.has_chat_template
        if self._raw and not session.config.run.raw:
            console.note("This model has no chat template: it goes on from your text as it is.")

    def new(self) -> None:
        """Forget what was said."""
        self._turns = []
        self.session.clear()

    def answer(self, text: str) -> Answer:
        """Say `text` and stream the answer to stdout.

        If it fails the conversation is as before. Raises TuiworkError.
        """
        if self._raw:
            return self._generate(text)
        system = self.session.config.run.system
        head = [{"role": "system", "content": system}] if system else []
        said = [*self._turns, {"role": "user", "content": text}]
        answer = self._generate([*head, *said])
        self._turns = [*said, {"role": "assistant", "content": answer.text}]
        return answer

    def _generate(self, prompt: str | list[dict[str, str]]) -> Answer:
        with ProgressBar() as bar, cancel_on_interrupt(self.session.cancel):
            answer = self.session.generate(
                prompt, fit_answer=True, on_text=after_bar(bar), progress=bar
            )
        console.write("\n")
        console.note(answer_line(answer))
        self._tell_news()
        return answer

    def _tell_news(self) -> None:
        """What came up since the session was last asked, such as a cache that shrank."""
        for line in self.session.notes:
            if line not in self._told:
                console.note(line)
        self._told = list(self.session.notes)


def after_bar(bar: ProgressBar) -> Callable[[str], None]:
    """A writer of text to stdout that takes the bar away before the first piece."""

    def write(piece: str) -> None:
        bar.close()
        console.write(piece)

    return write


def _converse(conversation: Conversation) -> None:
    _enable_line_editing()
    console.note("Type a message; /help lists commands.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            console.write("\n")
            return
        except KeyboardInterrupt:
            console.note("\n/quit or Ctrl-D leaves.")
            continue
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            conversation.new()
            console.note("A new conversation.")
        elif line.startswith("/"):
            console.note(_HELP if line == "/help" else f"There is no command {line}.\n{_HELP}")
        elif line:
            try:
                conversation.answer(line)
            except TuiworkError as error:
                # A full context or a failed read ends the answer, not the chat.
                console.note(f"{error}")


def _answer_once(conversation: Conversation, config: RunConfig) -> int:
    prompt = config.run.prompt or piped_text() or PROMPT_WITHOUT_TERMINAL
    console.note(f"Nobody types here: answering one prompt. > {prompt}")
    answer = conversation.answer(prompt)
    if answer.stop_reason == "cancelled":
        return 130
    return 0


def piped_text() -> str:
    """What was piped in, or empty if there is nothing within a second.

    Some callers leave a pipe open that nobody writes to; waiting for its end would be forever.
    """
    try:
        fd = sys.stdin.fileno()
    except (OSError, ValueError):
        return ""
    pieces = []
    while select.select([fd], [], [], _SILENCE_S)[0]:
        piece = os.read(fd, 1 << 16)
        if not piece:
            break
        pieces.append(piece)
    text = b"".join(pieces).decode("utf-8", errors="replace").strip()
    if "\0" in text:
        raise InputError("standard input is not a text")
    return text


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() history and arrow keys
