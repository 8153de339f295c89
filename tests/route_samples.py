"""Route traces for tests: the stored excerpt, the shared trace, and random ones."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.replay_cache import Call, Workload
from engine.traces import (
    DECODE,
    PREFILL,
    RouteTrace,
    RouteTraceWriter,
    TraceModel,
    read_route_trace,
)

EXCERPT = Path(__file__).parent / "data" / "qwen3-30b-a3b-excerpt.route.csv"

SHARED = Path(__file__).parents[2] / "shared" / "data" / "traces" / "qwen3-30b-a3b.route.csv"

needs_shared = pytest.mark.skipif(
    not SHARED.exists(), reason="needs ../shared/data/traces/qwen3-30b-a3b.route.csv"
)

HEADER = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"


def trace_text(
    rows: list[str],
    *,
    header: str = HEADER,
    shape: str = "# model=m arch=a n_layer=2 n_expert=8 n_expert_used=2",
    layers: tuple[str, ...] = ("# layer=0 expert_bytes=1048576", "# layer=1 expert_bytes=1048576"),
) -> str:
    """A trace's text from its rows."""
    return "\n".join(["# route_trace v1", shape, *layers, header, *rows, ""])


def decode_rows(
    steps: list[list[int]], weights: tuple[str, ...] = ("0.7", "0.3"), layer: int = 0
) -> list[str]:
    """Rows of a one-turn decode in one layer, all missed: the experts of each step in order."""
    return [
        f"0,1,{step},{layer},{slot},{expert},{weights[slot]},0,1048576,0"
        for step, experts in enumerate(steps)
        for slot, expert in enumerate(experts)
    ]


@dataclass(frozen=True)
class Sample:
    """One `add` of a writer."""

    turn: int
    phase: int
    steps: tuple[int, ...]
    layer: int
    expert: np.ndarray
    weight: np.ndarray
    residency: np.ndarray
    expert_bytes: np.ndarray
    dropped: np.ndarray
    substituted: np.ndarray


@st.composite
def samples(draw: st.DrawFn) -> tuple[TraceModel, list[Sample]]:
    """A model and the load calls of a run with it, in the engine's order."""
    n_layer = draw(st.integers(1, 3))
    n_expert = draw(st.integers(2, 6))
    top_k = draw(st.integers(1, min(3, n_expert)))
    sizes = {n: draw(st.integers(1, 1 << 40)) for n in range(n_layer)}
    name = draw(st.text(max_size=12))
    model = TraceModel(name, "arch", n_layer, n_expert, top_k, sizes, dict.fromkeys(sizes, 7))
    dice = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    found = []
    for turn in range(draw(st.integers(1, 3))):
        step = draw(st.integers(0, 5))
        # A model with one MoE layer has no visible border between two prefill batches.
        batches = draw(st.lists(st.integers(1, 4), max_size=2 if n_layer > 1 else 1))
        decoded = draw(st.integers(0 if batches else 1, 4))
        spans = [(PREFILL, size) for size in batches] + [(DECODE, 1)] * decoded
        for phase, count in spans:
            steps = tuple(range(step, step + count))
            step += count
            for layer in range(n_layer):
                found.append(_sample(dice, model, turn, phase, steps, layer))
    return model, found


def _sample(
    dice: np.random.Generator,
    model: TraceModel,
    turn: int,
    phase: int,
    steps: tuple[int, ...],
    layer: int,
) -> Sample:
    shape = (len(steps), model.n_expert_used)
    expert = np.stack(
        [dice.permutation(model.n_expert)[: model.n_expert_used] for _ in steps]
    ).astype(np.int32)
    dropped = dice.integers(0, 2, shape)
    weight = dice.random(shape, dtype=np.float32)
    weight[dice.random(shape) < 0.02] = np.nan
    return Sample(
        turn,
        phase,
        steps,
        layer,
        expert,
        weight,
        dice.integers(0, 3, shape),
        np.where(dropped, 0, model.expert_bytes[layer]),
        dropped,
        dice.integers(-1, model.n_expert, shape),
    )


def write_samples(path: Path, model: TraceModel, calls: list[Sample]) -> None:
    """Write the calls as the engine would: a turn at a time."""
    writer = RouteTraceWriter(path, model)
    for call in calls:
        writer.add(
            call.turn,
            call.phase,
            np.array(call.steps) if call.phase == PREFILL else call.steps[0],
            call.layer,
            expert=call.expert,
            weight=call.weight,
            residency=call.residency,
            expert_bytes=call.expert_bytes,
            dropped=call.dropped,
            substituted=call.substituted,
        )
        writer.end_step()
    writer.close()


def trace_of(rows: list[str], **parts: Any) -> RouteTrace:
    """The trace that `trace_text` makes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_text(trace_text(rows, **parts))
        return read_route_trace(path)


def sampled(run: tuple[TraceModel, list[Sample]]) -> RouteTrace:
    """The trace of a random run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_samples(path, *run)
        return read_route_trace(path)


@st.composite
def workloads(draw: st.DrawFn, *, equal_sizes: bool = True) -> Workload:
    """Load calls of up to three layers, some of them a prompt's."""
    n_layer, n_expert = draw(st.integers(1, 3)), 6
    size = (st.just(1) if equal_sizes else st.integers(1, 3)).map(lambda n: n << 20)
    sizes = [draw(size) for _ in range(n_layer)]
    widest = draw(st.integers(1, 3))
    calls = []
    for n in range(draw(st.integers(1, 40))):
        layer = n % n_layer
        experts = draw(
            st.lists(st.integers(0, n_expert - 1), min_size=1, max_size=widest, unique=True)
        )
        keys = tuple(layer * n_expert + expert for expert in experts)
        calls.append(Call(n >= n_layer, keys, n >= n_layer and layer == n_layer - 1))
    used = {key for call in calls for key in call.keys}
    return Workload(tuple(calls), n_expert, n_layer, {key: sizes[key // n_expert] for key in used})
