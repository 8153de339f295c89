"""The demo model's exam: forty questions through the real chat template, answers judged by rule.

An answer is sensible if it says what the question is about and what is so (the question's keys, as
whole words, whatever the case), is not much longer than the reference, and ends. `python -m
engine.demo.exam --help`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.demo import DEMO_MODEL
from engine.demo.evaluation import open_session

EXAM = Path(__file__).parent / "exam.json"
LONGEST_ANSWER = 60
"""Tokens; an answer that is cut off here is not sensible."""


@dataclass(frozen=True)
class Question:
    """One question of the exam."""

    domain: str
    question: str
    keys: tuple[str, ...]
    """what a sensible answer says"""
    reference: str
    """the answer that training had or would have had"""
    new: str
    """what of it training never showed: "phrasing", "sum" or nothing"""


@dataclass(frozen=True)
class Marked:
    """An answer and its verdict."""

    question: str
    answer: str
    sensible: bool
    exact: bool
    """whether it is the reference, letter for letter"""


def read_exam(path: Path = EXAM) -> list[Question]:
    """The questions, in order."""
    return [Question(**{**row, "keys": tuple(row["keys"])}) for row in json.loads(path.read_text())]


def is_sensible(question: Question, answer: str) -> bool:
    """Whether the answer says what the question's keys want, and ends."""
    return (
        all(
            re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", answer, re.IGNORECASE)
            for key in question.keys
        )
        and len(answer) <= 1.25 * len(question.reference) + 10
    )


def take(model: Path, questions: Sequence[Question]) -> list[Marked]:
    """Ask every question in a conversation of its own, greedily."""
    marked = []
    with open_session(model) as session:
        for question in questions:
            session.clear()
            said = session.generate(
                [{"role": "user", "content": question.question}], n_predict=LONGEST_ANSWER
            )
            text = said.text.strip()
            ended = said.stop_reason != "length"
            good = ended and is_sensible(question, text)
            marked.append(Marked(question.question, text, good, text == question.reference))
    return marked


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--exam", type=Path, default=EXAM)
    parser.add_argument("--json", action="store_true", help="the answers as JSON")
    args = parser.parse_args()
    questions = read_exam(args.exam)
    marked = take(args.model, questions)
    if args.json:
        print(json.dumps([asdict(m) for m in marked], indent=1, ensure_ascii=False))
        return
    print("| domain | question | new to it | answer | sensible |\n| --- | --- | --- | --- | --- |")
    for q, m in zip(questions, marked, strict=True):
        verdict = "yes" if m.sensible else "**no**"
        print(f"| {q.domain} | {q.question} | {q.new} | {m.answer} | {verdict} |")
    n_exact = sum(m.exact for m in marked)
    print(f"\n{sum(m.sensible for m in marked)} of {len(marked)} sensible, {n_exact} exact.")


if __name__ == "__main__":
    main()
