"""What panels show, by value: rates, latencies, the heatmap's cells, bars, charts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from engine.counters import ABSENT, LATENCY_BUCKETS, MAX_LANES, READING, RESIDENT
from engine.messages import EngineDied, LiveChanged, PromptProgress, Resized
from tests.frozen_engine import FrozenEngine, token_row
from tuiwork.meters import heat
from tuiwork.meters.counters import LaneMeter, LaneSample, latency_ms, rates_between
from tuiwork.meters.glyphs import ASCII, UNICODE, bar, figure, nice_top, significant, spark
from tuiwork.meters.heat import DISCARDED, LEVELS, NOTHING, READ_NOW, Grid, Mode, codes, pairs
from tuiwork.meters.meters import Doing, Meters
from tuiwork.meters.ring import Ring
from tuiwork.meters.tokens import PARTS, TokenHistory, parts_ms, shares, stacked, token_ms
from tuiwork.panels.map_line import MapLine, Run

RANDOM = np.random.default_rng(2)


def lane_sample(at_s: float, reads: int = 0, read_bytes: int = 0, busy_ns: int = 0) -> LaneSample:
    def lanes(value: int) -> np.ndarray:
        counts = np.zeros(MAX_LANES, np.int64)
        counts[0] = value
        return counts

    latencies = np.zeros((MAX_LANES, LATENCY_BUCKETS), np.int64)
    return LaneSample(at_s, lanes(read_bytes), lanes(reads), lanes(busy_ns), latencies)


class TestRing:
    @given(st.lists(st.floats(allow_nan=False), max_size=60), st.integers(1, 7))
    def test_holds_the_latest_values_in_order(self, values: list[float], capacity: int) -> None:
        ring = Ring(capacity)
        for value in values:
            ring.push(value)
        assert ring.latest().tolist() == values[-capacity:]
        assert ring.latest(2).tolist() == values[-capacity:][-2:]

    def test_forgets(self) -> None:
        ring = Ring(3)
        ring.push(1)
        ring.clear()
        assert len(ring) == 0
        assert ring.latest().tolist() == []


class TestLanes:
    def test_rates_are_differences_over_time(self) -> None:
        before = lane_sample(10.0, reads=4, read_bytes=1000, busy_ns=0)
        after = lane_sample(10.5, reads=14, read_bytes=6000, busy_ns=250_000_000)
        rates = rates_between(before, after)
        assert rates is not None
        assert rates.bytes_per_s[0] == 10_000
        assert rates.reads_per_s[0] == 20
        assert rates.in_flight[0] == pytest.approx(0.5)

    @pytest.mark.parametrize("after", [lane_sample(10.0, reads=9), lane_sample(11.0, reads=1)])
    def test_no_rate_without_time_or_after_a_restart(self, after: LaneSample) -> None:
        assert rates_between(lane_sample(10.0, reads=4), after) is None

    def test_a_restarted_engine_begins_a_new_history(self) -> None:
        meter = LaneMeter()
        for tick in range(20):
            meter.push(lane_sample(tick / 10, reads=tick * 5, read_bytes=tick * 500))
        assert meter.rates is not None
        assert meter.rates.total_bytes_per_s == pytest.approx(5000)
        assert meter.best_bytes_per_s == pytest.approx(5000)
        meter.push(lane_sample(2.0, reads=0))
        assert meter.rates is None
        assert len(meter.total_history) == 0

    def test_nothing_read_is_no_lane(self) -> None:
        meter = LaneMeter()
        meter.push(lane_sample(0))
        meter.push(lane_sample(1))
        assert meter.n_lanes == 0

    @given(st.lists(st.integers(0, 10_000_000), min_size=1, max_size=200), st.floats(0.01, 0.99))
    @settings(max_examples=60)
    def test_a_quantile_is_right_to_a_factor_of_two(
        self, took_us: list[int], quantile: float
    ) -> None:
        counts = np.zeros(LATENCY_BUCKETS, np.int64)
        for took in took_us:
            counts[took.bit_length()] += 1
        exact = sorted(took_us)[max(0, math.ceil(quantile * len(took_us) - 1e-9) - 1)] / 1000
        found = latency_ms(counts, quantile)
        assert found <= 2 * exact + 0.001
        assert found >= exact / 2 - 0.001

    def test_no_latency_is_unmeasured(self) -> None:
        assert math.isnan(latency_ms(np.zeros(LATENCY_BUCKETS, np.int64), 0.5))


class TestGrid:
    @given(
        st.integers(1, 96),
        st.integers(1, 512),
        st.integers(1, 200),
        st.integers(1, 60),
        st.booleans(),
    )
    def test_fits_and_finds_every_expert(
        self, n_layer: int, n_expert: int, width: int, height: int, halves: bool
    ) -> None:
        grid = Grid.fit(n_layer, n_expert, width, height, halves=halves)
        assert grid.width <= width
        assert grid.n_lines <= height
        row, column = grid.cell(n_layer - 1, n_expert - 1)
        assert (row, column) == (grid.n_rows - 1, grid.n_columns - 1)
        assert grid.at(0, 0) == (0, 0)
        assert grid.at(grid.width, 0) is None or grid.n_columns * grid.cell_width > grid.width
        assert grid.layers_of_line(grid.n_lines - 1)[1] == n_layer - 1

    def test_two_layers_share_a_line_where_that_makes_them_fit(self) -> None:
        grid = Grid.fit(48, 128, 128, 24, halves=True)
        assert (grid.layers_per_row, grid.experts_per_cell, grid.n_lines) == (1, 1, 24)

    def test_experts_share_a_cell_where_the_screen_is_narrow(self) -> None:
        grid = Grid.fit(40, 256, 74, 17, halves=True)
        assert (grid.experts_per_cell, grid.n_columns) == (4, 64)
        assert grid.n_lines <= 17

    def test_a_small_model_takes_the_room_it_gets(self) -> None:
        grid = Grid.fit(4, 8, 64, 12, halves=True)
        assert (grid.cell_width, grid.cell_height, grid.halves) == (4, 2, False)
        assert grid.at(5, 3) == (1, 1)


class TestHeat:
    def cells(self, grid: Grid, mode: Mode = Mode.RECENCY, **changes: np.ndarray) -> heat.Codes:
        shape = (grid.n_layer, grid.n_expert)
        zero = np.zeros(shape, np.int64)
        counters = {
            "state": zero, "hits": zero, "misses": zero, "last_used": zero, "last_discarded": zero,
        } | changes  # fmt: skip
        bright = heat.strengths(
            mode,
            counters["state"],
            counters["hits"],
            counters["misses"],
            counters["last_used"],
            clock=100,
        )
        return codes(grid, bright, counters["state"], counters["last_discarded"], 100)

    def test_absent_is_nothing_and_used_now_is_brightest(self) -> None:
        grid = Grid.fit(2, 3, 3, 2, halves=False)
        state = np.array([[ABSENT, RESIDENT, RESIDENT], [READING, ABSENT, ABSENT]])
        used = np.array([[99, 100, 1], [0, 0, 0]])
        discarded = np.array([[0, 0, 0], [0, 100, 50]])
        shown = self.cells(grid, state=state, last_used=used, last_discarded=discarded)
        assert shown[0, 0] == NOTHING
        assert shown[0, 1] == LEVELS
        assert 1 <= shown[0, 2] < LEVELS
        assert shown[1].tolist() == [READ_NOW, DISCARDED, NOTHING]

    def test_a_counter_ahead_of_the_clock_is_used_now(self) -> None:
        grid = Grid.fit(1, 1, 1, 1, halves=False)
        shown = self.cells(grid, state=np.array([[RESIDENT]]), last_used=np.array([[101]]))
        assert shown[0, 0] == LEVELS

    def test_popularity_shows_absent_experts_too(self) -> None:
        grid = Grid.fit(1, 2, 2, 1, halves=False)
        hits = np.array([[900, 0]])
        shown = self.cells(grid, Mode.POPULARITY, state=np.array([[ABSENT, RESIDENT]]), hits=hits)
        assert shown.tolist() == [[LEVELS, NOTHING]]

    def test_a_bin_is_as_bright_as_its_experts_on_average(self) -> None:
        grid = Grid.fit(1, 4, 2, 1, halves=False)
        state = np.array([[RESIDENT, RESIDENT, RESIDENT, ABSENT]])
        shown = self.cells(grid, state=state, last_used=np.full((1, 4), 100))
        assert shown.tolist() == [[LEVELS, LEVELS // 2]]

    def test_pairs_hold_both_halves(self) -> None:
        grid = Grid.fit(3, 2, 2, 2, halves=True)
        shown = np.array([[1, 2], [3, 4], [5, 6]], np.uint8)
        assert pairs(grid, shown, 100).tolist() == [[103, 204], [500, 600]]

    @given(st.integers(1, 50), st.integers(1, 130), st.integers(1, 140), st.integers(1, 30))
    @settings(max_examples=60)
    def test_every_grid_has_a_code_for_every_cell(
        self, n_layer: int, n_expert: int, width: int, height: int
    ) -> None:
        grid = Grid.fit(n_layer, n_expert, width, height, halves=True)
        state = RANDOM.integers(0, 3, (n_layer, n_expert))
        shown = self.cells(grid, state=state)
        assert shown.shape == (grid.n_rows, grid.n_columns)
        assert pairs(grid, shown, 20).shape == (grid.n_lines, grid.n_columns)
        assert (shown[state.any()] <= DISCARDED).all()


class TestTokens:
    def test_numbers_rows_from_the_opening_on(self) -> None:
        history = TokenHistory()
        history.extend(token_row(step, RANDOM) for step in range(1, 31))
        assert history.n_rows == 30
        assert [row.step for row in history.between(10, 13, most=99)] == [11, 12, 13]
        assert [row.step for row in history.between(0, None, most=2)] == [29, 30]
        assert history.between(30, None, most=5) == []

    def test_speeds_are_of_this_turn(self) -> None:
        row = token_row(1, RANDOM)
        slow = replace(row, wall_ms=1000.0, loop_overhead_ms=0.0, turn=0)
        fast = replace(row, wall_ms=100.0, compute_ms=50.0, loop_overhead_ms=0.0, turn=1)
        history = TokenHistory()
        history.extend([slow] * 5 + [fast] * 5)
        speeds = history.speeds()
        assert speeds.turn == pytest.approx(10)
        assert speeds.now == pytest.approx(10)
        assert speeds.without_reads == pytest.approx(20)

    def test_no_token_is_unmeasured(self) -> None:
        assert math.isnan(TokenHistory().speeds().now)
        assert all(math.isnan(share) for share in shares([]))

    def test_unmeasured_parts_take_no_room(self) -> None:
        row = replace(token_row(1, RANDOM), stall_ms=-1.0, loop_overhead_ms=-1.0)
        assert parts_ms(row)[1] == 0
        assert token_ms(row) == row.wall_ms

    def test_bars_stack_from_the_bottom(self) -> None:
        row = replace(
            token_row(1, RANDOM), compute_ms=50.0, stall_ms=30.0, mgmt_ms=10.0, loop_overhead_ms=10
        )
        column = stacked([row], 10, 100.0)[:, 0].tolist()
        assert column == [3, 2, 1, 1, 1, 0, 0, 0, 0, 0]

    @given(st.integers(1, 30), st.floats(1, 1e4))
    def test_a_token_always_shows_and_never_overflows(self, height: int, top_ms: float) -> None:
        rows = [token_row(step, RANDOM) for step in range(5)]
        filled = stacked(rows, height, top_ms)
        assert filled.shape == (height, 5)
        assert (filled[-1] >= 0).all()
        assert filled.max() < len(PARTS)


class TestGlyphs:
    @given(st.floats(-1, 2) | st.just(float("nan")), st.integers(0, 40))
    def test_a_bar_has_its_width(self, share: float, width: int) -> None:
        assert len(bar(share, width)) == width
        assert len(bar(share, width, ASCII)) == width

    def test_bars(self) -> None:
        assert bar(0.5, 4) == "██  "
        assert bar(1.0, 4) == "████"
        assert bar(0.125, 1) == "▏"
        assert bar(0.5, 4, ASCII) == "##  "

    def test_small_is_not_nothing(self) -> None:
        assert spark([0, 0.001, 5, 10, math.nan], 6, 10) == "  ▁▄█ "

    @given(st.floats(1e-6, 1e9))
    def test_an_axis_ends_above_its_value_but_not_by_much(self, value: float) -> None:
        assert value <= nice_top(value) * (1 + 1e-6) <= 1.7 * value * (1 + 1e-6)

    def test_unmeasured_is_never_zero(self) -> None:
        for value in (None, math.nan, -1.0):
            assert figure(value) == "–"
            assert significant(value, ASCII) == "-"
        assert significant(0.0) == "0.00"
        assert [significant(value) for value in (4.567, 45.67, 456.7)] == ["4.57", "45.7", "457"]

    def test_ascii_is_ascii(self) -> None:
        text = "".join(str(value) for value in vars(ASCII).values())
        assert text.isascii()
        assert len(UNICODE.fills) == len(ASCII.fills) == len(PARTS)


class TestMapLine:
    def line(self) -> tuple[MapLine, Console]:
        console = Console(color_system="truecolor", force_terminal=True)
        styles = [Style(color="#ffffff", bgcolor=f"#0000{n:02x}") for n in range(4)]
        runs = [Run(Segment("▀" * (n + 1), style), console) for n, style in enumerate(styles)]
        edge = Strip([Segment("|", Style(color="#808080"))])
        return MapLine(edge, runs, edge, 12), console

    def test_what_is_sent_shows_the_same_cells_in_the_same_colours(self) -> None:
        line, console = self.line()
        plain = Strip(list(line))
        sent = [AnsiDecoder().decode_line(strip.render(console)) for strip in (line, plain)]
        cells = [
            [(char, text.get_style_at_offset(console, x)) for x, char in enumerate(text.plain)]
            for text in sent
        ]
        assert cells[0] == cells[1]
        assert line.text == "|▀▀▀▀▀▀▀▀▀▀|"

    def test_under_a_dialog_it_is_cut_like_any_strip(self) -> None:
        line, console = self.line()
        left, right = line.divide([3, 12])
        assert (left.text, right.text) == ("|▀▀", "▀▀▀▀▀▀▀▀|")
        assert AnsiDecoder().decode_line(left.render(console)).plain == "|▀▀"


class TestMeters:
    def opened(self) -> tuple[Meters, FrozenEngine]:
        from engine.config import RunConfig

        meters = Meters()
        engine = FrozenEngine(meters.take, n_layer=4, n_expert=8, top_k=2)
        engine.open(RunConfig().replace({"routing.drop-cold-experts": 0.5}))
        meters.attach(engine.live)
        return meters, engine

    def test_the_budget_is_known_before_the_first_token(self) -> None:
        meters, engine = self.opened()
        assert meters.totals is not None and meters.totals.budget_bytes == 0
        assert meters.budget_bytes() == 4000 << 20
        engine.step()
        meters.tick(1.0)
        assert meters.budget_bytes() == 4000 << 20

    def test_events_tell_what_the_engine_does(self) -> None:
        meters, engine = self.opened()
        said = [meters.doing]
        meters.take(PromptProgress(1, "reading the prompt", 0.4))
        said.append(meters.doing)
        assert meters.fraction == 0.4
        engine.tokens(3)
        said.append(meters.doing)
        assert said == [Doing.READY, Doing.PROMPT, Doing.ANSWERING]
        assert meters.tokens.n_rows == 3
        engine.answer("done")
        assert (meters.doing, meters.context_used) == (Doing.READY, 1204)
        meters.take(EngineDied(None, "SIGKILL"))
        assert meters.doing is Doing.DEAD
        assert "memory" in meters.trouble

    def test_drops_are_counted_from_the_latest_change(self) -> None:
        meters, engine = self.opened()
        engine.step(drop=1.0)
        meters.tick(0.1)
        before = meters.routing()
        assert before is not None and before.routed.sum() == 8
        engine.set_live({"routing.drop-cold-experts": 0.75})
        after = meters.routing()
        assert after is not None and after.routed.sum() == 0
        assert math.isnan(after.mass_share())
        assert meters.threshold() == pytest.approx(0.375)

    def test_an_expert_in_detail(self) -> None:
        meters, engine = self.opened()
        assert engine.live is not None
        engine.live["hits"][2, 3], engine.live["misses"][2, 5] = 3, 1
        engine.live["last_used"][2, 3] = 7
        engine.live["totals"][0] = 9
        meters.tick(0.1)
        detail = meters.expert(2, 3)
        assert detail is not None
        assert (detail.hits, detail.tokens_ago, detail.routing_share) == (3, 2, 0.75)
        never = meters.expert(0, 0)
        assert never is not None and never.tokens_ago is None
        assert math.isnan(never.routing_share)

    def test_a_cache_that_the_engine_resized_is_shown_and_is_no_change(self) -> None:
        meters, _ = self.opened()
        assert meters.config is not None
        resolved = meters.config.replace({"stream.cache-mb": 1234})
        meters.take(Resized(resolved, ("the automatic cache shrank",)))
        assert meters.config.stream.cache_mb == 1234
        assert meters.opened is not None
        assert meters.opened.notes == ("the automatic cache shrank",)
        assert meters.changes.last is None

    def test_changes_are_placed_among_the_tokens(self) -> None:
        meters, engine = self.opened()
        engine.tokens(5)
        engine.set_live({"sampling.temp": 0.5})
        assert meters.changes.last is not None
        assert meters.changes.last.at_row == 5
        assert meters.config is not None and meters.config.sampling.temp == 0.5
        assert meters.opened is not None
        change = LiveChanged(9, {"sampling.temp": 0.0}, {"sampling.temp": 0.5},
                             meters.opened.resolved, 30)  # fmt: skip
        meters.take(change)
        assert len(meters.changes.changes) == 2
