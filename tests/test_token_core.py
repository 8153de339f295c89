"""Compiled code against Python: the same decisions, the same bytes, whoever goes on."""

from __future__ import annotations

import ctypes
import mmap
import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native_library, residency
from engine.compiled import CompiledLoading
from engine.counters import ABSENT, RESIDENT, GuessCounters, RoutingCounters
from engine.errors import ReadError, TuiworkError
from engine.experts import slice_pages
from engine.ggml import libc
from engine.graph import GraphPlan, RoutedLayer
from engine.guessing import GUESSED_SHARE, MOST_UNDER_WAY, Guess, Guesser
from engine.lanes import Lanes
from engine.loading import ExpertLoader
from engine.mapping import ShardMapping, page_ceil
from engine.native_library import library
from engine.residency import ExpertCache
from engine.router_matrix import RouterMatrix, RouterPlan, likeliest
from engine.session import Session
from engine.token_core import TokenCore, TokenSettings
from tests import gate
from tests.test_lossless import READING
from tests.test_residency import N_EXPERT, layers_of

TinyModel = Callable[..., Path]
ROOT = Path(__file__).parent.parent
N_LAYER, WIDTH, TOP_K = 3, 32, 4
N_SURE = int(np.ceil(GUESSED_SHARE * TOP_K))

