"""Reading token metrics, the figures of runs, and what makes runs incomparable."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.comparison import Comparison, compare_runs
from engine.errors import InputError
from engine.metrics_reader import TokenMetrics, read_metrics
from engine.run_figures import Run
from engine.steadiness import drift, warm_up
from tests.metrics_samples import OWN, PUBLISHED, metrics_text, shared_runs

STEADY = [100.0, 110.0] * 40


@pytest.fixture
def read(tmp_path: Path) -> ReadText:
    return ReadText(tmp_path)


class ReadText:
    """Reads a metrics file with a given text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = itertools.count()

    def __call__(self, text: str | bytes) -> TokenMetrics:
        path = self._folder / f"{next(self._count)}.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_metrics(path)

    def compared(self, *texts: str, skip: int = 0) -> Comparison:
        return compare_runs([self(text) for text in texts], skip)


def kinds(result: Comparison) -> set[str]:
    return {caveat.kind for caveat in result.caveats}


class TestSharedRuns:
    def test_rates_come_out_to_the_published_digit(self) -> None:
        for path, published in zip(shared_runs(), PUBLISHED.values(), strict=True):
            assert round(Run(read_metrics(path)).rate.tok_s, 3) == published

    def test_every_pair_but_off_against_050_is_separated(self) -> None:
        result = compare_runs([read_metrics(path) for path in shared_runs()])
        assert [(p.a, p.b) for p in result.pairs if not p.separated] == [(0, 1)]
        assert len(result.pairs) == 6

    def test_figures_are_those_of_their_summaries(self) -> None:
        for path in shared_runs():
            metrics = read_metrics(path)
            run, told = Run(metrics), {k: float(v) for k, v in metrics.summary.items()}
            assert len(run) == told["tokens"]
            assert run.read_mib == pytest.approx(told["read_MiB"] / told["tokens"], rel=1e-3)
            assert run.cumulative_hit_pct == pytest.approx(told["cache_hit_pct"], abs=0.06)
            assert run.major_faults == pytest.approx(told["majflt/tok"], abs=0.01)
            spent = run.token_time
            assert spent.wait_ms == pytest.approx(1000 * told["stall_s/tok"], abs=0.6)
            assert spent.mgmt_ms == pytest.approx(1000 * told["mgmt_s/tok"], abs=0.6)
            assert spent.compute_ms == pytest.approx(1000 * told["compute_s/tok"], abs=0.6)
            assert spent.loop_ms is None
            if told["experts_routed"]:
                share = 100 * told["experts_dropped"] / told["experts_routed"]
                assert run.drop_pct == pytest.approx(share)
            else:
                assert run.drop_pct == 0.0  # its setting says that nothing was dropped

    def test_what_makes_them_doubtful_is_named(self) -> None:
        result = compare_runs([read_metrics(path) for path in shared_runs()])
        assert kinds(result) == {"drop_rate", "warm_up", "drift"}
        assert set(result.unchecked) == {"version", "sampling", "tracing"}
        assert result.differences == {"drop_cold_frac": ("0", "0.5", "0.75", "1")}


