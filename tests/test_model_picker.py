"""Choosing a model: what a folder has, what headers say, what is kept, and the screen."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.app import App
from textual.widgets import Input, OptionList

from tests.conftest import TinyModel
from tuiwork.model_picker import probe as probing
from tuiwork.model_picker.probe import Facts, probe
from tuiwork.model_picker.recent import MOST, Recent
from tuiwork.model_picker.scan import Found, grouped, models_in
from tuiwork.model_picker.screen import ModelPicker


def names(found: list[Found]) -> list[str]:
    return [entry.path.name for entry in found]


class TestScan:
    def test_the_parts_of_a_split_model_are_one_entry(self) -> None:
        parts = [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        assert names(grouped(Path("/m"), [*parts, "b.gguf"])) == ["b.gguf", parts[0]]

    def test_parts_without_a_first_are_told_once(self) -> None:
        parts = [f"big-0000{n}-of-00003.gguf" for n in (2, 3)]
        (found,) = grouped(Path("/m"), parts)
        assert "big-00001-of-00003.gguf, is missing" in found.problem

    def test_folders_inside_only_when_wanted(self, tmp_path: Path) -> None:
        for place in (".", "a", "a/b", ".hidden"):
            folder = tmp_path / place
            folder.mkdir(exist_ok=True)
            (folder / "m.GGUF").touch()
        (tmp_path / "loop").symlink_to(tmp_path)
        flat = list(models_in(tmp_path, recursive=False))
        deep = list(models_in(tmp_path, recursive=True))
        assert [len(found) for found in flat] == [1]
        assert [found[0].path.parent.name for found in deep[1:]] == ["a", "b"]

    def test_it_can_be_stopped(self, tmp_path: Path) -> None:
        for number in range(20):
            (tmp_path / f"{number}").mkdir()
            (tmp_path / f"{number}" / "m.gguf").touch()
        looked = 0

        def cancelled() -> bool:
            return looked >= 3

        for _ in models_in(tmp_path, recursive=True, cancelled=cancelled):
            looked += 1
        assert looked == 3

    def test_a_folder_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(OSError):
            list(models_in(tmp_path / "none", recursive=True))


class TestProbe:
    def test_facts_of_good_and_bad_files(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        good = tiny_model("tiny")
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(good.read_bytes()[:-100])
        other = tmp_path / "other.gguf"
        other.write_text("not a model")
        facts = list(probe([good, cut, tmp_path / "gone.gguf", other, good]))
        assert [one.path for one in facts[:2]] == [good, cut]
        assert (facts[0].n_expert > 1, facts[0].reason) == (True, "")
        assert facts[0].size_bytes == good.stat().st_size
        assert facts[0].token_demand_bytes > 0
        assert "cut short" in facts[1].reason
        assert "there is no such file" in facts[2].reason
        assert "is not a GGUF file" in facts[3].reason
        assert facts[4] == facts[0]

    def test_a_reader_that_crashes_costs_one_file(
        self, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = (
            "import os, sys, engine.model_probe as p\n"
            "real = p.describe\n"
            "p.describe = lambda path: os.abort() if 'evil' in path else real(path)\n"
            "p.main()"
        )
        monkeypatch.setattr(probing, "COMMAND", [sys.executable, "-c", code])
        good = tiny_model("tiny")
        facts = list(probe([good, tmp_path / "evil.gguf", good]))
        assert [bool(one.reason) for one in facts] == [False, True, False]
        assert "crashed the reader (SIGABRT)" in facts[1].reason

    def test_a_reader_that_hangs_is_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = "import time; time.sleep(60)"
        monkeypatch.setattr(probing, "COMMAND", [sys.executable, "-c", code])
        monkeypatch.setattr(probing, "PATIENCE_S", 0.2)
        (facts,) = probe([tmp_path / "a.gguf"])
        assert "takes longer" in facts.reason

    def test_it_can_be_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        code = "import time; time.sleep(60)"
        monkeypatch.setattr(probing, "COMMAND", [sys.executable, "-c", code])
        began = time.monotonic()
        assert list(probe([tmp_path / "a"], lambda: time.monotonic() - began > 0.2)) == []
        assert time.monotonic() - began < 5

    def test_damaged_headers_never_end_the_list(
        self, tiny_model: TinyModel, tmp_path: Path
    ) -> None:
        whole = tiny_model("tiny").read_bytes()
        dice = random.Random(4)
        paths = []
        for number in range(25):
            data = bytearray(whole)
            for _ in range(dice.randint(1, 6)):
                data[dice.randrange(4, 3_000)] = dice.randrange(256)
            paths.append(tmp_path / f"{number}.gguf")
            paths[-1].write_bytes(data)
        assert [one.path for one in probe(paths)] == paths

    def test_a_folder_named_like_ours_is_not_imported(
        self, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('owned')")
        monkeypatch.chdir(tmp_path)
        (facts,) = probe([tiny_model("tiny")])
        assert facts.reason == ""

    def test_paths_as_arguments(self, tiny_model: TinyModel) -> None:
        path = str(tiny_model("tiny"))
        told = subprocess.run(
            [sys.executable, "-m", "engine.model_probe", path], capture_output=True, check=True
        ).stdout
        assert json.loads(told)["path"] == path

    def test_a_dense_model_has_a_reason(self) -> None:
        assert "not a Mixture of Experts" in Facts(Path("x"), "x", "llama", 10).reason


class TestRecent:
    def test_the_newest_is_first_and_the_list_is_short(self, tmp_path: Path) -> None:
        recent = Recent(tmp_path / "state" / "recent.json")
        for number in range(MOST + 3):
            recent.opened(tmp_path / f"{number}.gguf")
        recent.opened(tmp_path / "5.gguf")
        assert len(recent.models) == MOST
        assert recent.models[0] == tmp_path / "5.gguf"
        assert recent.models[1] == tmp_path / f"{MOST + 2}.gguf"

    def test_folder_and_models_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        recent = Recent(tmp_path / "recent.json")
        recent.opened(tmp_path / "a.gguf")
        recent.looked_in(tmp_path)
        assert (recent.models, recent.folder) == ([tmp_path / "a.gguf"], tmp_path)

    @pytest.mark.parametrize(
        "text", ["", "[1]", '{"models": 3}', '{"models": [3, "", "a\\u0000"]}']
    )
    def test_a_damaged_file_is_an_empty_list(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "recent.json"
        file.write_text(text)
        assert Recent(file).models == []
        Recent(file).opened(tmp_path / "a.gguf")
        assert Recent(file).models == [tmp_path / "a.gguf"]

    def test_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        Recent(tmp_path / "file" / "recent.json").opened(tmp_path / "a.gguf")


class PickerApp(App[None]):
    """Opens the picker and keeps what it gives."""

    def __init__(self, picker: ModelPicker) -> None:
        super().__init__()
        self._picker = picker
        self.given: list[Path | None] = []

    def on_mount(self) -> None:
        """Ask."""
        self.push_screen(self._picker, self.given.append)

    @property
    def listed(self) -> str:
        """What can be read."""
        return "\n".join(strip.text for strip in self.screen._compositor.render_strips())


def made_up(paths: list[Path], cancelled: Callable[[], bool]) -> Iterator[Facts]:
    """Facts by the file's name."""
    for path in paths:
        if "broken" in path.name:
            yield Facts(path, problem="is cut short")
        elif "dense" in path.name:
            yield Facts(path, "Dense", "llama", 5 * 10**9, n_layer=32)
        else:
            yield Facts(path, path.stem.title(), "qwen3moe", 10**10, 1, 48, 128, 8, 10**9)


