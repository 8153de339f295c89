"""The command line on models: bad ones are refused, good ones answered, and signals obeyed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commandline import SMALL, Cli, Tiny, cli, command, deny, own_home, program

__all__ = ["cli", "own_home"]  # fixtures


class TestBadModels:
    """Files that cannot be run: exit status 2, and what is wrong with them."""

    @pytest.fixture(params=["run", "chat", "inspect"])
    def refuse(self, request: pytest.FixtureRequest, cli: Cli) -> Callable[[Path], str]:
        """The message with which a command refuses a model."""

        def call(path: Path) -> str:
            commands: dict[str, list[str | Path]] = {
                "run": ["run", path, "-p", "x"],
                "chat": [path],
                "inspect": ["inspect", path],
            }
            done = cli(*commands[request.param])
            assert done.status == 2, done.err
            assert done.out == ""
            assert str(path.name) in done.err
            return done.err

        return call

    def test_not_a_gguf(self, refuse: Callable[[Path], str], tmp_path: Path) -> None:
        path = tmp_path / "x.gguf"
        for content, said in ((b"", "empty file"), (b"PK\x03\x04 something else", "not a GGUF")):
            path.write_bytes(content)
            assert said in refuse(path)

    @pytest.mark.parametrize("length", [4, 8, 100, 2000])
    def test_cut_off_in_its_header(
        self, refuse: Callable[[Path], str], tiny_model: Tiny, tmp_path: Path, length: int
    ) -> None:
        path = tmp_path / "x.gguf"
        path.write_bytes(tiny_model().read_bytes()[:length])
        assert "damaged or cut short" in refuse(path)

    def test_header_promises_more_than_the_file_holds(
        self, refuse: Callable[[Path], str], tiny_model: Tiny, tmp_path: Path
    ) -> None:
        path = tmp_path / "x.gguf"
        path.write_bytes(tiny_model().read_bytes()[:-5000])
        assert "cut short" in refuse(path)

    def test_a_shard_is_missing(
        self, refuse: Callable[[Path], str], tiny_model: Tiny, tmp_path: Path
    ) -> None:
        first = tiny_model("tiny-split")
        path = tmp_path / first.name
        path.write_bytes(first.read_bytes())
        assert "-00002-of-00003.gguf" in refuse(path)

    def test_a_directory(self, refuse: Callable[[Path], str], tmp_path: Path) -> None:
        assert "is a directory" in refuse(tmp_path)

    def test_an_unreadable_file(
        self,
        refuse: Callable[[Path], str],
        tiny_model: Tiny,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        deny(monkeypatch, tiny_model())
        assert "cannot be read: Permission denied" in refuse(tiny_model())

    def test_a_dense_model_runs_only_without_streaming(self, cli: Cli, tiny_model: Tiny) -> None:
        dense = tiny_model("tiny-dense")
        done = cli("run", dense, "-p", "x", "-n", "4")
        assert done.status == 2
        assert "dense" in done.err
        assert "--no-stream" in done.err
        done = cli("run", dense, "-p", "x", "-n", "4", "--no-stream", "--ctx", "256")
        assert done.status == 0
        assert "not streaming" in done.err


class TestRun:
    """One prompt, one answer."""

    def test_text_goes_to_stdout_and_the_rest_to_stderr(self, cli: Cli, tiny_model: Tiny) -> None:
        done = cli("run", tiny_model(), "-p", "hello", "-n", "8", *SMALL)
        assert done.status == 0
        assert done.out.strip()
        assert "tok/s" not in done.out
        assert "streaming with cache 2 MiB" in done.err
        assert "8 tokens" in done.err

    def test_json_is_one_document_and_nothing_else(self, cli: Cli, tiny_model: Tiny) -> None:
        done = cli("run", tiny_model(), "-p", "hello", "-n", "8", "--json", *SMALL)
        assert done.status == 0
        document = json.loads(done.out)
        assert {"text", "reasoning", "n_prompt", "tok_s", "prefill_tok_s"} <= set(document)
        assert len(document["tokens"]) == document["n_generated"] == 8
        assert document["stop_reason"] == "length"
        counts = document["stream"]
        assert set(counts) >= {
            "reads",
            "hits",
            "misses",
            "evictions",
            "routed",
            "dropped",
            "bytes",
        }
        assert counts["misses"] > 0
        assert counts["reads"] > 0
        assert counts["dropped"] == 0
        assert document["config"]["stream"]["cache-mb"] == 2
        assert isinstance(document["config"]["model"]["threads"], int)

    def test_without_streaming_the_tokens_are_the_same(self, cli: Cli, tiny_model: Tiny) -> None:
        base = ("run", tiny_model(), "-p", "hello", "-n", "24", "--json", *SMALL)
        streamed, plain = json.loads(cli(*base).out), json.loads(cli(*base, "--no-stream").out)
        assert streamed["tokens"] == plain["tokens"]
        assert plain["stream"]["reads"] is None

    def test_the_prompt_may_come_from_standard_input(self, tiny_model: Tiny) -> None:
        base = ("run", tiny_model(), "-n", "8", "--json", *SMALL)
        piped = program(*base, "-p", "-", input="hello", capture_output=True)
        typed = program(*base, "-p", "hello", capture_output=True)
        assert json.loads(piped.stdout)["tokens"] == json.loads(typed.stdout)["tokens"]

    def test_a_model_without_template_completes_raw_text(self, cli: Cli, tiny_model: Tiny) -> None:
        done = cli("run", tiny_model(chat_template=False), "-p", "hello", "-n", "4", *SMALL)
        assert done.status == 0
        assert "no chat template" in done.err

    def test_a_prompt_longer_than_the_context_is_refused(self, cli: Cli, tiny_model: Tiny) -> None:
        done = cli("run", tiny_model(), "-p", "a long word " * 500, "-n", "4", *SMALL)
        assert done.status == 2
        assert "512" in done.err
        assert done.out == ""

    def test_a_longer_answer_than_fits_is_refused_only_if_asked_for(
        self, cli: Cli, tiny_model: Tiny
    ) -> None:
        base = ("run", tiny_model(), "-p", "x", "--set", "ignore-eos=true", *SMALL, "--ctx", "256")
        assert cli(*base, "-n", "1000").status == 2
        done = cli(*base)
        assert done.status == 0
        assert "context" in done.err

    def test_records_are_written(self, cli: Cli, tiny_model: Tiny, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("t.csv", "route.csv", "io.csv")]
        flags = zip(("--csv", "--route-trace", "--io-trace"), files, strict=True)
        flat = [str(part) for pair in flags for part in pair]
        done = cli("run", tiny_model(), "-p", "hello", "-n", "8", *SMALL, *flat)
        assert done.status == 0
        metrics, routes, _ = (path.read_text() for path in files)
        assert metrics.splitlines()[-1].startswith("# summary ")
        assert routes.startswith("# route_trace v1")
        replayed = cli("replay", files[1], "--json", "--budget", "1", "--budget", "2")
        assert replayed.status == 0
        assert json.loads(replayed.out)["cache_curve"]

    def test_without_a_model_the_demo_model_answers(self, cli: Cli, tmp_path: Path) -> None:
        done = cli("run", "-p", "What is the capital of France?")
        assert done.status == 0
        assert done.out.strip() == "The capital of France is Paris."
        assert "cache 8 MiB" in done.err
        assert not list((tmp_path / "cache").rglob("*.gguf"))

    def test_a_profile_brings_its_model(self, cli: Cli, tiny_model: Tiny, tmp_path: Path) -> None:
        profile = tmp_path / "mine.toml"
        profile.write_text(
            f'[model]\npath = "{os.path.relpath(tiny_model(), tmp_path)}"\nctx = 256\n'
            '[run]\nprompt = "hello"\nn-predict = 4\n'
        )
        done = cli("run", "--profile", profile, "--json")
        assert done.status == 0
        document = json.loads(done.out)
        assert Path(document["model"]["path"]).resolve() == tiny_model().resolve()
        assert document["config"]["model"]["ctx"] == document["model"]["ctx"] == 256


class TestProcess:
    """What only a process of its own shows: signals, pipes, closed streams."""

    def test_ctrl_c_stops_the_answer(self, tiny_model: Tiny) -> None:
        endless = ("-n", "8000", "--ctx", "8192", "--set", "ignore-eos=true")
        with subprocess.Popen(
            command("run", tiny_model(), "-p", "hello", *endless),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)
            pressed = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert time.monotonic() - pressed < 5
        assert out.endswith("\n")
        assert "stopped" in err
        assert "Traceback" not in err

    def test_a_closed_pipe_is_quiet(self, tiny_model: Tiny) -> None:
        for arguments in (["synth", "--list"], ["run", tiny_model(), "-p", "x", "-n", "200"]):
            with subprocess.Popen(
                command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                process.stdout.close()
                assert process.stderr is not None
                err = process.stderr.read()
                process.wait(timeout=60)
            assert process.returncode == 0
            assert "Traceback" not in err
            assert "Broken pipe" not in err

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
    def test_a_full_disk_is_an_error(self) -> None:
        with Path("/dev/full").open("w") as full:
            done = program("synth", "--list", stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1
        assert "No space left" in done.stderr
        assert "Traceback" not in done.stderr

    def test_closed_standard_streams_do_no_harm(self, tiny_model: Tiny) -> None:
        line = " ".join(command("run", tiny_model(), "-p", "x", "-n", "2"))
        for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
            assert subprocess.run(f"{line} {closed}", shell=True, check=False).returncode == 0

    def test_an_old_encoding_does_no_harm(self) -> None:
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = program("run", "ä\x1b.gguf", "-p", "x", env=environment, capture_output=True)
        assert done.returncode == 2
        assert "\\xe4\\u241b.gguf" in done.stderr