pytestmark = pytest.mark.skipif(
    native_library.library is None, reason=f"no compiled core: {native_library.reason}"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's bytes, all different."""
    path = tmp_path_factory.mktemp("core") / "model"
    _, end = layers_of(N_LAYER)
    path.write_bytes(np.random.default_rng(0).integers(1, 255, end, np.uint8).tobytes())
    return path


def routers(bias: bool, selection_bias: bool, activation: str) -> list[RouterMatrix | None]:
    """One for each layer."""
    rng = np.random.default_rng(1)

    def numbers(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    parts = RouterPlan((0,), "w", activation=activation)
    return [
        RouterMatrix(
            parts,
            numbers(N_EXPERT, WIDTH),
            numbers(N_EXPERT) if bias else None,
            numbers(N_EXPERT) if selection_bias else None,
        )
        for _ in range(N_LAYER)
    ]


class Arm:
    """A cache over memory of its own, and both ways of loading into it."""

    def __init__(self, path: Path, budget: int, guesser: Guesser, lanes: int, moves: bool) -> None:
        self.layers, end = layers_of(N_LAYER)
        self.content = path.read_bytes()
        # Not closed: views of it may outlive a failed assertion. It goes with its last reference.
        self.memory = mmap.mmap(-1, page_ceil(end), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.mapping = ShardMapping.at(path, address, 0, page_ceil(end), end)
        self.guesser = guesser
        self.cache = ExpertCache(self.layers, [self.mapping], budget, moves_pages=moves)
        self.lanes = Lanes([self.mapping], lanes, o_direct=False)
        plan = GraphPlan([_routed(layer) for layer in self.layers], [], [], 0)
        self.guesses = GuessCounters(N_LAYER)
        self.loader = ExpertLoader(plan, self.cache, self.lanes, self.guesses)
        self.core = TokenCore(
            self.cache, self.lanes, self.guesses, RoutingCounters(N_LAYER), guesser
        )

    def switch(self) -> None:
        """Whoever loads, the other does from here on."""
        if self.loader.core is None:
            self.loader.hand_over(self.core)
        else:
            self.loader.settle()

    def begin(self, wanted: TokenSettings) -> None:
        """A token comes."""
        self.cache.clock += 1
        self.loader.overlap, self.loader.ahead.steady = wanted.overlap, wanted.steady
        self.core.prepare(wanted)

    def load(
        self, index: int, experts: Sequence[int], seen: np.ndarray, wanted: TokenSettings
    ) -> None:
        """One layer of a token, and that its bytes are there where they are used."""
        guesses = wanted.prefetch and index + 1 < N_LAYER
        if self.loader.core is not None:
            assert library.core_inconsistency(self.core.pointer) == 0
            address = seen.ctypes.data if guesses else 0
            self.core.load(index, experts, address, None)
            assert library.core_inconsistency(self.core.pointer) == 0
        else:
            guess = self._guess(index + 1, seen, wanted) if guesses else None
            self.loader.load(index, experts, guess, 0)
        for place, bank in enumerate(self.layers[index].banks):
            self.loader.experts_asked(index, place)
            for expert in experts:
                first, last = slice_pages(bank, expert)
                last = min(last, len(self.content))
                assert self.mapping.view[first:last] == self.content[first:last]

    def _guess(self, index: int, seen: np.ndarray, wanted: TokenSettings) -> Guess:
        router = self.guesser.routers[index]
        assert router is not None
        scores = router.scores_of_one(seen.ctypes.data)
        named = likeliest(scores, TOP_K)
        if wanted.least_share:
            named = named[: router.n_above(wanted.least_share, scores[0, named])]
        return Guess(index, lambda: named[:N_SURE], MOST_UNDER_WAY, True)

    def state(self) -> dict[str, Any]:
        """All that decides what comes."""
        cache, counters = self.cache, self.cache.counters
        self.loader.end_decode()
        return {
            "resident": bytes(cache._retention.resident),
            "bytes": cache.resident_bytes,
            "counts": (cache.hits, cache.misses, cache.evictions),
            "hits": counters.hits.tolist(),
            "misses": counters.misses.tolist(),
            "last used": counters.last_used.tolist(),
            "guesses": [
                getattr(self.guesses, name).tolist()
                for name in ("named", "routed", "right", "read", "used")
            ],
        }

    def pages(self) -> bytes:
        """Which pages have memory, once nothing is under way."""
        self.loader.settle()
        n_bytes = len(self.memory)
        flags = (ctypes.c_ubyte * (n_bytes // mmap.PAGESIZE))()
        assert (
            libc.mincore(ctypes.c_void_p(self.mapping.base), ctypes.c_size_t(n_bytes), flags) == 0
        )
        return bytes(flag & 1 for flag in flags)

    def close(self) -> None:
        """Stop everything."""
        self.loader.settle()
        self.core.close()
        self.lanes.close()


def _routed(layer: Any) -> RoutedLayer:
    names = [bank.name for bank in layer.banks]
    number = layer.number
    return RoutedLayer(number, f"topk-{number}", names, names)


@contextmanager
def arms(path: Path, *arguments: Any) -> Iterator[tuple[Arm, Arm]]:
    """Two of them."""
    pair = Arm(path, *arguments), Arm(path, *arguments)
    try:
        yield pair
    finally:
        for arm in pair:
            arm.close()


tokens = st.lists(
    st.tuples(
        st.lists(
            st.lists(st.integers(0, N_EXPERT - 1), min_size=1, max_size=TOP_K),
            min_size=N_LAYER,
            max_size=N_LAYER,
        ),
        st.integers(0, 7),
        st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


@given(
    tokens=tokens,
    budget=st.integers(60_000, 260_000),
    reading=st.tuples(st.booleans(), st.booleans(), st.sampled_from([0.0, 0.2])),
    router=st.sampled_from(
        [
            (False, False, ""),
            (True, False, "SOFT_MAX"),
            (True, True, "SOFT_MAX"),
            (False, True, "UNARY"),
        ]
    ),
    pages=st.tuples(st.booleans(), st.booleans()),
    lanes=st.integers(1, 4),
    delay=st.sampled_from([0, 0, 0, 1000]),
)
@settings(max_examples=150, deadline=None)
def test_it_decides_as_python_does(
    file: Path,
    tokens: list[tuple[list[list[int]], int, bool]],
    budget: int,
    reading: tuple[bool, bool, float],
    router: tuple[bool, bool, str],
    pages: tuple[bool, bool],
    lanes: int,
    delay: int,
) -> None:
    """One arm is Python's throughout; in the other, both take turns. What is guessed is read
    whatever the disk does, so that both can be compared."""
    overlap, prefetch, least_share = reading
    wanted = TokenSettings(overlap, prefetch and lanes > 1, True, TOP_K, least_share)
    guesser = Guesser(routers(*router))
    inputs = np.random.default_rng(2).normal(size=(8, WIDTH)).astype(np.float32)
    moves, keeps = pages
    with (
        mock.patch.object(residency, "_EDGES_OF_BUDGET", 0.1 if keeps else 1e9),
        mock.patch.object(TokenCore, "most_delay_us", delay),
        arms(file, budget, guesser, lanes, moves) as (python, other),
    ):
        other.switch()
        for routings, place, switches in tokens:
            if switches:
                python.loader.settle()
                other.switch()
            for arm in (python, other):
                arm.begin(wanted)
                for index, experts in enumerate(routings):
                    arm.load(index, experts, inputs[place], wanted)
            assert other.state() == python.state()
        assert other.lanes.counters.reads.sum() > 0
        assert other.pages() == python.pages()


@given(
    tokens=tokens,
    budget=st.integers(60_000, 260_000),
    pages=st.tuples(st.booleans(), st.booleans()),
    lanes=st.integers(2, 5),
    delay=st.sampled_from([0, 300, 3000]),
    steady=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_it_stays_consistent_however_slow_reads_are(
    file: Path,
    tokens: list[tuple[list[list[int]], int, bool]],
    budget: int,
    pages: tuple[bool, bool],
    lanes: int,
    delay: int,
    steady: bool,
) -> None:
    """Whatever comes when: what is used is there, nothing under way leaves, and nothing is lost."""
    wanted = TokenSettings(True, True, steady, TOP_K, 0.0)
    inputs = np.random.default_rng(2).normal(size=(8, WIDTH)).astype(np.float32)
    moves, keeps = pages
    with (
        mock.patch.object(residency, "_EDGES_OF_BUDGET", 0.1 if keeps else 1e9),
        mock.patch.object(TokenCore, "most_delay_us", delay),
        arms(file, budget, Guesser(routers(False, False, "")), lanes, moves) as (arm, _),
    ):
        arm.switch()
        for routings, place, _ in tokens:
            arm.begin(wanted)
            for index, experts in enumerate(routings):
                arm.load(index, experts, inputs[place], wanted)
        arm.loader.settle()
        resident = arm.cache.counters.state
        assert set(np.unique(resident)) <= {ABSENT, RESIDENT}
        weighed = sum(
            int(states.sum()) * layer.entry_bytes
            for states, layer in zip(resident, arm.layers, strict=True)
        )
        assert arm.cache.resident_bytes == weighed
        assert not arm.cache._retention.held


class BrokenDisk:
    """Lets every descriptor of a file refuse to be read, and read again."""

    def __init__(self, path: Path) -> None:
        found = []
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                found += [int(link.name)] if link.readlink() == path.resolve() else []
        self._saved = {fd: os.dup(fd) for fd in found}
        self._unreadable = os.open(os.devnull, os.O_WRONLY)

    def set(self, *, broken: bool) -> None:
        for fd, saved in self._saved.items():
            os.dup2(self._unreadable if broken else saved, fd)

    def close(self) -> None:
        self.set(broken=False)
        for fd in (self._unreadable, *self._saved.values()):
            os.close(fd)


def session_compiled(session: Session) -> CompiledLoading:
    """Who loads this session's tokens, if compiled code does."""
    router = session._opened.router
    assert router is not None
    return router.compiled


def after(n_tokens: int, do: Callable[[], None]) -> Callable[[int], None]:
    """What to do at an answer's n-th token."""
    left = [n_tokens]

    def on_token(_token: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            do()

    return on_token


@pytest.mark.parametrize("reading", READING)
def test_a_disk_that_fails_fails_the_answer_alone(reading: str, tiny_model: TinyModel) -> None:
    """By name of what could not be read; the next answer is right."""
    expected = gate.run(tiny_model("tiny"), gate.RESIDENT, gate.PROMPTS[:1])
    settings = gate.EVICTING | READING[reading]
    with gate.open_session(tiny_model("tiny"), settings, poison=True) as session:
        session.generate(gate.PROMPTS[0], n_predict=3)
        with closing(BrokenDisk(tiny_model("tiny"))) as disk:
            for _ in range(3):
                session.clear()
                before = session_compiled(session).n_decodes
                with pytest.raises(ReadError, match=r"reading layer \d+, expert \d+, .* \[EBADF\]"):
                    session.generate(
                        gate.PROMPTS[0],
                        n_predict=200,
                        on_token=after(10, lambda: disk.set(broken=True)),
                    )
                assert session_compiled(session).n_decodes >= before + 9
                disk.set(broken=False)
                session.clear()
                answer = session.generate(gate.PROMPTS[0], n_predict=gate.N_TOKENS)
                assert answer.tokens == expected.tokens[0]


def test_reads_that_fail_now_and_then_are_never_taken_for_experts(tiny_model: TinyModel) -> None:
    """An answer is right as far as it goes, or it fails."""
    expected = gate.run(tiny_model("tiny"), gate.RESIDENT, gate.PROMPTS[:1]).logits[0]
    settings = gate.EVICTING | READING["both"]
    rng, over, failed, compared = np.random.default_rng(3), Event(), 0, 0
    with gate.open_session(tiny_model("tiny"), settings, poison=True) as session:
        session.generate(gate.PROMPTS[0], n_predict=3)
        disk = BrokenDisk(tiny_model("tiny"))

        def disturb() -> None:
            while not over.wait(rng.uniform(0, 0.2)):
                disk.set(broken=True)
                over.wait(rng.uniform(0, 0.0003))
                disk.set(broken=False)

        disturber = Thread(target=disturb)
        disturber.start()
        try:
            for _ in range(60):
                session.clear()
                logits: list[np.ndarray] = []

                def keep(_token: int, logits: list[np.ndarray] = logits) -> None:
                    assert session.last_logits is not None
                    logits.append(session.last_logits.copy())

                try:
                    session.generate(gate.PROMPTS[0], n_predict=60, on_token=keep)
                except ReadError:
                    failed += 1
                for ours, theirs in zip(logits, expected, strict=False):
                    assert np.array_equal(ours, theirs)
                    compared += 1
        finally:
            over.set()
            disturber.join()
            disk.close()
    assert failed > 3 and compared > 60


def test_memory_that_may_not_be_moved(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back and taken anew, one read at a time."""
    monkeypatch.setattr(TokenCore, "refuses_moves", True)
    settings = gate.EVICTING | READING["both"]
    streamed = gate.run(tiny_model("tiny-mixed"), settings, poison=True)
    gate.assert_same(streamed, gate.run(tiny_model("tiny-mixed"), gate.RESIDENT))
    assert streamed.counts["compiled"] > gate.N_TOKENS and streamed.counts["moved"] > gate.N_TOKENS


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    compile_core = runpy.run_path(str(ROOT / "scripts" / "compile_core.py"))["compile_core"]
    target = tmp_path / "core.so"
    with mock.patch.dict(os.environ, CC="cc -Wextra -Werror"):
        assert compile_core(ROOT / "engine" / "native", target) == ""
    assert target.exists() and list(tmp_path.iterdir()) == [target]
    with mock.patch.dict(os.environ, CC="no-such-compiler"):
        assert "no-such-compiler" in compile_core(ROOT / "engine" / "native", target)


def test_without_further_lanes_python_goes_on(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gate.run(tiny_model("tiny"), gate.RESIDENT, gate.PROMPTS[:1], n_tokens=9)
    with gate.open_session(tiny_model("tiny"), gate.EVICTING, poison=True) as session:

        def refuse(_self: TokenCore) -> None:
            raise TuiworkError("the system refused a thread")

        with monkeypatch.context() as patch:
            patch.setattr(TokenCore, "_start_lanes", refuse)
            answer = session.generate(gate.PROMPTS[0], n_predict=9)
        assert answer.tokens == expected.tokens[0]
        assert session_compiled(session).n_decodes == 0
        session.generate(gate.PROMPTS[0], n_predict=9)
        assert session_compiled(session).n_decodes == 0
        assert str(session.notes).count("loaded in Python") == 1
        session.set_live({"stream.io-threads": session.resolved.stream.io_threads - 1})
        session.generate(gate.PROMPTS[0], n_predict=9)
        assert session_compiled(session).n_decodes > 0
