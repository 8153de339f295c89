"""How far one next-token distribution is from another. Pure; float64 throughout, in nats.

Logits come as float32 of shape (n_vocab,). Everything goes through log-probabilities, so that no
probability is ever made from a difference of large numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import TuiworkError

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


class TokenScore(NamedTuple):
    """One position of a text under a setting, beside the reference at the same position."""

    nll: float
    """Negative log-likelihood of the text's own next token, in nats."""
    kl: float
    """KL(reference || setting) over the whole vocabulary, in nats."""
    same_top: bool
    """Whether both find the same token likeliest."""


def log_probabilities(logits: Logits) -> Floats:
    """log softmax(logits): x - max - log(sum(exp(x - max))), shape (n_vocab,).

    A logit of minus infinity is a token that cannot come. Raises TuiworkError where the logits are
    no distribution: NaN, plus infinity, or nothing possible.
    """
    wide = logits.astype(np.float64)
    top = wide.max(initial=-np.inf)
    if not np.isfinite(top):
        raise TuiworkError("the model's logits are no numbers, so nothing can be compared")
    shifted = wide - top
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def kl_divergence(reference: Floats, other: Floats) -> float:
    """KL(p || q) = sum p (log p - log q) from two arrays of log-probabilities, in nats.

    Exactly 0 for equal arrays. Infinite where `other` rules out what the reference allows.
    """
    possible = reference > -np.inf
    p = np.exp(reference[possible])
    total = float((p * (reference[possible] - other[possible])).sum())
    # Gibbs: never negative. Two nearly equal distributions sum to minus some 1e-17 by rounding.
    return max(0.0, total)


def score(reference: Logits, logits: Logits, target: int) -> TokenScore:
    """One position: how likely the text's own token is, and how far from the reference.

    Raises TuiworkError as `log_probabilities`.
    """
    ours = log_probabilities(logits)
    kl = kl_divergence(log_probabilities(reference), ours)
    return TokenScore(-float(ours[target]), kl, bool(reference.argmax() == logits.argmax()))
