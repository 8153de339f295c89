"""What broke once under hostile files, flags and signals, and must not again."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import Cli, Tiny, cli, command, own_home, program
from tests.hostile import F32, I32, LIST, TEXT, U32, Header, changed, with_template, with_value

__all__ = ["cli", "own_home"]  # fixtures

SHORT = ("-n", "4", "--ctx", "256", "--threads", "1")
QWEN = "qwen3moe."


class TestHeaders:
    """A header that cannot be is refused before native code sees it, by `inspect` as by `run`."""

    @pytest.mark.parametrize(
        ("key", "kind", "value"),
        [
            (QWEN + "block_count", U32, 2**32 - 1),
            (QWEN + "block_count", TEXT, b"five"),
            (QWEN + "block_count", LIST, (U32, [])),
            (QWEN + "expert_count", F32, float("nan")),
            (QWEN + "expert_used_count", U32, 0),
            (QWEN + "expert_used_count", U32, 17),
            (QWEN + "expert_used_count", LIST, (I32, [-1] * 5)),
            (QWEN + "embedding_length", TEXT, b"\x1b[2J"),
            (QWEN + "attention.head_count_kv", TEXT, b"two"),
            (QWEN + "attention.key_length", LIST, (F32, [float("nan")])),
            (QWEN + "attention.kv_lora_rank", LIST, (TEXT, [b"a"])),
            (QWEN + "attention.layer_norm_rms_epsilon", F32, float("nan")),
            (QWEN + "rope.scaling.type", TEXT, b"abc"),
            (QWEN + "nextn_predict_layers", F32, float("inf")),
            ("split.count", TEXT, b"x"),
            ("split.count", F32, 2.5),
            ("general.alignment", U32, 1),
        ],
    )
    @pytest.mark.parametrize("verb", ["inspect", "run"])
    def test_impossible_values_are_named(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path, verb: str, key: str, kind: int, value: Any
    ) -> None:
        if key.endswith("kv_lora_rank"):
            kind, value = TEXT, b"x"  # lists of texts are left out of the metadata
        path = changed(tiny_model(), tmp_path / "x.gguf", with_value(key, kind, value))
        done = cli("inspect", path) if verb == "inspect" else cli("run", path, "-p", "x", *SHORT)
        assert done.status == 2
        assert "x.gguf" in done.err
        # Where the alignment differs, the tensors lie elsewhere: gguf itself refuses.
        assert key in done.err or "damaged" in done.err
        assert "\x1b" not in done.err

    @pytest.mark.parametrize("name", ["blk.0.ffn_norm.weight", "blk.0.ffn_gate_inp.weight"])
    def test_a_norm_or_router_of_whole_numbers_is_refused(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path, name: str
    ) -> None:
        def change(header: Header) -> None:
            shape, _, offset = header.tensors[name]
            header.tensors[name] = (shape, 26, offset)

        done = cli("run", changed(tiny_model(), tmp_path / "x.gguf", change), "-p", "x", *SHORT)
        assert done.status == 2
        assert name in done.err

    def test_an_assertion_of_llama_cpp_is_a_message_and_no_debugger(
        self, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        change = with_value(QWEN + "rope.dimension_count", U32, 1)
        path = changed(tiny_model(), tmp_path / "x.gguf", change)
        done = program("run", path, "-p", "x", *SHORT, capture_output=True)
        assert done.returncode == 2
        assert "x.gguf: llama.cpp cannot go on" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_bytes_of_a_damaged_header_in_a_log_are_no_traceback(
        self, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        path = tmp_path / "x.gguf"
        path.write_bytes(tiny_model().read_bytes().replace(b"token_embd.w", b"\xff\xfe" * 6, 1))
        broken = path.read_bytes().replace(b"output_norm.w", b"\xff\xfe" * 6 + b"w", 1)
        path.write_bytes(
            broken.replace(b"blk.0.attn_norm.w", b"\xff" * 17).replace(
                b"blk.1.attn_norm.w", b"\xff" * 17
            )
        )
        done = program("inspect", path, capture_output=True)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1

    def test_a_pipe_is_refused_and_not_waited_for(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "fifo.gguf"
        os.mkfifo(path)
        done = cli("inspect", path)
        assert done.status == 2
        assert "not a regular file" in done.err

    def test_an_empty_path_is_not_the_demo_model(self, cli: Cli) -> None:
        done = cli("run", "", "-p", "x")
        assert done.status == 2
        assert "empty" in done.err


class TestParts:
    """The parts of a split model."""

    @pytest.fixture
    def parts(self, tiny_model: Tiny, tmp_path: Path) -> list[Path]:
        first = tiny_model("tiny-split")
        return [
            Path(shutil.copy(path, tmp_path)) for path in sorted(first.parent.glob("*-of-*.gguf"))
        ]

    def test_swapped_parts_are_refused(self, cli: Cli, parts: list[Path]) -> None:
        one, two = parts[1].read_bytes(), parts[2].read_bytes()
        parts[1].write_bytes(two)
        parts[2].write_bytes(one)
        done = cli("inspect", parts[0])
        assert done.status == 2
        assert f"{parts[1].name}: is not part 2 of 3" in done.err

    def test_a_part_of_another_model_is_refused(
        self, cli: Cli, parts: list[Path], tiny_model: Tiny
    ) -> None:
        shutil.copy(tiny_model(), parts[2])
        assert "is not part 3 of 3" in cli("inspect", parts[0]).err

    def test_a_repeated_tensor_shows_in_the_count(self, cli: Cli, parts: list[Path]) -> None:
        def change(header: Header) -> None:
            header.values["split.no"] = (header.values["split.no"][0], 2)

        changed(parts[1], parts[2], change)
        done = cli("inspect", parts[0])
        assert done.status == 2
        assert "a part belongs to another model" in done.err

    @pytest.mark.parametrize("name", ["x-00000-of-00000.gguf", "x-00005-of-00003.gguf"])
    def test_an_impossible_part_number_is_refused(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path, name: str
    ) -> None:
        done = cli("inspect", shutil.copy(tiny_model(), tmp_path / name))
        assert done.status == 2
        assert "its name says part" in done.err


class TestTemplates:
    """A chat template is a program in somebody's file."""

    @pytest.mark.parametrize("source", ["{% for", "{{ 1 | nofilter }}", "(" * 400])
    def test_a_broken_template_leaves_raw_text(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path, source: str
    ) -> None:
        source = "{{ " + source + "1" + " }}" if source.startswith("(") else source
        path = changed(tiny_model(), tmp_path / "x.gguf", with_template(source))
        done = cli("run", path, "-p", "hello", *SHORT)
        assert done.status == 0
        assert "chat template is broken" in done.err
        assert done.out == cli("run", path, "-p", "hello", "--raw", *SHORT).out

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception('not \x1b[2Jthese') }}",
            "{{ 1 // 0 }}",
            "{{ 10.0 ** 1000 }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ a.b.c }}",
            "{# nothing #}",
        ],
    )
    def test_a_template_that_fails_is_a_message(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path, source: str
    ) -> None:
        path = changed(tiny_model(), tmp_path / "x.gguf", with_template(source))
        done = cli("run", path, "-p", "hello", *SHORT)
        assert done.status == 2
        assert "chat template" in done.err
        assert "--raw" in done.err
        assert "\x1b" not in done.err


