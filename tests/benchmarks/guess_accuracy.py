"""How well the next layer's experts are guessed, layer by layer.

`python -m tests.benchmarks.guess_accuracy [MODEL] [--tokens N]`, the demo model by default: a
synthetic model's random router says nothing about real ones.

Accuracy is the share of decoded tokens' routed experts that were named, each way naming as many as
a token routes to: the next layer's router on this layer's input (what prefetch uses); the experts
of the token before; the layer's most used experts so far; and as a control the layer's router on
its own input, which must always be right.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from engine.config import RunConfig
from engine.demo import DEMO_MODEL
from engine.guessing import Guess
from engine.lane_jobs import Read
from engine.marks import Role
from engine.routing import ExpertRouter
from engine.session import Session
from tests.benchmarks.bounds_report import table

WAYS = ("next layer's router", "token before", "most used so far", "control")
PROMPTS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "What is 12 plus 7?",
    "Write a Python function that adds two numbers.",
)


class Watch:
    """Compares guesses with what comes, at every routing of a decoded token."""

    def __init__(self, router: ExpertRouter) -> None:
        self.right: dict[int, Counter[str]] = defaultdict(Counter)
        self.routed: Counter[int] = Counter()
        self.by_rank: Counter[int] = Counter()
        self._router = router
        self._named: dict[int, list[int]] = {}
        self._before: dict[int, list[int]] = {}
        self._used: dict[int, Counter[int]] = defaultdict(Counter)
        self._load = router.loader.load
        router.loader.load = self._look  # type: ignore[method-assign]

    def _look(
        self, index: int, experts: Sequence[int], guess: Guess | None, started: int
    ) -> list[Read]:
        if not self._router.prefill:
            self._compare(index, list(experts))
        return self._load(index, experts, None, started)

    def _compare(self, index: int, routed: list[int]) -> None:
        guesser, top_k = self._router.guesser, self._router.top_k
        assert guesser is not None
        routing = self._router._addresses[Role.ROUTING, index]
        named = self._named.pop(index, None)
        if named is not None and index in self._before:
            popular = [expert for expert, _ in self._used[index].most_common(top_k)]
            control = guesser.same_layer(index, routing, top_k)
            ways = zip(WAYS, (named, self._before[index], popular, control), strict=True)
            for way, guess in ways:
                self.right[index][way] += len(set(guess) & set(routed))
            self.routed[index] += len(routed)
            self.by_rank.update(rank for rank, expert in enumerate(named) if expert in routed)
        self._before[index] = routed
        self._used[index].update(routed)
        following = guesser.ranked_next(index, routing, top_k)
        if following is not None:
            self._named[index + 1] = following

    def report(self) -> None:
        """Print a line for each layer, and one for all."""
        rows = [["layer", *WAYS, "experts"]]
        for index in sorted(self.routed):
            rows.append(self._row(str(index), self.right[index], self.routed[index]))
        everything: Counter[str] = sum(self.right.values(), Counter())
        rows.append(self._row("all", everything, self.routed.total()))
        for line in table(rows):
            print(line)
        top_k = self._router.top_k
        each = self.routed.total() / top_k
        ranks = ", ".join(f"{100 * self.by_rank[rank] / each:.0f}" for rank in range(top_k))
        print(f"% right by place in the guess, the likeliest first: {ranks}")

    def _row(self, name: str, right: Counter[str], routed: int) -> list[str]:
        return [name, *(f"{100 * right[way] / routed:.1f} %" for way in WAYS), str(routed)]


def main() -> None:
    """Answer some prompts and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    arguments = parser.parse_args()
    settings = {
        "model.path": str(arguments.model),
        "run.ignore-eos": True,
        "stream.prefetch": "on",
    }
    with Session.open(RunConfig().replace(settings)) as session:
        router = session._opened.router
        assert router is not None
        if router.guesser is None:
            raise SystemExit("this model's experts cannot be guessed: " + "; ".join(session.notes))
        watch = Watch(router)
        for prompt in PROMPTS:
            session.clear()
            session.generate([{"role": "user", "content": prompt}], n_predict=arguments.tokens)
        watch.report()


if __name__ == "__main__":
    main()
