"""Templates that open the reasoning themselves: their prompt ends with `<think>`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.chat import ChatTemplate, begun_reasoning
from engine.session import Session
from tests.conftest import TinyModel
from tests.engine_app import HELLO, config
from tuiwork.chat import reasoning

OPENS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
CLOSED = OPENS.replace("<think>\n", "<think>\n\n</think>\n\n")


@pytest.fixture
def session(tiny_model: TinyModel) -> Iterator[Session]:
    """A model whose template opens the reasoning."""
    with Session.open(config(tiny_model("tiny"))) as session:
        session._template = ChatTemplate(OPENS, session._vocabulary)
        yield session


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [
        ("[assistant]<think>\n", "<think>\n"),
        ("[assistant]<seed:think>", "<seed:think>"),
        ("[assistant]<thinking>\n\n", "<thinking>\n\n"),
        ("[assistant]<think>\n\n</think>\n\n", ""),
        ("<think>\n[assistant]", ""),
        ("", ""),
    ],
)
def test_the_mark_that_a_prompt_ends_with(prompt: str, mark: str) -> None:
    assert begun_reasoning(prompt) == mark


def test_an_answer_is_told_with_its_mark(session: Session) -> None:
    pieces: list[str] = []
    answer = session.generate(HELLO, n_predict=8, on_text=pieces.append)
    assert pieces[0].startswith("<think>\n")
    assert "".join(pieces).count("<think>") == 1
    assert (answer.text, bool(answer.reasoning)) == ("", True)
    assert reasoning.split("".join(pieces)) == (answer.reasoning, answer.text)
    assert len(answer.tokens) == 8


def test_going_on_opens_no_second_time(session: Session) -> None:
    told = [*HELLO, {"role": "assistant", "content": "<think>\nso far"}]
    assert session._template is not None
    assert session._template.prompt(told).endswith("[assistant]<think>\nso far")
    pieces: list[str] = []
    session.generate(told, n_predict=4, on_text=pieces.append)
    assert "<think>" not in "".join(pieces)


def test_going_on_with_an_answer_that_does_not_reason(session: Session) -> None:
    told = [*HELLO, {"role": "assistant", "content": "It is"}]
    assert session._template is not None
    assert session._template.prompt(told).endswith("[assistant]It is")


def test_a_template_that_closes_the_reasoning(session: Session) -> None:
    session._template = ChatTemplate(CLOSED, session._vocabulary)
    answer = session.generate(HELLO, n_predict=4)
    assert answer.reasoning == ""
