"""Everything the demo model learns from, as token ids in one file. `python -m engine.demo.corpus`.

Documents lie in groups; training draws a group by its share, then a document of it. A document is
a list of pieces, each with the weight its tokens have in the loss.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from engine.demo import arithmetic, questions, sources, tokenizer, words
from engine.demo.questions import Fact
from engine.demo.texts import all_texts

Piece = tuple[str, int]
"""Text and its weight in the loss, in tenths."""

QUESTION_WEIGHT, ANSWER_WEIGHT, TEXT_WEIGHT = 1, 10, 5
HELD_OUT_CHARACTERS = 8000
SHARES = {
    "talk": 1.0,
    "capital": 5.0,
    "capital of": 3.0,
    "continent": 2.0,
    "currency": 3.0,
    "neighbours": 4.0,
    "domain": 1.5,
    "phone": 1.5,
    "city": 3.0,
    "symbol": 2.5,
    "of symbol": 2.0,
    "number": 2.5,
    "of number": 2.0,
    "kind of element": 1.5,
    "year": 2.0,
    "origin": 1.5,
    "place": 1.0,
    "sums": 16.0,
    "times": 5.0,
    "define": 12.0,
    "opposite": 4.0,
    "kind of thing": 3.0,
    "does": 6.0,
    "module": 2.0,
    "where": 3.0,
    "text geography": 3.0,
    "text chemistry": 2.0,
    "text arithmetic": 14.0,
    "text dictionary": 6.0,
    "text python": 8.0,
    "text prose": 6.0,
}
"""Share of the training tokens per group, relative to each other."""
_RENAMED = {("chemistry", "kind"): "kind of element", ("dictionary", "kind"): "kind of thing"}


def group_of(fact: Fact) -> str:
    """The group that a fact's questions are in."""
    return _RENAMED.get((fact.domain, fact.kind), fact.kind)


def chat(question: str, answer: str) -> list[Piece]:
    """One exchange as the chat template writes it."""
    start = f"{tokenizer.TURN}user\n{question}{tokenizer.TURN_END}\n{tokenizer.TURN}assistant\n"
    return [(start, QUESTION_WEIGHT), (f"{answer}{tokenizer.TURN_END}", ANSWER_WEIGHT), ("\n", 0)]


_WRAPPERS = (
    "Please: {}",
    "Please tell me: {}",
    "Can you tell me: {}",
    "Could you say {}",
    "I want to know {}",
    "Question: {}",
    "Hello, {}",
    "Hey, {}",
    "{} Please.",
    "{} Thanks!",
    "Say, {}",
    "I would like to ask you: {}",
    "Can you help me? {}",
    "Can you answer this for me? {}",
)


def variants(question: str, rng: random.Random) -> list[str]:
    """The question as it is, as people type in a hurry, and as polite people do."""
    hurried = question.rstrip("?.!")
    wrapped = [wrapper.format(question) for wrapper in rng.sample(_WRAPPERS, 2)]
    return [question, question, hurried, hurried.lower(), question.lower(), *wrapped]


def documents(facts: Iterable[Fact], rng: random.Random) -> dict[str, list[list[Piece]]]:
    """The questions of all facts, by group, each a document of its own or with a follow-up."""
    groups: dict[str, list[list[Piece]]] = defaultdict(list)
    by_kind = defaultdict(list)
    for fact in facts:
        by_kind[group_of(fact)].append(fact)
    for group, known in by_kind.items():
        for fact in known:
            asked = [v for q in fact.questions() for v in variants(q, rng)]
            if group == "sums":
                asked = rng.sample(asked, 12)
            groups[group] += [chat(question, fact.answer) for question in asked]
            if fact.domain in ("geography", "chemistry"):
                for question in rng.sample(asked, 2):
                    other = rng.choice(known)
                    more = rng.choice(variants(other.follow_up.format(other.asked), rng)[:5])
                    groups[group].append(chat(question, fact.answer) + chat(more, other.answer))
    return groups


def all_facts(wordnet: Path) -> list[Fact]:
    """Everything that training asks."""
    return [
        *words.small_talk(),
        *questions.geography(),
        *questions.chemistry(),
        *arithmetic.facts(held_out=False),
        *words.dictionary(sources.senses(wordnet)),
        *questions.python(),
    ]


def some_of(texts: list[str], rng: random.Random) -> list[str]:
    """Texts of about HELD_OUT_CHARACTERS in all, drawn from all of them."""
    drawn, size = [], 0
    for text in rng.sample(texts, len(texts)):
        if size < HELD_OUT_CHARACTERS:
            drawn.append(text)
            size += len(text)
    return drawn


def build(folder: Path, wordnet: Path, verses: Path, n_vocab: int, seed: int) -> None:
    """Write tokenizer.json, corpus.npz and held-out.json into the folder.

    A tokenizer that is there already is kept, so that a model can train on with it.
    """
    rng = random.Random(seed)
    facts = all_facts(wordnet)
    groups = dict(documents(facts, rng))
    answers = {fact.answer.partition(": ")[2] for fact in facts if fact.kind == "define"}
    held_out = {}
    for texts in all_texts(wordnet, verses, seed):
        groups[f"text {texts.domain}"] = [[(text, TEXT_WEIGHT)] for text in texts.seen]
        # A meaning that a question asks for is not unseen.
        unseen = [
            t for t in texts.held_out if t.partition(": ")[2].partition(' "')[0] not in answers
        ]
        held_out[texts.domain] = some_of(unseen, random.Random(seed))
    # The vocabulary is made for the mixture that is read, not for what happens to be long.
    sample = []
    for group, docs in groups.items():
        chosen = rng.choices(docs, k=int(250 * SHARES[group]))
        sample += [text for doc in chosen for text, _ in doc]
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "tokenizer.json"
    made = (
        tokenizer.load(saved)
        if saved.exists()
        else tokenizer.train(
            (
                text.replace(tokenizer.TURN, "\n").replace(tokenizer.TURN_END, "\n")
                for text in sample
            ),
            n_vocab,
        )
    )
    made.save(str(saved))
    (folder / "held-out.json").write_text(json.dumps(held_out, ensure_ascii=False, indent=0))
    arrays: dict[str, np.ndarray] = {}
    for group, docs in groups.items():
        pieces = [piece for doc in docs for piece in doc]
        ids = list(tokenizer.encode_all(made, [text for text, _ in pieces]))
        lengths = [len(i) for i in ids]
        per_doc, at = [], 0
        for doc in docs:
            per_doc.append(sum(lengths[at : at + len(doc)]))
            at += len(doc)
        arrays[f"{group}/ids"] = np.concatenate([np.array(i, np.uint16) for i in ids])
        weights = np.array([weight for _, weight in pieces], np.uint8)
        arrays[f"{group}/weights"] = np.repeat(weights, lengths)
        arrays[f"{group}/bounds"] = np.concatenate(([0], np.cumsum(per_doc))).astype(np.int64)
        print(f"{group:18} {len(docs):7} documents {sum(per_doc):9} tokens", flush=True)
    np.savez(folder / "corpus.npz", **arrays)  # type: ignore[arg-type]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the corpus goes")
    parser.add_argument("--wordnet", type=Path, default=sources.WORDNET, help="WordNet's files")
    parser.add_argument("--verses", type=Path, required=True, help="output of `bible -f`")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    build(args.folder, args.wordnet, args.verses, args.vocabulary, args.seed)


if __name__ == "__main__":
    main()
