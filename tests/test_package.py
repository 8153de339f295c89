"""The package: what the wheel holds, and rules of the source tree."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_engine_does_not_import_the_app() -> None:
    for path in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.partition(".")[0] not in ("textual", "tuiwork"), path


def test_llama_cpp_is_pinned_to_one_version() -> None:
    pins = [
        re.findall(r"llama-cpp-python==([\d.]+)", (ROOT / name).read_text())
        for name in ("pyproject.toml", "requirements/llama.txt")
    ]
    assert len({version for found in pins for version in found}) == 1


@pytest.mark.slow
def test_the_wheel_works_from_anywhere(tmp_path: Path) -> None:
    """Needs a package index for the build's own requirement."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("tuiwork-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {path.name for path in (ROOT / "profiles").glob("*.toml")}
    assert {Path(name).name for name in names if name.startswith("engine/profiles/")} == shipped
    assert {name.partition("/")[0] for name in names} == {
        "engine",
        "tuiwork",
        "-".join(wheel.name.split("-")[:2]) + ".dist-info",
    }
    # It is compiled where there is a compiler, and then for one kind of machine alone.
    assert ("engine/native/core.so" in names) == (not wheel.name.endswith("-py3-none-any.whl"))
    assert ("engine/native/core.so" in names) == (shutil.which("cc") is not None)
    assert "engine/demo/demo-moe.gguf" in names
    assert wheel.stat().st_size < 60 * 10**6
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "-q", "--no-deps", "-t", target, wheel], check=True)
    # The installed copy stands before this checkout's on the path.
    done = subprocess.run(
        [sys.executable, "-m", "tuiwork", "profiles", "show", "app"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(target / "engine" / "profiles" / "app.toml") in done.stdout