class TestRecords:
    """Files that a run leaves destroy nothing, say only what was measured, and cost no answer."""

    @pytest.mark.parametrize("flag", ["--csv", "--route-trace", "--io-trace"])
    def test_a_record_never_replaces_the_model(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path, flag: str
    ) -> None:
        model = Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))
        link = tmp_path / "link.csv"
        link.symlink_to(model)
        for target in (model, link):
            done = cli("run", model, "-p", "x", *SHORT, flag, target)
            assert done.status == 2
            assert "is read by this run" in done.err
        assert model.read_bytes() == tiny_model().read_bytes()

    def test_nor_another_part_of_it(self, cli: Cli, tiny_model: Tiny) -> None:
        first = tiny_model("tiny-split")
        last = sorted(first.parent.glob("*-of-*.gguf"))[-1]
        before = last.read_bytes()
        assert cli("run", first, "-p", "x", *SHORT, "--csv", last).status == 2
        assert last.read_bytes() == before

    def test_nor_each_other_or_a_trace_that_is_read(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        base, path = ("run", tiny_model(), "-p", "x", *SHORT), tmp_path / "r.csv"
        assert cli(*base, "--csv", path, "--route-trace", path).status == 2
        assert not path.exists()
        assert cli(*base, "--route-trace", path).status == 0
        before = path.read_bytes()
        assert cli(*base, "--force-routes", path, "--route-trace", path).status == 2
        assert path.read_bytes() == before

    def test_an_answer_of_one_token_leaves_metrics(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        path = tmp_path / "m.csv"
        done = cli("run", tiny_model(), "-p", "x", *SHORT, "-n", "1", "--csv", path)
        assert done.status == 0
        assert "# summary tokens=0 s/tok=-1 tok/s=-1" in path.read_text()
        assert "io_s/tok=-1 " in path.read_text()

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
    def test_a_full_disk_for_metrics_costs_no_answer(self, cli: Cli, tiny_model: Tiny) -> None:
        done = cli("run", tiny_model(), "-p", "x", *SHORT, "--json", "--csv", "/dev/full")
        assert done.status == 1
        assert json.loads(done.out)["n_generated"] == 4
        assert "/dev/full: writing the metrics failed: No space left" in done.err

    def test_without_streaming_nothing_unmeasured_is_zero(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        path = tmp_path / "m.csv"
        done = cli("run", tiny_model(), "-p", "x", *SHORT, "--no-stream", "--json", "--csv", path)
        summary = json.loads(done.out)["summary"]
        rows = list(csv.DictReader(line for line in path.open() if line[0] != "#"))
        unknown: tuple[str, ...] = (
            "read_bytes",
            "io_ms",
            "mgmt_ms",
            "stall_ms",
            "reads",
            "hits",
            "misses",
        )
        unknown += ("evictions", "experts_routed", "mass_discarded")
        assert {float(row[name]) for row in rows for name in unknown} == {-1}
        for name in ("read_MiB", "prefill_read_MiB", "io_s/tok", "stall_s/tok", "reads", "hits"):
            assert summary[name] == -1
        traced = cli("run", tiny_model(), "-p", "x", *SHORT, "--no-stream", "--route-trace", path)
        assert " B per token" not in traced.err.splitlines()[-1]

    @pytest.mark.parametrize("flag", [("--io-trace", "i.csv"), ("--poison",)])
    def test_what_needs_streaming_is_refused_without(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path, flag: tuple[str, ...]
    ) -> None:
        flags = [flag[0], *(tmp_path / name for name in flag[1:])]
        done = cli("run", tiny_model(), "-p", "x", *SHORT, "--no-stream", *flags)
        assert done.status == 2
        assert "--no-stream" in done.err

    def test_lossy_without_streaming_says_what_is_lossy(self, cli: Cli, tiny_model: Tiny) -> None:
        base = ("run", tiny_model(), "-p", "x", *SHORT, "--no-stream")
        assert "LOSSY: n-expert-used = 2" in cli(*base, "--n-expert-used", "2").err
        dropping = cli(*base, "--drop-cold-experts", "0.5", "--json")
        assert "LOSSY" not in dropping.err
        assert "nothing is dropped" in dropping.err
        assert json.loads(dropping.out)["config"]["routing"]["drop-cold-experts"] == 0

    def test_names_that_are_no_text(self, tiny_model: Tiny, tmp_path: Path) -> None:
        model = os.fsencode(tmp_path) + b"/bad\xff\xc3\xa4.gguf"
        shutil.copy(tiny_model(), os.fsdecode(model))
        metrics = tmp_path / "m.csv"
        ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        for extra in ([], ["--no-stream"]):
            done = subprocess.run(
                [*command("run"), model, "-p", "x", *SHORT, "--csv", metrics, *extra],
                capture_output=True,
                env={**os.environ, **ascii_only},
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert "# name=" in metrics.read_text()

    def test_a_models_name_cannot_move_the_cursor_of_who_reads_the_metrics(
        self, cli: Cli, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        change = with_value("general.name", TEXT, "a\x1b[2J\x0b\x85\u2028\u202eb\n".encode())
        path = changed(tiny_model(), tmp_path / "x.gguf", change)
        metrics = tmp_path / "m.csv"
        assert cli("run", path, "-p", "x", *SHORT, "--csv", metrics).status == 0
        line = next(line for line in metrics.read_text().splitlines() if "# name=" in line)
        assert line == r"# name=a\x1b[2J\x0b\x85\u2028\u202eb\n"


class TestArguments:
    """Arguments that are none."""

    def test_a_tiny_context_takes_a_prompt_in_small_batches(
        self, cli: Cli, tiny_model: Tiny
    ) -> None:
        long = ("run", tiny_model(), "-p", "a b c d e f", "-n", "4", "--threads", "1")
        small = cli(*long, "--ctx", "5")
        assert small.status == 0
        assert small.out == cli(*long, "--ctx", "256").out

    def test_a_negative_seed_of_random_tokens_is_refused(self, cli: Cli, tiny_model: Tiny) -> None:
        assert cli("run", tiny_model(), "-p", "x", "--random-tokens", "-1").status == 2

    def test_a_prompt_that_is_no_text_is_refused(self, tiny_model: Tiny) -> None:
        piped = subprocess.run(
            command("run", tiny_model(), "-p", "-", *SHORT),
            input=b"a\xff",
            capture_output=True,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            check=False,
        )
        typed = subprocess.run(
            [*command("run", tiny_model(), *SHORT, "-p"), b"a\xff"],
            capture_output=True,
            check=False,
        )
        for done in (piped, typed):
            assert done.returncode == 2
            assert b"not a text in UTF-8" in done.stderr


class TestInterrupts:
    """Ctrl-C while a model opens."""

    @pytest.mark.parametrize("stage", ["loading", "learning the graph", "reading dense weights"])
    def test_ctrl_c_while_opening_ends_the_run(
        self, cli: Cli, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, stage: str
    ) -> None:
        from tuiwork.progress import ProgressBar

        def press(_bar: ProgressBar, at: str, _fraction: float) -> None:
            if at == stage:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(ProgressBar, "__call__", press)
        done = cli("run", tiny_model(), "-p", "x", *SHORT)
        assert done.status == 130
        assert done.out == ""

    def test_ctrl_c_in_a_callback_of_native_code_is_not_lost(
        self, cli: Cli, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from engine.mapping import LogCapture

        take = LogCapture.take

        def pressed(log: LogCapture, level: int, text: bytes | None, data: Any) -> None:
            if not log.lines:
                os.kill(os.getpid(), signal.SIGINT)
            take(log, level, text, data)

        monkeypatch.setattr(LogCapture, "take", pressed)
        done = cli("run", tiny_model(), "-p", "x", *SHORT)
        assert done.status == 130
        assert done.out == ""


class TestFilesThatChange:
    """The model's file is cut, replaced or removed while it runs."""

    def test_lanes_added_later_read_the_file_that_was_opened(
        self, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        from engine.config import RunConfig
        from engine.session import Session

        path = Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))
        config = RunConfig().replace(
            {"model.path": str(path), "stream.cache-mb": 0, "model.threads": 1, "model.ctx": 256}
        )
        with Session.open(config) as session:
            before = session.generate("hello", n_predict=8).tokens
            path.unlink()
            path.write_bytes(b"\0" * tiny_model().stat().st_size)
            session.set_live({"stream.io-threads": 8})
            assert session.generate("hello", n_predict=8).tokens == before

    def test_a_file_cut_short_while_it_runs_is_an_error_with_its_place(
        self, tiny_model: Tiny, tmp_path: Path
    ) -> None:
        from engine.config import RunConfig
        from engine.errors import ReadError
        from engine.session import Session

        path = Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))
        config = RunConfig().replace(
            {"model.path": str(path), "stream.cache-mb": 0, "model.threads": 1, "model.ctx": 256}
        )
        whole = path.read_bytes()
        with Session.open(config) as session:
            before = session.generate("hello", n_predict=8).tokens
            session.clear()
            os.truncate(path, len(whole) // 2)
            with pytest.raises(ReadError, match=r"m\.gguf.*layer \d+, expert \d+.*offset \d+"):
                session.generate("hello", n_predict=8)
            path.write_bytes(whole)
            assert session.generate("hello", n_predict=8).tokens == before


class TestNumbers:
    """Summary, rows, document and traces of one run say the same."""

    def test_every_record_of_a_run_agrees(self, cli: Cli, tiny_model: Tiny, tmp_path: Path) -> None:
        names = ("m.csv", "r.csv", "i.csv")
        metrics, routes, reads = (tmp_path / name for name in names)
        done = cli(
            *("run", tiny_model(), "-p", "hello", "-n", "40", "--ctx", "256", "--threads", "1"),
            *("--set", "cache-mb=2", "--set", "force-cache=true", "--set", "ignore-eos=true"),
            *("--json", "--csv", metrics, "--route-trace", routes, "--io-trace", reads),
            *("--set", "prefetch=off"),
        )
        assert done.status == 0
        document = json.loads(done.out)
        summary, stream = document["summary"], document["stream"]
        rows = list(csv.DictReader(line for line in metrics.open() if line[0] != "#"))
        route = list(csv.DictReader(line for line in routes.open() if line[0] != "#"))
        read = list(csv.DictReader(line for line in reads.open() if line[0] != "#"))
        decode = [row for row in route if row["phase"] == "1"]

        def total(name: str) -> int:
            return sum(int(row[name]) for row in rows)

        assert len(rows) == summary["tokens"] == 39
        assert total("hits") + total("misses") == total("experts_routed") == len(decode)
        assert total("hits") == summary["hits"] == sum(row["residency"] == "1" for row in decode)
        assert total("reads") == sum(row["phase"] == "1" for row in read)
        assert stream["reads"] == len(read)
        assert stream["bytes"] == sum(int(row["bytes_read"]) for row in read)
        assert stream["routed"] == len(route)
        assert stream["evictions"] > 0
        wanted = sum(int(row["bytes_wanted"]) for row in read)
        assert wanted <= stream["bytes"] < wanted + 2 * 4096 * len(read)
        assert sum(int(row["expert_bytes"]) for row in route) == wanted
        seconds = sum(float(r["wall_ms"]) + float(r["loop_overhead_ms"]) for r in rows) / 1000
        assert document["tok_s"] == pytest.approx(len(rows) / seconds, rel=1e-3)
        replayed = cli("replay", routes, "--json", "--budget", "2")
        curve = json.loads(replayed.out)["cache_curve"]
        engine = next(point for point in curve if point["policy"] == "engine")
        measured = 100 * total("hits") / (total("hits") + total("misses"))
        assert engine["hit_pct"] == pytest.approx(measured, abs=0.05)
