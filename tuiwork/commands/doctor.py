"""`tuiwork doctor`: what this machine and this installation allow."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tuiwork import __version__, console
from tuiwork.settings import switch
from tuiwork.text import MIB, one_line, size


def doctor(
    model: Annotated[
        str | None, Parameter(help="a model whose disk is measured, with 1 to 8 parallel readers")
    ] = None,
    /,
    *,
    json: Annotated[bool, switch("one JSON document on stdout")] = False,
) -> int:
    """What works here: versions, native code, memory, limits, and the model's disk."""
    facts = {"machine": _machine_facts(), "paths": _path_facts(), "llama": _llama_facts()}
    if model is not None and not facts["llama"]["error"]:
        facts["model"] = _model_facts(model)
    if json:
        console.write_json(facts)
    else:
        _print(facts)
    return 1 if facts["llama"]["error"] else 0


def _machine_facts() -> dict[str, Any]:
    from engine import machine

    memory = machine.memory()
    return {
        "tuiwork": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": machine.cpu_name(),
        "physical_cores": machine.physical_cores(),
        "usable_cpus": machine.usable_cpus(),
        "cpu_quota": machine.cpu_quota(),
        "memory_total_bytes": memory.total_bytes,
        "memory_available_bytes": memory.available_bytes,
        "cgroup_limit_bytes": memory.cgroup.limit_bytes if memory.cgroup else None,
        "cgroup": memory.cgroup.path if memory.cgroup else None,
        "userfaultfd_refusal": machine.userfaultfd_refusal(),
    }


def _path_facts() -> dict[str, Any]:
    from engine.profile_paths import shipped_profiles_dir, user_profiles_dir
    from tuiwork.models import cache_dir

    return {
        "user_profiles": user_profiles_dir(),
        "shipped_profiles": shipped_profiles_dir(),
        "cache": cache_dir(),
    }


def _llama_facts() -> dict[str, Any]:
    """The native library: whether it loads, whether its layout is the one we know."""
    from engine.errors import AbiMismatch

    facts: dict[str, Any] = {"error": None}
    try:
        import llama_cpp

        facts["llama_cpp_python"] = llama_cpp.__version__
        from engine import ggml

        ggml.check_abi()
        facts["openmp"] = ggml.uses_openmp()
        from engine import native_library

        facts["compiled_core"] = native_library.library is not None
        facts["compiled_core_refusal"] = native_library.reason or None
        facts["gomp_spincount"] = os.environ.get("GOMP_SPINCOUNT") if facts["openmp"] else None
    except (ImportError, AbiMismatch, OSError, RuntimeError) as error:
        facts["error"] = f"{error}"
    return facts


def _model_facts(model: str) -> dict[str, Any]:
    from engine.bandwidth import fewest_good_lanes, measure
    from engine.machine import filesystem_of
    from engine.model_file import ModelFile
    from engine.positioned import direct_reads_work
    from tuiwork.progress import ProgressBar

    file = ModelFile.open(model)
    path = max(zip(file.sizes, file.paths, strict=True))[1]
    direct = direct_reads_work(path)
    slices = [
        entry.nbytes // file.experts.n_expert
        for entry in file.tensors.values()
        if file.experts.n_expert and len(entry.shape) == 3
    ]
    block = max(slices, default=MIB)
    with ProgressBar() as bar:
        rates = measure(path, block, o_direct=direct, progress=bar)
    return {
        "path": path,
        "filesystem": filesystem_of(path),
        "o_direct": direct,
        "block_bytes": block,
        "lanes": [
            {"lanes": rate.lanes, "bytes_per_s": rate.bytes_per_s, "bytes_read": rate.bytes_read}
            for rate in rates
        ],
        "io_threads": fewest_good_lanes(rates),
    }


def _print(facts: dict[str, Any]) -> None:
    machine, paths = facts["machine"], facts["paths"]
    quota = f", limited to {machine['cpu_quota']:g}" if machine["cpu_quota"] else ""
    limit = machine["cgroup_limit_bytes"]
    limited = f"limited to {size(limit)} by {machine['cgroup']}" if limit else "no limit"
    refusal = machine["userfaultfd_refusal"]
    rows = [
        ("tuiwork", f"{machine['tuiwork']}, Python {machine['python']}, {machine['system']}"),
        *_llama_rows(facts["llama"]),
        (
            "processor",
            f"{machine['cpu']}: {machine['physical_cores']} cores, "
            f"{machine['usable_cpus']} usable processors{quota}",
        ),
        (
            "memory",
            f"{size(machine['memory_available_bytes'])} available of "
            f"{size(machine['memory_total_bytes'])}, {limited}",
        ),
        ("userfaultfd", f"no: {refusal}" if refusal else "yes"),
        ("your profiles", str(paths["user_profiles"])),
        ("shipped profiles", str(paths["shipped_profiles"])),
        ("cache folder", str(paths["cache"])),
    ]
    if "model" in facts:
        rows += _model_rows(facts["model"])
    console.table(rows)


def _llama_rows(llama: dict[str, Any]) -> list[tuple[str, str]]:
    version = llama.get("llama_cpp_python", "not loaded")
    if llama["error"]:
        return [("llama.cpp", f"{version}: cannot be used: {one_line(llama['error'])}")]
    if llama["openmp"]:
        threads = f"OpenMP; they sleep after GOMP_SPINCOUNT = {llama['gomp_spincount']} turns"
    else:
        threads = "own pool; they sleep after some 2 ms (built without OpenMP)"
    core = "yes" if llama["compiled_core"] else f"no: {llama['compiled_core_refusal']}"
    return [
        ("llama.cpp", f"llama-cpp-python {version}, its memory layout is as expected"),
        ("waiting threads", threads),
        ("compiled core", core),
    ]


def _model_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    direct = "works" if model["o_direct"] else "is refused here: reads go through the page cache"
    rates = "\n".join(
        f"{lane['lanes']} lane{'s' if lane['lanes'] > 1 else ' '}  "
        f"{lane['bytes_per_s'] / MIB:7.0f} MiB/s"
        for lane in model["lanes"]
    )
    return [
        ("model", str(Path(model["path"]))),
        ("filesystem", f"{model['filesystem']}; O_DIRECT {direct}"),
        ("disk", f"{rates}\nin blocks of {size(model['block_bytes'])}"),
        ("io-threads", f"{model['io_threads']}: no more lanes are much faster here"),
    ]
