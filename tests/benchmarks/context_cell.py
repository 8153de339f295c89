"""Answers at growing context in one process; prints one JSON line.

`python -m tests.benchmarks.context_cell MODEL TRACE N_TOKENS CONTEXT,… key=value…`

The way to a long context is a prompt of random words that is prefilled in batches; each longer
prompt goes on from the one before. The longest is answered once before all others, unmeasured:
while the cache fills, it takes memory that the machine has not touched before, and the first
contexts would pay for that alone.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_right

from engine.session import Session
from tests.benchmarks.cell import opened, resolved, row_figures

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    """Run one cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("trace", help="a route trace, or - for random tokens")
    parser.add_argument("tokens", type=int, help="of each answer")
    parser.add_argument("contexts", help="prompt tokens, ascending, with commas between")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument(
        "--answered-before", action="store_true", help="answer each once unmeasured before"
    )
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.contexts.split(",")]
    answers = []
    with opened(arguments.model, arguments.trace, arguments.settings) as session:
        prompts = random_prompts(session, lengths)
        session.generate(prompts[-1], n_predict=1)
        session.clear()
        for prompt in prompts:
            if arguments.answered_before:
                session.generate(prompt, n_predict=arguments.tokens)
            answer = session.generate(prompt, n_predict=arguments.tokens)
            turn = len(session.metrics.turns) - 1
            rows = [row for row in session.metrics.rows if row.turn == turn]
            answers.append({"n_prompt": answer.n_prompt, **row_figures(rows)})
        print(json.dumps({"answers": answers, "resolved": resolved(session)}))


def random_prompts(session: Session, lengths: list[int]) -> list[str]:
    """Texts of at most so many tokens, but at least a word; each begins the next one."""
    dice = random.Random(1)
    words = ["a"]
    while len(session.tokenize(" ".join(words))) < max(lengths):
        words += ["".join(dice.choices(LETTERS, k=dice.randint(2, 7))) for _ in range(200)]

    def n_tokens(n_words: int) -> int:
        return len(session.tokenize(" ".join(words[:n_words])))

    # The most words that do not exceed each length.
    counts = [bisect_right(range(1, len(words) + 1), length, key=n_tokens) for length in lengths]
    return [" ".join(words[: max(1, count)]) for count in counts]


if __name__ == "__main__":
    main()
