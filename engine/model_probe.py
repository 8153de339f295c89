"""What GGUF files say of themselves, read in a process of its own: `python -m engine.model_probe`.

A hostile or damaged header can at worst end this process. It takes paths as arguments, or without
any as lines on stdin (each a JSON string), and answers each with one JSON line on stdout.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MOST_MEMORY_BYTES = 8 * 2**30
"""Of address space, most of it libraries: headers of real models need well below 1 GiB."""

MOST_CPU_S = 120


def describe(path: str) -> dict[str, Any]:
    """One file's facts, or its `error`."""
    # Imported here: this loads llama.cpp, and the limits must be set before.
    from engine.errors import TuiworkError
    from engine.model_file import ModelFile

    try:
        model = ModelFile.open(path)
        experts = model.experts
    except TuiworkError as error:
        return {"path": path, "error": str(error).removeprefix(f"{Path(path).expanduser()}: ")}
    except (ValueError, TypeError, MemoryError, OverflowError) as error:
        return {"path": path, "error": f"the header makes no sense ({type(error).__name__})"}
    return {
        "path": path,
        "name": model.name,
        "arch": model.arch,
        "bytes": sum(model.sizes),
        "n_files": len(model.paths),
        "n_layer": experts.n_layer,
        "n_expert": experts.n_expert,
        "n_expert_used": experts.n_expert_used,
        "expert_bytes": experts.expert_bytes,
        "token_demand_bytes": experts.token_demand_bytes,
    }


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, MOST_MEMORY_BYTES),
        (resource.RLIMIT_CPU, MOST_CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def _paths(arguments: list[str], lines: Iterable[str]) -> Iterator[str]:
    if arguments:
        yield from arguments
        return
    for line in lines:
        yield json.loads(line)


def main() -> None:
    """Answer every path, in order, each as soon as it is known."""
    _limit()
    for path in _paths(sys.argv[1:], sys.stdin):
        print(json.dumps(describe(path)), flush=True)


if __name__ == "__main__":
    main()
