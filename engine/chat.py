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
_TAGS = "think|thinking|reasoning|seed:think"
_REASONING = re.compile(rf"\A\s*<(?P<tag>{_TAGS})>(?P<inside>.*?)(?:</(?P=tag)>|\Z)", re.S)
_BEGUN = re.compile(rf"<(?:{_TAGS})>\s*\Z")


class ChatTemplate:
    """The chat template in a model's file."""

    def __init__(self, source: str, vocabulary: Vocabulary) -> None:
        """Raises InputError for a template that is not one."""
        try:
            self._formatter = Jinja2ChatFormatter(
                template=source, eos_token=vocabulary.eos_text, bos_token=vocabulary.bos_text
            )
        except Exception as error:
            # A template is a program in somebody's file: nesting, for one, can exhaust the parser.
            raise InputError(f"the model's chat template is broken: {_reason(error)}") from None

    @classmethod
    def of_model(cls, model: Any, vocabulary: Vocabulary) -> ChatTemplate | None:
        """The model's template, or None if its file has none. Raises InputError if it is broken."""
        source = llama.llama_model_chat_template(model, None)
        return cls(source.decode("utf-8", errors="replace"), vocabulary) if source else None

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that makes the model answer the last message.

        A last message of the assistant's own is an answer to go on with: nothing ends it. Raises
        InputError with the template's own words if it refuses the messages.
        """
        begun = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else ""
        plain: Any = [dict(message) for message in (messages[:-1] if begun else messages)]
        try:
            text = self._formatter(messages=plain).prompt
        except Exception as error:
            # Whatever a program in somebody's file may raise, from its own refusal to recursion.
            raise InputError(
                f"the model's chat template refuses these messages: {_reason(error)}; "
                "--raw goes without it"
            ) from None
        if not text:
            raise InputError(
                "the model's chat template makes an empty prompt of these messages; "
                "--raw goes without it"
            )
        if begun:
            # Where the template opens the reasoning, the answer so far has its own opening, or
            # is one without any.
            text = text.removesuffix(begun_reasoning(text))
        return text + begun


def _reason(error: Exception) -> str:
    # A template refuses by raising one of these, with words of its own.
    if isinstance(error, (jinja2.TemplateError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def begun_reasoning(prompt: str) -> str:
    """The mark that opens the reasoning, if a prompt ends with one; empty if not.

    Such a template leaves only the rest to the model, so the mark is told before its first words:
    whoever reads the answer, now or when it is kept, finds where the reasoning begins.
    """
    match = _BEGUN.search(prompt)
    return match[0] if match else ""


def split_reasoning(text: str) -> tuple[str, str]:
    """An answer as (reasoning, rest): what the model thought aloud, and what it said.

    Reasoning that was not ended by the time the answer stopped is all reasoning.
    """
    match = _REASONING.match(text)
    if not match:
        return "", text
    return match["inside"].strip(), text[match.end() :].lstrip("\n")
