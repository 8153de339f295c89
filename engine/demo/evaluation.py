"""What the demo model is worth: perplexity by domain, and which experts each domain uses.

Needs llama.cpp but not PyTorch. `python -m engine.demo.evaluation --help`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import RunConfig
from engine.demo import DEMO_MODEL
from engine.demo.held_out import HELD_OUT, TOKENS, enough, held_out_texts
from engine.diagnostics import Diagnostics
from engine.model_file import ModelFile
from engine.session import Session
from engine.traces import RouteTrace, read_route_trace

END = "<|endoftext|>"

_SEEN = {"stream.enabled": True, "stream.cache-mb": 64, "stream.force-cache": True}
"""Routings are seen only where experts are streamed; here all of them stay in memory."""

Loads = npt.NDArray[np.int64]
"""How often each expert was routed: [layers, experts]."""


@dataclass(frozen=True)
class Reading:
    """What reading one domain's held-out text gave."""

    domain: str
    n_tokens: int
    nats: float
    """the sum over the tokens"""
    loads: Loads

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.n_tokens)


def open_session(model: Path, settings: Mapping[str, Any] | None = None, **options: Any) -> Session:
    """A session held in memory, unless the settings say otherwise; one thread."""
    base = {"model.path": str(model), "model.ctx": 1024, "model.threads": 1}
    config = RunConfig().replace({**base, "stream.enabled": False, **(settings or {})})
    return Session.open(config, options=Diagnostics(**options))


def read_domains(
    model: Path, texts: Mapping[str, Sequence[str]], most_tokens: int = TOKENS
) -> list[Reading]:
    """Read each domain's documents, each in an empty context, up to about `most_tokens`.

    A document's first token is not scored: nothing comes before it. Its end is. A model without
    experts has no loads.
    """
    readings = []
    seen = _SEEN if ModelFile.open(model).experts.n_expert else None
    with tempfile.TemporaryDirectory() as folder, open_session(model, seen) as session:
        for domain, documents in texts.items():
            trace = Path(folder) / f"{domain}.csv"
            if session.layers:
                session.trace_routes(trace)
            n_ctx = session.model_info.ctx
            every = (session.tokenize(document + END)[:n_ctx] for document in documents)
            n_tokens, nats = 0, 0.0
            for tokens in enough(every, most_tokens):
                nats += sum(losses(session, tokens))
                n_tokens += len(tokens) - 1
            loads = np.zeros((0, 0), np.int64)
            if session.layers:
                session.trace_routes(None)
                loads = loads_of(read_route_trace(trace))
            readings.append(Reading(domain, n_tokens, nats, loads))
    return readings


def losses(session: Session, tokens: Sequence[int]) -> Iterable[float]:
    """Nats of each token but the first, in an emptied context."""
    for logits, following in zip(session.teacher_force(tokens[:-1]), tokens[1:], strict=True):
        largest = float(logits.max())
        total = float(np.exp(logits.astype(np.float64) - largest).sum())
        yield math.log(total) + largest - float(logits[following])


def loads_of(trace: RouteTrace) -> Loads:
    """How often the trace's experts were routed."""
    loads = np.zeros((trace.model.n_layer, trace.model.n_expert), np.int64)
    np.add.at(loads, (trace.layer, trace.expert), 1)
    return loads


def unevenness(loads: Loads) -> npt.NDArray[np.float64]:
    """The busiest expert's load over the mean, by layer."""
    uneven: npt.NDArray[np.float64] = loads.max(1) / loads.mean(1)
    return uneven


def distance(a: Loads, b: Loads) -> npt.NDArray[np.float64]:
    """How differently two texts are routed, by layer: Jensen-Shannon divergence in bits.

    0: the same experts equally often; 1: no expert in common.
    """
    p, q = (loads / loads.sum(1, keepdims=True) for loads in (a, b))
    middle = (p + q) / 2
    result: npt.NDArray[np.float64] = (_divergence(p, middle) + _divergence(q, middle)) / 2
    return result


def _divergence(p: Any, q: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log2(p / q), 0.0).sum(1)


def report(readings: Sequence[Reading]) -> dict[str, Any]:
    """The figures of the model card."""
    figures: dict[str, Any] = {
        "perplexity": {r.domain: round(r.perplexity, 3) for r in readings},
        "tokens": {r.domain: r.n_tokens for r in readings},
    }
    everything = sum(reading.loads for reading in readings)
    assert isinstance(everything, np.ndarray)
    if not everything.size:
        return figures
    return {
        **figures,
        "busiest over mean": [round(float(value), 2) for value in unevenness(everything)],
        "quietest over mean": [
            round(float(value), 3) for value in everything.min(1) / everything.mean(1)
        ],
        "experts without traffic": int((everything == 0).sum()),
        "distance": {
            f"{a.domain} - {b.domain}": [round(float(d), 3) for d in distance(a.loads, b.loads)]
            for i, a in enumerate(readings)
            for b in readings[i + 1 :]
        },
        "distance of halves": _halves(readings),
    }


def _halves(readings: Sequence[Reading]) -> dict[str, float]:
    """What the distance would be by chance: two samples of the same routing."""
    rng = np.random.default_rng(0)
    result = {}
    for reading in readings:
        shares = reading.loads / reading.loads.sum(1, keepdims=True)
        n = int(reading.loads[0].sum())
        one, other = (np.array([rng.multinomial(n, layer) for layer in shares]) for _ in range(2))
        result[reading.domain] = round(float(distance(one, other).mean()), 4)
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="about so many per domain")
    args = parser.parse_args()
    readings = read_domains(args.model, held_out_texts(args.held_out), args.tokens)
    print(json.dumps(report(readings), indent=1))


if __name__ == "__main__":
    main()
