"""The least that a model must beat: a guess by how frequent each token is in training.

`python -m engine.demo.unigram --help`. Needs the corpus and `tokenizers`, but not PyTorch.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.demo import tokenizer
from engine.demo.corpus import SHARES
from engine.demo.held_out import HELD_OUT, TOKENS, enough, held_out_texts

Chances = npt.NDArray[np.float64]


def chances(corpus: Path, groups: dict[str, float]) -> Chances:
    """Each token's chance in this mixture of groups; each token counts one time more."""
    n_vocab = tokenizer.load(corpus / "tokenizer.json").get_vocab_size()
    total = np.zeros(n_vocab)
    with np.load(corpus / "corpus.npz") as arrays:
        n_tokens = sum(len(arrays[f"{name}/ids"]) for name in groups)
        for name, share in groups.items():
            counts = np.bincount(arrays[f"{name}/ids"], minlength=n_vocab)
            total += counts / counts.sum() * share / sum(groups.values()) * n_tokens
    total += 1
    result: Chances = total / total.sum()
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="about so many per domain")
    args = parser.parse_args()
    words = tokenizer.load(args.corpus / "tokenizer.json")
    of_all = chances(args.corpus, SHARES)
    end = words.token_to_id(tokenizer.END)
    print("domain       of all   of the domain")
    for domain, texts in held_out_texts(args.held_out).items():
        of_domain = chances(args.corpus, {f"text {domain}": 1.0})
        documents = ([*ids, end] for ids in tokenizer.encode_all(words, texts))
        ids = [i for document in enough(documents, args.tokens) for i in document[1:]]
        all_nats, own_nats = (-np.log(guess[ids]).mean() for guess in (of_all, of_domain))
        print(f"{domain:12} {math.exp(all_nats):8.1f} {math.exp(own_nats):8.1f}")


if __name__ == "__main__":
    main()
