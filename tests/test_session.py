"""A session's manners: cancel, failures, overflow, stops, reuse, memory, live changes."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ContextFull, GraphChanged, InputError, ModelError, ReadError
from engine.lanes import Lanes
from engine.residency import ExpertCache
from engine.session import Session
from engine.telemetry import MIB, ProcessUse
from tests import gate
from tests.gate import EVICTING, NO_PREFETCH

TinyModel = Callable[..., Path]
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def session(tiny_model: TinyModel) -> Iterator[Session]:
    opened = gate.open_session(tiny_model("tiny"), EVICTING, poison=True)
    yield opened
    opened.close()


def test_cancel_from_another_thread_stops_within_a_token(session: Session) -> None:
    seen: list[float] = []

    def on_token(_token: int) -> None:
        seen.append(time.perf_counter())
        if len(seen) == 5:
            threading.Thread(target=session.cancel).start()
            time.sleep(0.05)

    answer = session.generate(HELLO, n_predict=500, on_token=on_token)
    assert answer.stop_reason == "cancelled"
    assert answer.n_generated <= 6
    again = session.generate(HELLO, n_predict=20)
    assert again.n_generated == 20
    with gate.open_session(Path(session.model_info.path), gate.RESIDENT) as resident:
        assert again.tokens == resident.generate(HELLO, n_predict=20).tokens


def test_cancel_while_the_prompt_is_read(session: Session) -> None:
    def progress(_stage: str, fraction: float) -> None:
        if fraction < 0.5:
            session.cancel()

    answer = session.generate("word " * 300, n_predict=5, progress=progress)
    assert answer.stop_reason == "cancelled"
    assert answer.tokens == []
    assert session.generate(HELLO, n_predict=5).n_generated == 5


def test_a_failed_read_fails_the_answer_and_not_the_session(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model("tiny"), path)
    size = path.stat().st_size
    with gate.open_session(path, EVICTING, poison=True) as session:
        expected = session.generate(HELLO, n_predict=30).tokens
        session.clear()
        os.truncate(path, size // 3)
        with pytest.raises(ReadError) as failure:
            session.generate(HELLO, n_predict=30)
        message = str(failure.value)
        assert str(path) in message and "expert" in message and "ENODATA" in message
        shutil.copyfile(tiny_model("tiny"), path)
        assert session.generate(HELLO, n_predict=30).tokens == expected


def test_a_failure_in_mid_answer_keeps_what_was_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model("tiny"), path)
    heard: list[str] = []
    with gate.open_session(path, EVICTING) as session:

        def on_text(text: str) -> None:
            heard.append(text)
            if len(heard) == 4:
                os.truncate(path, path.stat().st_size // 3)

        with pytest.raises(ReadError):
            session.generate(HELLO, n_predict=100, on_text=on_text)
        assert "".join(heard)
        shutil.copyfile(tiny_model("tiny"), path)
        assert session.generate(HELLO, n_predict=10).n_reused > 0


def test_overflow_is_refused_before_work_with_the_numbers(session: Session) -> None:
    before = gate.counts_of(session)
    with pytest.raises(ContextFull, match=r"the prompt has \d+ tokens .* the context holds 1024"):
        session.generate("word " * 300, n_predict=400)
    with pytest.raises(ContextFull):
        session.generate("word " * 5000, n_predict=1, fit_answer=True)
    assert gate.counts_of(session) == before


def test_an_answer_that_may_shrink_ends_at_the_context(session: Session) -> None:
    answer = session.generate("word " * 330, n_predict=400, fit_answer=True)
    assert answer.stop_reason == "context"
    assert answer.n_prompt + answer.n_generated == 1024


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user", "content": ""}]])
def test_empty_prompts_are_refused(session: Session, prompt: object) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        session.generate(prompt)  # type: ignore[arg-type]


def test_messages_need_a_template(tiny_model: TinyModel) -> None:
    with gate.open_session(tiny_model("tiny", chat_template=False)) as session:
        with pytest.raises(InputError, match="no chat template"):
            session.generate(HELLO)
        assert session.generate("hello", n_predict=3).n_generated == 3


def test_a_stop_text_ends_the_answer_and_is_not_shown(session: Session) -> None:
    whole = session.generate(HELLO, n_predict=40).text
    stop = whole[20:26]
    session.clear()
    session.set_live({"run.stop": [stop]})
    heard: list[str] = []
    answer = session.generate(HELLO, n_predict=40, on_text=heard.append)
    assert answer.stop_reason == "stop"
    assert answer.text == whole[: whole.index(stop)] == "".join(heard)


def test_sampling_is_reproducible_and_depends_on_the_seed(session: Session) -> None:
    def sample(seed: int) -> list[int]:
        session.clear()
        session.set_live({"sampling.temp": 1.5, "sampling.seed": seed, "sampling.top-k": 0})
        return session.generate(HELLO, n_predict=30).tokens

    assert sample(1) == sample(1) != sample(2)


def test_a_prefix_is_not_computed_again(session: Session) -> None:
    first = session.generate(HELLO, n_predict=10)
    messages = [*HELLO, {"role": "assistant", "content": first.text}]
    second = session.generate([*messages, {"role": "user", "content": "more"}], n_predict=10)
    assert first.n_reused == 0
    assert second.n_reused >= first.n_prompt
    assert session.metrics.turns[1].n_prompt == second.n_prompt


@pytest.mark.parametrize(
    "changes",
    [{"model.ctx": 64}, {"stream.dense-weights": "mmap"}],
)
def test_what_needs_reopening_is_refused_live(session: Session, changes: dict[str, object]) -> None:
    before = session.config
    with pytest.raises(InputError):
        session.set_live({"stream.io-threads": 2, **changes})
    assert session.config == before
    assert session.resolved.stream.io_threads == 4


def test_more_experts_than_opened_with_are_refused(session: Session) -> None:
    with pytest.raises(InputError, match="opened with 4 experts"):
        session.set_live({"routing.n-expert-used": 5})


def test_memory_follows_the_budget(tiny_model: TinyModel) -> None:
    """Experts' pages are really given back: this process's own memory tells."""
    shape = "tiny,n-expert=64,expert-ff=768,n-embd=768,n-layer=4"
    settings = {"stream.cache-mb": 2000, "model.ctx": 256}
    with gate.open_session(tiny_model(shape), settings) as session:
        session.generate("many words of all kinds " * 5, n_predict=100)
        store = session._opened.store
        assert isinstance(store, ExpertCache)
        held = store.resident_bytes
        full = ProcessUse.now().rss_anon_mib
        assert held > 60 * MIB
        store.set_budget(held // 4)
        shrunk = ProcessUse.now().rss_anon_mib
        assert full - shrunk == pytest.approx(held * 0.75 / MIB, rel=0.15)
        for _ in range(3):
            session.generate("many other words of all kinds " * 5, n_predict=30)
        grown = ProcessUse.now().rss_anon_mib
        # A budget of a quarter, and the pages that a slice's two ends share with neighbours.
        assert grown - shrunk < 0.15 * held / MIB + 8


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a kernel without large pages"
)
def test_no_large_page_holds_what_the_budget_does_not_count(tiny_model: TinyModel) -> None:
    """Where they are always on, the first byte that is read into 2 MiB would take all of them."""
    with gate.open_session(tiny_model("tiny"), EVICTING) as session:
        opened = session._opened
        banks = [bank for layer in opened.layers for bank in layer.banks]
        base = opened.mappings[0].base
        small = [range_ for range_, flags in _mappings_of_this_process() if "nh" in flags.split()]
        for bank in banks:
            assert any(base + bank.inside_first in range_ for range_ in small)


def _mappings_of_this_process() -> list[tuple[range, str]]:
    """Which addresses each has, and its VmFlags."""
    found, addresses = [], range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            addresses = range(int(match[1], 16), int(match[2], 16))
        elif line.startswith("VmFlags:"):
            found.append((addresses, line))
    return found


@pytest.mark.parametrize("node", [b"ffn_moe_topk-2", b"ffn_moe_weights_norm-2"])
def test_a_changed_graph_is_learned_again_and_the_answer_is_right(
    node: bytes, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """A routing, or a weights node that reading waits for, does not arrive where it was learned."""
    trace = tmp_path / "routes.csv"
    with gate.open_session(tiny_model("tiny"), EVICTING, poison=True, route_trace=trace) as session:
        hook = session._opened.hook
        learned: list[int] = []
        learn = session._opened.learn_graph

        def counted() -> None:
            learned.append(1)
            learn()

        session._opened.learn_graph = counted  # type: ignore[method-assign]

        def on_token(_token: int) -> None:
            # As if an update of llama.cpp renamed a layer's routing between two graphs.
            if len(learned) == 0 and hook._expected:
                hook._marks_by_name[b"elsewhere"] = hook._marks_by_name.pop(node)

        answer = session.generate(HELLO, n_predict=40, on_token=on_token)
    assert learned == [1]
    with gate.open_session(tiny_model("tiny"), gate.RESIDENT) as resident:
        assert answer.tokens == resident.generate(HELLO, n_predict=40).tokens
    rows = [line for line in trace.read_text().splitlines() if line[0].isdigit()]
    keys = [tuple(row.split(",")[:5]) for row in rows]
    assert len(keys) == len(set(keys))


def test_a_changed_graph_that_costs_the_context_is_told(tiny_model: TinyModel) -> None:
    """A recurrent state does not go back: what would follow is no answer to what was asked."""
    with gate.open_session(tiny_model("tiny-hybrid"), EVICTING, poison=True) as session:
        hook = session._opened.hook
        said: list[int] = []

        def on_token(_token: int) -> None:
            said.append(1)
            if len(said) == 20:
                hook._marks_by_name[b"elsewhere"] = hook._marks_by_name.pop(b"ffn_moe_topk-2")

        with pytest.raises(GraphChanged):
            session.generate(HELLO, n_predict=40, on_token=on_token)
        again = session.generate(HELLO, n_predict=40)
    with gate.open_session(tiny_model("tiny-hybrid"), gate.RESIDENT) as resident:
        assert again.tokens == resident.generate(HELLO, n_predict=40).tokens


def test_a_live_change_that_is_refused_changes_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_lanes: Lanes, count: int) -> None:
        raise InputError(f"{count} are too many")

    monkeypatch.setattr(Lanes, "set_count", refuse)
    with pytest.raises(InputError, match="9 are too many"):
        session.set_live({"routing.n-expert-used": 2, "stream.io-threads": 9})
    router = session._opened.router
    assert router is not None and router.live_top_k == 0 == session.config.routing.n_expert_used


def test_what_was_staged_and_never_read_is_read_again(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops a layer between staging and reading: the next answer is right."""
    submit, left = Lanes.submit, [100]

    def sometimes(self: Lanes, *arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not options:
            raise MemoryError
        return submit(self, *arguments, **options)

    monkeypatch.setattr(Lanes, "submit", sometimes)
    settings = EVICTING | NO_PREFETCH | {"stream.cache-mb": 3}
    options = {"poison": True, "interpreted": True}
    with gate.open_session(tiny_model("tiny"), settings, **options) as session:
        for _ in range(8):
            left[0] = 4
            with pytest.raises(MemoryError):
                session.generate(HELLO, n_predict=60)
            answer = session.generate(HELLO, n_predict=60)
    with gate.open_session(tiny_model("tiny"), gate.RESIDENT) as resident:
        resident.generate(HELLO, n_predict=60)
        assert answer.tokens == resident.generate(HELLO, n_predict=60).tokens


def test_a_graph_that_stays_unknown_fails_and_is_not_bet_on_twice(
    tiny_model: TinyModel,
) -> None:
    with gate.open_session(tiny_model("tiny"), EVICTING, poison=True) as session:
        hook = session._opened.hook
        hook._layer_of_experts.clear()
        session._opened.hook.install = lambda router: None  # type: ignore[method-assign]
        hook._forget_graph()
        with pytest.raises(GraphChanged, match="unknown node"):
            session.generate(HELLO, n_predict=5)


def test_what_a_dense_model_is_told(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"dense model .* nothing to stream.*--no-stream"):
        gate.open_session(tiny_model("tiny-dense"))
    with gate.open_session(tiny_model("tiny-dense"), gate.RESIDENT) as session:
        assert session.generate(HELLO, n_predict=5).n_generated == 5


def test_a_cache_below_the_token_demand_is_told(tiny_model: TinyModel) -> None:
    with gate.open_session(tiny_model("tiny"), EVICTING) as session:
        assert any("hits will be few" in note for note in session.notes)


def test_metrics_say_what_happened(tiny_model: TinyModel, tmp_path: Path) -> None:
    with gate.open_session(tiny_model("tiny"), EVICTING | NO_PREFETCH) as session:
        answer = session.generate(HELLO, n_predict=30)
        session.metrics.write_csv(tmp_path / "m.csv")
        router = session._opened.router
        assert router is not None
        rows = session.metrics.rows
    assert [row.step for row in rows] == list(range(1, 30))
    assert all(row.wall_ms > 0 and row.compute_ms > 0 for row in rows)
    assert (
        sum(row.hits + row.misses for row in rows)
        == 29 * 5 * 4
        == sum(row.experts_routed for row in rows)
    )
    assert sum(row.reads for row in rows) == 3 * sum(row.misses for row in rows)
    assert answer.figures["tokens"] == 29
    text = (tmp_path / "m.csv").read_text().splitlines()
    assert text[-1].startswith("# summary tokens=29 ")
    header = next(line for line in text if line.startswith("step,"))
    assert header.startswith(
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms"
    )
    assert np.isfinite([float(cell) for cell in text[-2].split(",")]).all()


def test_an_answer_that_was_begun_is_gone_on_with(session: Session) -> None:
    """The rest of an answer is what the model would have said without a pause."""
    whole = session.generate(HELLO, n_predict=40)
    session.clear()
    first = session.generate(HELLO, n_predict=15)
    begun = [*HELLO, {"role": "assistant", "content": first.text}]
    rest = session.generate(begun, n_predict=25)
    assert first.text + rest.text == whole.text
    assert rest.n_reused >= first.n_prompt
