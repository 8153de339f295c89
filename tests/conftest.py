"""Fixtures that every test may use. Models are made on first use and kept for the session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# Test machines are shared: how long one example took says nothing about the code.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

TinyModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what the developer's own sessions keep."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models; each pytest-xdist worker has its own."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(model_dir: Path) -> TinyModel:
    """`tiny_model(shape, seed=1, chat_template=True)`: the path of such a model, to read only.

    The shape is a name (`tiny-fused`) or a name with changes (`tiny,n-layer=6`). Of a split model
    it is the first file.
    """

    @functools.cache
    def make(shape: str = "tiny", *, seed: int = 1, chat_template: bool = True) -> Path:
        # Imported here: it loads llama.cpp, and most tests do not need it.
        from engine import synth

        folder = model_dir / f"{len(list(model_dir.iterdir())):03d}"
        folder.mkdir()
        return synth.write_model(
            folder / f"{shape.partition(',')[0]}.gguf",
            synth.shape_from_text(shape),
            seed=seed,
            chat_template=chat_template,
        )[0]

    return make