@pytest.mark.asyncio
class TestScreen:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "models"
        (folder / "inside").mkdir(parents=True)
        for name in ("broken", "dense", "alpha", "beta", "inside/gamma"):
            (folder / f"{name}.gguf").touch()
        return folder

    def picker(self, folder: Path, recent: Recent | None = None) -> ModelPicker:
        recent = recent or Recent(folder.parent / "recent.json")
        return ModelPicker(folder=folder, recent=recent, probe=made_up)

    async def test_a_model_is_chosen(self, folder: Path) -> None:
        app = PickerApp(self.picker(folder))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause(0.7)
            assert "128 experts, 8 used" in app.listed
            assert "not a Mixture of Experts" in app.listed
            assert "is cut short" in app.listed
            assert "4 models in" in app.listed
            await pilot.press("down", "enter")
            await pilot.pause()
        assert app.given == [folder / "beta.gguf"]
        assert Recent(folder.parent / "recent.json").models == [folder / "beta.gguf"]

    async def test_what_cannot_be_used_cannot_be_chosen(self, folder: Path) -> None:
        app = PickerApp(self.picker(folder))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause(0.7)
            options = app.screen.query_one(OptionList)
            usable = [
                number
                for number in range(options.option_count)
                if not options.get_option_at_index(number).disabled
            ]
            assert len(usable) == 2
            assert options.highlighted in usable

    async def test_recent_ones_come_first_and_only_once(self, folder: Path) -> None:
        recent = Recent(folder.parent / "recent.json")
        recent.opened(folder / "gone.gguf")
        recent.opened(folder / "beta.gguf")
        app = PickerApp(self.picker(folder, recent))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause(0.7)
            assert app.listed.index("Opened before") < app.listed.index("beta.gguf")
            assert app.listed.count("beta.gguf") == 1
            await pilot.press("enter")
            await pilot.pause()
        assert app.given == [folder / "beta.gguf"]

    async def test_subfolders(self, folder: Path) -> None:
        app = PickerApp(self.picker(folder))
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.pause(0.7)
            assert "gamma" not in app.listed
            await pilot.press("f3")
            await pilot.pause(0.7)
            assert "gamma.gguf" in app.listed
            assert "models in all folders of" in app.listed

    async def test_another_folder_or_a_file_can_be_typed(self, folder: Path) -> None:
        app = PickerApp(self.picker(folder.parent, Recent(folder.parent / "recent.json")))
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.pause(0.7)
            assert "No .gguf files in" in app.listed
            field = app.screen.query_one(Input)
            field.focus()
            field.value = str(folder / "inside")
            await pilot.press("enter")
            await pilot.pause(0.7)
            assert "gamma.gguf" in app.listed
            assert Recent(folder.parent / "recent.json").folder == folder / "inside"
            field.focus()
            field.value = str(folder / "none")
            await pilot.press("enter")
            await pilot.pause(0.7)
            assert "No such file or directory" in app.listed
            field.focus()
            field.value = str(folder / "alpha.gguf")
            await pilot.press("enter")
            await pilot.pause()
        assert app.given == [folder / "alpha.gguf"]

    async def test_closing_stops_the_reading(self, folder: Path) -> None:
        stopped: list[bool] = []

        def slow(paths: list[Path], cancelled: Callable[[], bool]) -> Iterator[Facts]:
            while not cancelled():
                time.sleep(0.01)
            stopped.append(True)
            yield from ()

        picker = ModelPicker(folder=folder, recent=Recent(folder / "r.json"), probe=slow)
        app = PickerApp(picker)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause(0.7)
            await pilot.press("escape")
            await pilot.pause(0.7)
        assert (app.given, stopped) == ([None], [True])

    async def test_real_files(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        path = tiny_model("tiny")
        app = PickerApp(ModelPicker(folder=path.parent, recent=Recent(tmp_path / "r.json")))
        async with app.run_test(size=(100, 30)) as pilot:
            deadline = time.monotonic() + 10
            while "used" not in app.listed and time.monotonic() < deadline:
                await pilot.pause(0.7)
            await pilot.press("enter")
            await pilot.pause()
        assert app.given == [path]
