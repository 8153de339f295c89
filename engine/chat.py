"""Messages to a prompt by the model's own template; answers apart into reasoning and text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from engine.errors import InputError
from engine.ggml import llama
from engine.vocabulary import Vocabulary

Message = Mapping[str, str]
_REASONING = re.compile(
    r"\A\s*<(?P<tag>think|thinking|reasoning|seed:think)>(?P<inside>.*?)(?:</(?P=tag)>|\Z)", re.S
)


class ChatTemplate:
    """The chat template in a model's file."""

    def __init__(self, source: str, vocabulary: Vocabulary) -> None:
        self._formatter = Jinja2ChatFormatter(
            template=source, eos_token=vocabulary.eos_text, bos_token=vocabulary.bos_text
        )

    @classmethod
    def of_model(cls, model: Any, vocabulary: Vocabulary) -> ChatTemplate | None:
        """The model's template, or None if its file has none."""
        source = llama.llama_model_chat_template(model, None)
        return cls(source.decode("utf-8", errors="replace"), vocabulary) if source else None

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that makes the model answer the last message.

        Raises InputError with the template's own words if it refuses the messages.
        """
        try:
            plain: Any = [dict(message) for message in messages]
            return self._formatter(messages=plain).prompt
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InputError(f"the model's chat template refuses these messages: {error}") from None


def split_reasoning(text: str) -> tuple[str, str]:
    """An answer as (reasoning, rest): what the model thought aloud, and what it said.

    Reasoning that was not ended by the time the answer stopped is all reasoning.
    """
    match = _REASONING.match(text)
    if not match:
        return "", text
    return match["inside"].strip(), text[match.end() :].lstrip("\n")