class TestReading:
    def test_columns_are_found_by_name_and_unknown_ones_kept(self, read: ReadText) -> None:
        text = "# other_engine v3\n# model=a b.gguf threads=4 new=x\nzeta,wall_ms\nq,5\nr,7.5\n"
        metrics = read(text)
        assert metrics.columns["wall_ms"].tolist() == [5, 7.5]
        assert metrics.extra == {"zeta": ["q", "r"]}
        assert metrics.preamble == {"model": "a b.gguf", "threads": "4", "new": "x"}
        assert (metrics.format, metrics.summary) == ("other_engine v3", {})

    def test_a_bare_table_is_enough(self, read: ReadText) -> None:
        assert len(read("wall_ms\n5\n6\n")) == 2

    def test_windows_line_ends_and_a_byte_order_mark_are_read(self, read: ReadText) -> None:
        assert len(read("\ufeffwall_ms,io_ms\r\n5,1\r\n".encode())) == 1

    def test_unmeasured_is_unknown_and_never_zero(self, read: ReadText) -> None:
        run = Run(read(metrics_text([10, 10], io_ms=[-1, -1], mgmt_ms=["", ""], majflt=[0, -1.0])))
        assert run.token_time.wait_ms is run.token_time.mgmt_ms is run.major_faults is None
        assert run.read_mib is run.reads is run.decode_hit_pct is None

    def test_a_value_of_a_models_name_may_hold_anything(self, read: ReadText) -> None:
        text = metrics_text([5], preamble={"path": "/a b=c.gguf", "threads": 4})
        assert read(text).preamble == {"path": "/a b=c.gguf", "threads": "4"}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", ", line 1: the file is empty"),
            ("\n\n", ", line 1: the file is empty"),
            ("# a=1\n", ": has no rows, not even a header"),
            ("wall_ms,io_ms\n", ": there are no rows under the header"),
            ("# x v1\nwall_ms\n# summary tokens=0\n", ": there are no rows under the header"),
            ("io_ms,step\n5,1\n", ", line 1: there is no column wall_ms"),
            ("5,1\n6,2\n", ", line 1: there is no column wall_ms"),
            ("wall_ms,wall_ms\n5,6\n", ", line 1: the column 'wall_ms' is there twice"),
            ("wall_ms,io_ms\n5,1\n6,2.3", ", line 3: the last line does not end"),
            ("wall_ms,io_ms\n5,1\n6\n", ", line 3: 1 values in a table of 2 columns"),
            ("wall_ms,io_ms\n5,1\n6,1,1\n", ", line 3: 3 values in a table of 2 columns"),
            ("wall_ms,io_ms\n5,1\nnan,1\n", ", line 3, wall_ms: 'nan' is no number from 0 on"),
            ("wall_ms,io_ms\n5,NaN\n", ", line 2, io_ms: 'NaN' is no number"),
            ("wall_ms\ninf\n", ", line 2, wall_ms: 'inf' is no number"),
            ("wall_ms\n1e99\n", ", line 2, wall_ms: '1e99' is no number"),
            ("wall_ms\n1_0\n", ", line 2, wall_ms: '1_0' is no number"),
            ("wall_ms\n-2\n", ", line 2, wall_ms: '-2' is no number"),
            ("wall_ms\n5\n0\n", ", line 3, wall_ms: a token's time must be a number above 0"),
            ("wall_ms\n5\n-1\n", ", line 3, wall_ms: a token's time must be a number above 0"),
            ("wall_ms,majflt\n5,many\n", ", line 2, majflt: 'many' is no number"),
            ("wall_ms\n5\nwall_ms\n6\n", ", line 3: a second header"),
            ("wall_ms\n5\n# summary tokens=1\n6\n", ", line 4: a row behind the summary of line 3"),
            ("# route_trace v1\nturn\n1\n", ", line 1: this is a route trace, not token metrics"),
            ("wall_ms\n\x1b[2J\n", ", line 2: there is a control character"),
            (b"wall_ms\n\xff\n", ", line 2: this is not text in UTF-8"),
            (b"GGUF\x03\x00\x00\x00", ": is a model, not token metrics"),
        ],
    )
    def test_what_would_fake_a_figure_is_refused_with_its_place(
        self, read: ReadText, text: str | bytes, message: str
    ) -> None:
        with pytest.raises(InputError) as caught:
            read(text)
        assert f".csv{message}" in str(caught.value)

    def test_no_such_file_is_an_error_for_people(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot be read: No such file"):
            read_metrics(tmp_path / "none.csv")

    def test_a_cut_summary_is_not_used(self, read: ReadText) -> None:
        metrics = read(metrics_text([5, 6]).removesuffix(" n_prompt=9\n") + " n_prom")
        assert metrics.summary == {}
        assert len(metrics) == 2

    @given(st.text(st.sampled_from("wall_ms,io#=-1.5e\n\r \t0sumary"), max_size=120))
    @settings(max_examples=150)
    def test_any_text_is_read_or_refused(
        self, tmp_path_factory: pytest.TempPathFactory, text: str
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "any.csv"
        path.write_bytes(b"wall_ms,io_ms\n" + text.encode())
        try:
            metrics = read_metrics(path)
        except InputError as error:
            assert str(path) in str(error)
        else:
            assert (metrics.columns["wall_ms"] > 0).all()

    @given(st.data())
    @settings(max_examples=60)
    def test_a_file_cut_anywhere_never_gives_a_wrong_value(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        times = data.draw(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=8))
        text = metrics_text([repr(value) for value in times], io_ms=1.5)
        path = tmp_path_factory.getbasetemp() / "cut.csv"
        path.write_text(text[: data.draw(st.integers(0, len(text)))])
        try:
            found = read_metrics(path).columns["wall_ms"].tolist()
        except InputError:
            return
        assert found == times[: len(found)]


class TestFigures:
    def test_a_rate_counts_the_time_between_decodes_where_it_is_known(self, read: ReadText) -> None:
        run = Run(read(metrics_text([80.0] * 20, loop_overhead_ms=20.0)))
        assert run.rate.tok_s == pytest.approx(10)
        assert run.decode_tok_s == pytest.approx(12.5)
        assert run.token_time.loop_ms == pytest.approx(20)

    def test_a_pair_of_which_one_lacks_it_compares_decodes(self, read: ReadText) -> None:
        result = read.compared(
            metrics_text([80.0] * 20, loop_overhead_ms=20.0), metrics_text([80.0] * 20)
        )
        assert result.pairs[0].ratio == pytest.approx(1)
        assert result.pairs[0].decode_only
        assert "loop_overhead" in result.pairs[0].caveats

    def test_waits_are_what_is_left_where_the_file_does_not_say(self, read: ReadText) -> None:
        # Under overlap io_ms sums the lanes' time and is no wait.
        run = Run(read(metrics_text([100.0] * 4, compute_ms=70, mgmt_ms=10, io_ms=300)))
        assert run.token_time.wait_ms == pytest.approx(20)

    def test_hits_are_of_the_counted_tokens_where_they_were_counted(self, read: ReadText) -> None:
        text = metrics_text([5] * 4, hits=[0, 0, 3, 3], misses=[4, 4, 1, 1], cache_hit_pct=40)
        assert Run(read(text)).decode_hit_pct == pytest.approx(37.5)
        assert Run(read(text), skip=2).decode_hit_pct == pytest.approx(75)
        assert Run(read(text)).cumulative_hit_pct == 40

    def test_the_share_of_mass_is_of_all_routings(self, read: ReadText) -> None:
        text = metrics_text([5] * 4, experts_routed=16, experts_dropped=4, mass_discarded=2.0)
        run = Run(read(text))
        assert run.drop_pct == pytest.approx(25)
        assert run.mass_lost_pct == pytest.approx(25)  # 2 of the token's 16 / 2 routings

    def test_skipping_cuts_every_figure(self, read: ReadText) -> None:
        run = Run(read(metrics_text([1000.0, *[10.0] * 30], read_bytes=[2**30, *[2**20] * 30])), 1)
        assert run.rate.tok_s == pytest.approx(100)
        assert run.read_mib == pytest.approx(1)
        assert len(run) == 30

    def test_skipping_everything_is_refused(self, read: ReadText) -> None:
        with pytest.raises(InputError, match="has 2 tokens, of which --skip 2 leaves none"):
            Run(read(metrics_text([5, 6])), 2)

    def test_few_tokens_are_never_separated(self, read: ReadText) -> None:
        result = read.compared(metrics_text([10.0] * 15), metrics_text([90.0] * 15))
        assert not result.pairs[0].separated
        result = read.compared(metrics_text([10.0] * 16), metrics_text([90.0] * 16))
        assert result.pairs[0].separated
        assert result.pairs[0].ratio == pytest.approx(1 / 9)

    def test_correlated_tokens_can_undo_a_separation(self, read: ReadText) -> None:
        # Long stretches of fast and slow tokens: few independent pieces, many tokens.
        a = [100.0] * 90 + [300.0] * 90
        b = [100.0] * 110 + [300.0] * 70
        pair = read.compared(metrics_text(a), metrics_text(b)).pairs[0]
        assert not pair.independent.contains(1.0)
        assert pair.blocked.contains(1.0)
        assert not pair.separated


class TestCaveats:
    @pytest.mark.parametrize(
        ("change", "kind"),
        [
            ({"path": "/other/b.gguf"}, "model"),
            ({"n_ctx": 8192}, "context"),
            ({"threads": 4}, "threads"),
            ({"version": "0.2.0"}, "version"),
            ({"llama_cpp": "0.4.0"}, "version"),
            ({"moe_stream": 1, "compiled_core": 0}, "version"),
            ({"n_expert_used": 1}, "top_k"),
            ({"random_tokens": 3}, "fed"),
            ({"forced_routes": 1}, "fed"),
            ({"temp": 0.8}, "sampled"),
            ({"route_traced": 1}, "traced"),
            ({"io_traced": 1}, "traced"),
        ],
    )
    def test_what_differs_is_named(
        self, read: ReadText, change: dict[str, object], kind: str
    ) -> None:
        result = read.compared(metrics_text(STEADY), metrics_text(STEADY, preamble=OWN | change))
        assert kinds(result) == {kind}
        assert result.pairs[0].caveats == (kind,)

    def test_equal_runs_need_no_caveat(self, read: ReadText) -> None:
        # The same model elsewhere, and a number written otherwise, are the same.
        other = OWN | {"path": "/elsewhere/a.gguf", "threads": "2.0"}
        result = read.compared(metrics_text(STEADY), metrics_text(STEADY, preamble=other))
        assert (result.caveats, result.unchecked) == ((), {})

    def test_models_of_one_name_and_other_sizes_differ(self, read: ReadText) -> None:
        sizes = [OWN | {"expert_bytes_total": size, "dense_bytes": 5} for size in (10, 20)]
        assert kinds(read.compared(*(metrics_text(STEADY, preamble=s) for s in sizes))) == {"model"}

    @pytest.mark.parametrize(
        ("dropped", "settings_", "differ"),
        [
            ((0, 4), (0.0, 0.5), True),
            ((4, 4), (0.5, 0.5), False),
            ((0, 0), (0.0, 0.25), False),
            ((0, 4), (0.5, 0.5), True),
        ],
    )
    def test_drop_rates_are_compared_by_what_was_dropped(
        self,
        read: ReadText,
        dropped: tuple[int, int],
        settings_: tuple[float, float],
        differ: bool,
    ) -> None:
        texts = [
            metrics_text(
                STEADY, preamble=OWN | {"drop_cold_experts": fraction}, experts_dropped=count
            )
            for count, fraction in zip(dropped, settings_, strict=True)
        ]
        assert ("drop_rate" in kinds(read.compared(*texts))) == differ

    def test_few_tokens_and_unfinished_files_are_named(self, read: ReadText) -> None:
        result = read.compared(metrics_text(STEADY), metrics_text([5.0] * 63, summary=""))
        assert kinds(result) == {"few_tokens", "incomplete"}
        cut = metrics_text(STEADY, summary="# summary tokens=99")
        assert kinds(read.compared(cut)) == {"incomplete"}

    def test_other_prompts_are_named(self, read: ReadText) -> None:
        other = metrics_text(STEADY, summary=f"# summary tokens={len(STEADY)} n_prompt=12")
        assert kinds(read.compared(metrics_text(STEADY), other)) == {"prompt"}

    def test_silence_is_no_agreement(self, read: ReadText) -> None:
        result = read.compared(metrics_text(STEADY), metrics_text(STEADY, preamble={}))
        assert kinds(result) == set()
        assert result.unchecked["threads"] == (1,)
        assert set(result.unchecked) == {
            *("model", "context", "threads", "version", "sampling", "tracing")
        }

    def test_a_warm_up_is_offered_to_be_cut(self, read: ReadText) -> None:
        slow_start = [400.0] * 12 + STEADY * 2
        result = read.compared(metrics_text(slow_start), metrics_text(STEADY))
        caveat = next(c for c in result.caveats if c.kind == "warm_up")
        assert caveat.groups == (("12 tokens", (0,)),)
        assert caveat.advice == "--skip 12 cuts that off, from every run"
        texts = (metrics_text(slow_start), metrics_text(STEADY))
        assert "warm_up" not in kinds(read.compared(*texts, skip=12))

    def test_a_drifting_run_is_named(self, read: ReadText) -> None:
        slower = [100.0, 104.0] * 60 + [150.0, 156.0] * 60
        caveat = read.compared(metrics_text(slower)).caveats[0]
        assert caveat.kind == "drift"
        assert "quarter" in caveat.groups[0][0]


class TestSteadiness:
    @pytest.mark.parametrize("size", [1, 7, 40])
    def test_the_slow_start_is_found_to_the_token(self, size: int) -> None:
        rest = np.random.default_rng(1).gamma(25, 4, 300)
        slow = 3000 if size == 1 else 500
        assert warm_up(np.concatenate([np.full(size, float(slow)), rest])) == size

    def test_steady_and_tiny_runs_have_none(self) -> None:
        draws = np.random.default_rng(2)
        noisy = [draws.gamma(4, 50, 300) for _ in range(100)]
        assert sum(warm_up(run) > 0 for run in noisy) <= 5
        assert sum(drift(run) is not None for run in noisy) <= 15
        assert warm_up(np.array([5.0])) == warm_up(np.full(100, 3.0)) == 0
        assert drift(np.full(63, 3.0)) is None

    def test_one_slow_token_in_a_long_run_does_not_matter(self) -> None:
        assert warm_up(np.array([500.0, *[100.0] * 1000])) == 0
