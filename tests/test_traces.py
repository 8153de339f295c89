"""The trace formats: what is written is read back, and what is wrong is named with its line."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.replay import replay
from engine.traces import (
    DECODE,
    IO_COLUMNS,
    IoTraceWriter,
    RouteTrace,
    RouteTraceWriter,
    TraceModel,
    read_io_trace,
    read_route_trace,
)
from tests.route_samples import (
    EXCERPT,
    HEADER,
    SHARED,
    Sample,
    decode_rows,
    needs_shared,
    samples,
    trace_text,
    write_samples,
)

MODEL = TraceModel("m.gguf", "arch", 2, 8, 2, {0: 100, 1: 100})


def read_text(text: str, folder: Path) -> RouteTrace:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    return read_route_trace(path)


def refusal(text: str, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_text(text, folder)
    return str(caught.value).removeprefix(str(folder / "t.csv"))


@given(samples())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(run: tuple[TraceModel, list[Sample]]) -> None:
    model, calls = run
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_samples(path, model, calls)
        trace = read_route_trace(path)
    assert dataclasses.replace(trace.model, name="") == dataclasses.replace(model, name="")
    for name in ("expert", "residency", "expert_bytes", "dropped", "substituted"):
        expected = np.concatenate([getattr(call, name).ravel() for call in calls])
        np.testing.assert_array_equal(getattr(trace, name), expected)
    assert trace.weight is not None
    weight = np.concatenate([call.weight.ravel() for call in calls])
    np.testing.assert_array_equal(trace.weight.astype(np.float32), weight)
    sizes = [call.expert.size for call in calls]
    np.testing.assert_array_equal(trace.call, np.repeat(np.arange(len(calls)), sizes))
    np.testing.assert_array_equal(trace.layer, np.repeat([c.layer for c in calls], sizes))
    np.testing.assert_array_equal(trace.turn, np.repeat([c.turn for c in calls], sizes))
    steps = [np.repeat(call.steps, model.n_expert_used) for call in calls]
    np.testing.assert_array_equal(trace.step, np.concatenate(steps))


def test_our_file_is_the_format_to_the_letter(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    model = dataclasses.replace(MODEL, name="/my models/a,b.gguf", dense_bytes={0: 5})
    writer = RouteTraceWriter(path, model)
    buffer = np.array([3, 1])
    writer.add(
        0,
        DECODE,
        9,
        1,
        expert=buffer,
        weight=np.array([0.1, np.nan], dtype=np.float32),
        residency=np.array([False, True]),
        expert_bytes=np.array([100, 0]),
    )
    buffer[:] = 0
    writer.close()
    assert path.read_text() == (
        "# route_trace v1\n"
        "# model=/my_models/a_b.gguf arch=arch n_layer=2 n_expert=8 n_expert_used=2\n"
        "# layer=0 expert_bytes=100 dense_bytes=5\n"
        "# layer=1 expert_bytes=100\n"
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped,substituted\n"
        "0,1,9,1,0,3,0.100000001,0,100,0,-1\n"
        "0,1,9,1,1,1,nan,1,0,0,-1\n"
    )


def test_each_turn_is_on_disk_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    writer = RouteTraceWriter(path, MODEL)
    for turn in range(2):
        for step in range(3):
            one = np.array([step])
            writer.add(turn, DECODE, step, 0, expert=one, weight=None, residency=one * 0,
                       expert_bytes=one)  # fmt: skip
            writer.end_step()
        writer.end_turn()
        assert len(read_route_trace(path)) == 3 * (turn + 1)
    writer.close()


def test_a_long_turn_does_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    writer = RouteTraceWriter(path, MODEL)
    many = np.zeros((40_000, 2), dtype=np.int64)
    many[:, 1] = 1
    writer.add(0, 0, np.arange(40_000), 0, expert=many, weight=None, residency=many * 0,
               expert_bytes=many)  # fmt: skip
    empty = many[:0]
    writer.add(0, 0, np.arange(0), 1, expert=empty, weight=None, residency=empty,
               expert_bytes=empty)  # fmt: skip
    writer.end_step()
    assert len(read_route_trace(path)) == 80_000
    writer.close()


def test_a_trace_cannot_be_written_into_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "t.csv", Path("a\0b")):
        with pytest.raises(InputError, match="cannot write a trace there"):
            RouteTraceWriter(path, MODEL)


def test_an_undecodable_name_is_written_escaped(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    writer = RouteTraceWriter(path, dataclasses.replace(MODEL, name="a\udcff"))
    writer.close()
    assert "model=a\\udcff " in path.read_text()


def test_adding_a_layer_is_cheap(tmp_path: Path) -> None:
    writer = RouteTraceWriter(tmp_path / "t.csv", MODEL)
    experts = np.arange(8)
    weights = np.full(8, 0.125, dtype=np.float32)
    started = time.perf_counter()
    for step in range(1000):
        writer.add(0, DECODE, step, 0, expert=experts, weight=weights, residency=experts,
                   expert_bytes=experts)  # fmt: skip
    # 12 µs on the machine it was written on; 2 % of a 75 ms token is 30 µs for each of 48 layers.
    assert (time.perf_counter() - started) / 1000 < 100e-6
    writer.close()


def test_another_engines_trace_is_read() -> None:
    trace = read_route_trace(EXCERPT)
    assert (trace.model.arch, trace.model.n_layer, trace.model.n_expert_used) == ("qwen3moe", 48, 6)
    assert trace.model.expert_bytes == {0: 3059712, 6: 2654208, 46: 3059712, 47: 3059712}
    assert trace.model.dense_bytes[6] == 11682816
    assert trace.dropped is None and trace.substituted is None
    assert len(trace) == 1278
    assert trace.line(0) == 8
    # Four prefill calls, then four for each of 32 tokens.
    assert trace.call[-1] + 1 == 4 + 32 * 4


def test_columns_go_by_name_and_may_be_missing(tmp_path: Path) -> None:
    header = "note,expert,slot,layer,step,phase,turn"
    text = trace_text(["x,3,0,0,5,1,0", "é,4,1,0,5,1,0"], header=header)
    trace = read_text(text, tmp_path)
    assert trace.expert.tolist() == [3, 4]
    assert trace.slot.tolist() == [0, 1]
    assert trace.extra["note"].tolist() == ["x", "é"]
    missing = (trace.weight, trace.residency, trace.expert_bytes, trace.dropped, trace.substituted)
    assert missing == (None,) * 5


def test_unknown_preamble_keys_are_kept(tmp_path: Path) -> None:
    shape = "# model=/a b/c.gguf arch=x n_layer=2 n_expert=8 n_expert_used=2 quant=Q4_K"
    text = trace_text(decode_rows([[0, 1]]), shape=shape).replace("v1\n", "v1\n# host=box 7\n")
    model = read_text(text, tmp_path).model
    assert model.name == "/a b/c.gguf"
    assert model.extra == {"host": "box 7", "quant": "Q4_K"}


def test_windows_line_ends_and_its_nan_are_read(tmp_path: Path) -> None:
    rows = decode_rows([[0, 1]], weights=("-nan(ind)", "0.5"))
    path = tmp_path / "t.csv"
    path.write_bytes(trace_text(rows).replace("\n", "\r\n").encode())
    weight = read_route_trace(path).weight
    assert weight is not None
    np.testing.assert_array_equal(weight, [np.nan, 0.5])


THERE = ", line {}: turn 0, phase {}, step {}, layer 0, slot 0 "
GOOD = decode_rows([[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["0,1,0,0,0,9,0.5,0,0,0"], ", line 6: expert is '9'; allowed is a whole number from 0"),
        (["0,1,0,0,0,-1,0.5,0,0,0"], ", line 6: expert is '-1'"),
        (["0,1,0,0,0,1.5,0.5,0,0,0"], ", line 6: expert is '1.5'"),
        (["0,1,0,0,0,nan,0.5,0,0,0"], ", line 6: expert is 'nan'"),
        (["0,1,0,0,0,,0.5,0,0,0"], ", line 6: expert is '', not a number"),
        ([*GOOD, "0,1,3,0,0,x,0.5,0,0,0"], ", line 12: expert is 'x', not a number"),
        (["0,2,0,0,0,1,0.5,0,0,0"], ", line 6: phase is '2'"),
        (["0,1,0,2,0,1,0.5,0,0,0"], ", line 6: layer is '2'; allowed is"),
        (["0,1,0,0,0,1,0.5,3,0,0"], ", line 6: residency is '3'"),
        (["0,1,0,0,0,1,-0.5,0,0,0"], ", line 6: weight is '-0.5'"),
        (["0,1,0,0,0,1,inf,0,0,0"], ", line 6: weight is 'inf'"),
        (["0,1,0,0,0,1,0.5,0,100,1"], ", line 6: the routing was dropped, yet 100 bytes were read"),
        (["0,1,0,0,0,1,0.5,0,0"], ", line 6: 9 values in a table of 10 columns"),
        (["0,1,0,0,0,1,0.5,0,0,0", ""], ", line 7: 1 values in a table of 10 columns"),
        ([*GOOD, GOOD[2]], THERE.format(12, 1, 1) + "was already in line 8"),
        ([GOOD[2], GOOD[3], GOOD[0], GOOD[1]], THERE.format(8, 1, 0) + "is out of order"),
        ([GOOD[1], GOOD[0]], THERE.format(7, 1, 0) + "is out of order"),
        ([GOOD[1]], ", line 6: slot is 1 where 0 is due: a row before it is missing"),
        ([*GOOD, "0,0,7,0,0,1,0.5,0,0,0"], THERE.format(12, 0, 7) + "is out of order"),
        (["1,1,0,0,0,1,0.5,0,0,0", "0,1,1,0,0,1,0.5,0,0,0"], ", line 7: turn 0"),
        (GOOD[:5], ", line 10: the last routing has 1 rows, every other one 2"),
    ],
)
def test_bad_rows_are_named(rows: list[str], expected: str, tmp_path: Path) -> None:
    assert refusal(trace_text(rows), tmp_path).startswith(expected)


def test_prefill_goes_by_batch_layer_step_and_slot(tmp_path: Path) -> None:
    def row(step: int, layer: int) -> str:
        return f"0,0,{step},{layer},0,1,0.5,0,0,0"

    first = [row(0, 0), row(1, 0), row(0, 1), row(1, 1)]
    second = [row(2, 0), row(3, 0), row(3, 1)]
    trace = read_text(trace_text(first + second), tmp_path)
    assert trace.call.tolist() == [0, 0, 1, 1, 2, 2, 3]
    swapped = [row(0, 0), row(0, 1), row(1, 0), row(1, 1), row(0, 1)]
    assert ", line 10: turn 0, phase 0, step 0, layer 1" in refusal(trace_text(swapped), tmp_path)
    back = [*first, row(1, 0)]
    assert refusal(trace_text(back), tmp_path).endswith("was already in line 7")


def test_a_layer_without_a_size_is_named(tmp_path: Path) -> None:
    layers = ("# layer=0 expert_bytes=1048576", "# layer=1 dense_bytes=1")
    rows = [*decode_rows([[0, 1]]), *decode_rows([[0, 1]], layer=1)]
    message = refusal(trace_text(rows, layers=layers), tmp_path)
    assert message.startswith(", line 8: layer 1 is used, but the preamble does not say")
    zero = ("# layer=0 expert_bytes=0", "# layer=1 expert_bytes=5")
    assert ", line 3: expert_bytes=0" in refusal(trace_text(rows, layers=zero), tmp_path)
    twice = ("# layer=0 expert_bytes=7", "# layer=0 expert_bytes=5")
    assert "line 4: layer 0 was described in line 3" in refusal(
        trace_text(rows, layers=twice), tmp_path
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ", line 1: the file is empty"),
        (HEADER + "\n", ", line 1: the preamble is missing"),
        ("# route_trace v2\n", ", line 1: this is route_trace 'v2'; readable is v1"),
        ("# route_trace v1\n# n_layer=1\n", ", line 3: the header with the columns' names"),
        (trace_text([]), ", line 6: there are no rows under the header"),
        (trace_text(GOOD)[:-1], ", line 11: the last line does not end"),
        (trace_text(GOOD)[:-9], ", line 11: the last line does not end"),
        (trace_text(["1,2"], header="turn,phase"), ", line 5: the header lacks the columns step,"),
        (trace_text(["1,2"], header="turn,turn"), ", line 5: the column 'turn' is there twice"),
        (trace_text(GOOD, shape="# n_layer=2 n_expert=8"), ": the preamble does not say n_expert"),
        (trace_text(GOOD, shape="# n_layer=x n_expert=8 n_expert_used=2"), ", line 2: n_layer=x;"),
        (
            trace_text(GOOD, shape="# n_layer=2 n_expert=8 n_expert_used=9"),
            ", line 2: n_expert_used",
        ),
        (trace_text(GOOD).replace("0.7", "0\r7"), ", line 6: there is a control character"),
    ],
)
def test_bad_files_are_named(text: str, expected: str, tmp_path: Path) -> None:
    assert refusal(text, tmp_path).startswith(expected)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.csv", Path("a\0b")):
        with pytest.raises(InputError, match="cannot be read"):
            read_route_trace(path)
    path = tmp_path / "t.csv"
    path.write_bytes(trace_text(GOOD).encode() + b"0,1,3,\xff\n")
    with pytest.raises(InputError, match="line 12: this is not text in UTF-8"):
        read_route_trace(path)


SEED_TEXT = "".join(EXCERPT.read_text().splitlines(keepends=True)[:40]).encode()


@given(st.integers(0, len(SEED_TEXT) - 1), st.binary(max_size=2), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_a_corrupted_byte_is_refused_or_read(place: int, new: bytes, gone: int) -> None:
    data = SEED_TEXT[:place] + new + SEED_TEXT[place + gone :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_bytes(data)
        try:
            trace = read_route_trace(path)
        except InputError as error:
            assert str(path) in str(error)
            return
        assert len(trace) > 0
        replay(trace, budgets=[10])


def test_the_io_trace_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "io.csv"
    writer = IoTraceWriter(path, MODEL)
    writer.add(
        0,
        DECODE,
        5,
        1,
        expert=3,
        projection="blk.1,ffn_down_exps.weight",
        lane=2,
        speculative=True,
        offset=1 << 40,
        bytes_wanted=100,
        bytes_read=4096,
        latency_us=812,
    )
    writer.close()
    assert path.read_text().startswith("# io_trace v1\n# model=m.gguf arch=arch n_layer=2 ")
    columns = read_io_trace(path)
    assert tuple(columns) == IO_COLUMNS
    assert [columns[name].tolist()[0] for name in IO_COLUMNS] == [
        *(0, 1, 5, 1, 3, "blk.1_ffn_down_exps.weight", 2, 1, 1 << 40, 100, 4096, 812)
    ]
    with pytest.raises(InputError, match="the file must begin with '# route_trace v1'"):
        read_route_trace(path)


def test_a_bad_io_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "io.csv"
    path.write_text("# io_trace v1\nexpert,lane,extra\n3,1,a\n-3,1,b\n")
    with pytest.raises(InputError, match="line 4: expert is '-3'"):
        read_io_trace(path)
    path.write_text("# io_trace v1\nfoo\n3\n")
    with pytest.raises(InputError, match="line 2: no known column"):
        read_io_trace(path)


@needs_shared
def test_a_large_trace_loads_fast() -> None:
    started = time.process_time()
    trace = read_route_trace(SHARED)
    assert time.process_time() - started < 0.3
    assert len(trace) == 44766
    assert trace.call[-1] + 1 == 48 + 128 * 48
