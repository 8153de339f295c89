"""A larger exam, drawn at random from all that training asks. `python -m engine.demo.wide_exam`.

Its file goes to `engine.demo.exam --exam`. Every key of a question is the reference itself, so
only the exact answer passes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from engine.demo import arithmetic, sources
from engine.demo.corpus import all_facts


def draw(wordnet: Path, per_domain: int, seed: int) -> list[dict[str, object]]:
    """As many facts of each domain, asked as trained and in the phrasing that is held out."""
    rng = random.Random(seed)
    facts = [fact for fact in all_facts(wordnet) if fact.domain not in ("talk", "arithmetic")]
    facts += arithmetic.facts(held_out=True)
    rows: list[dict[str, object]] = []
    for domain in sorted({fact.domain for fact in facts}):
        for fact in rng.sample([f for f in facts if f.domain == domain], per_domain):
            trained = rng.choice(fact.questions())
            for question, new in ((trained, ""), (fact.held_out_question, "phrasing")):
                rows.append(
                    {
                        "domain": f"{domain}, {fact.kind}",
                        "question": question,
                        "keys": [fact.answer],
                        "reference": fact.answer,
                        "new": f"{new} sum".strip() if domain == "arithmetic" else new,
                    }
                )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exam", type=Path, help="the file to write")
    parser.add_argument("--wordnet", type=Path, default=sources.WORDNET)
    parser.add_argument("--per-domain", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    rows = draw(args.wordnet, args.per_domain, args.seed)
    args.exam.write_text(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
