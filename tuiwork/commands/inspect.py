"""`tuiwork inspect`: what a model is made of and what it needs, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from engine.header_checks import largest
from tuiwork import console
from tuiwork.settings import CommonFlags, switch
from tuiwork.text import one_line, size, size_range

if TYPE_CHECKING:
    from engine.config import RunConfig
    from engine.model_file import ModelFile


def inspect(
    model: Annotated[
        str | None,
        Parameter(help="the GGUF file; of a split model, its first part; default: a demo model"),
    ] = None,
    /,
    *,
    json: Annotated[bool, switch("one JSON document on stdout")] = False,
    common: CommonFlags | None = None,
) -> int:
    """What a model is made of: layers, experts, bytes per token, and what cache fits here."""
    from tuiwork.models import open_config

    # Settings first: a mistake in them must not wait for native code.
    config = open_config(model, common or CommonFlags(), {})
    from engine.model_file import ModelFile

    facts = describe(ModelFile.open(config.model.path), config)
    if json:
        console.write_json(facts)
    else:
        _print(facts)
    return 0


def describe(file: ModelFile, config: RunConfig) -> dict[str, Any]:
    """The facts of a model as `--json` has them; sizes are in bytes."""
    from engine.machine import memory
    from engine.pressure import floor_bytes

    experts, stream = file.experts, config.stream
    ctx = config.model.ctx or largest(file.arch_value("context_length"))
    kv = kv_bytes(file, ctx)
    here = memory()
    in_file = experts.row_bytes if stream.dense_weights == "anon" else 0
    held = experts.dense_bytes - in_file + (kv or 0)
    floor = floor_bytes(stream.cache_floor_mb, here.total_bytes)
    fits = max(0, here.available_bytes - held - floor)
    return {
        "path": file.paths[0],
        "parts": len(file.paths),
        "file_bytes": sum(file.sizes),
        "arch": file.arch,
        "name": file.name,
        "n_layer": experts.n_layer,
        "n_expert_layers": len(experts.entry_bytes),
        "n_expert": experts.n_expert,
        "n_expert_used": experts.n_expert_used,
        "expert_bytes_total": experts.expert_bytes,
        "expert_bytes_by_layer": experts.entry_bytes,
        "expert_types": _expert_types(file),
        "token_demand_bytes": experts.token_demand_bytes,
        "layer_demand_bytes": experts.layer_demand_bytes,
        "dense_bytes": experts.dense_bytes,
        "row_bytes": in_file,
        "ctx": ctx,
        "ctx_trained": file.arch_value("context_length"),
        "kv_bytes_estimate": kv,
        "chat_template": "tokenizer.chat_template" in file.metadata,
        "available_bytes": here.available_bytes,
        "memory_limit_bytes": here.cgroup.limit_bytes if here.cgroup else None,
        "cache_fits_bytes": min(fits, experts.expert_bytes),
        "regime": regime(fits, file),
    }


def regime(cache_bytes: int, file: ModelFile) -> str:
    """What a cache of this size means for this model: `dense`, `all`, `some` or `few`.

    `few`: below one token's demand, where most routings miss. What share of reads the others hit
    depends on the routing, so no figure is given.
    """
    experts = file.experts
    if not experts.entry_bytes:
        return "dense"
    if cache_bytes >= experts.expert_bytes:
        return "all"
    return "some" if cache_bytes > experts.token_demand_bytes else "few"


def kv_bytes(file: ModelFile, ctx: int) -> int | None:
    """An upper estimate of the KV cache at 16 bits, or None where the header does not tell.

    Counts every layer as one of full attention: window and recurrent layers need less.
    """
    heads = file.arch_value("attention.head_count")
    kv_heads = file.arch_value("attention.head_count_kv", heads)
    width = file.arch_value("embedding_length")
    if not (heads and kv_heads and width and file.experts.n_layer and ctx):
        return None
    n_layer = file.experts.n_layer
    per_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * n_layer
    default_head = largest(width) // max(1, largest(heads))
    key = largest(file.arch_value("attention.key_length", default_head))
    value = largest(file.arch_value("attention.value_length", default_head))
    rank = largest(file.arch_value("attention.kv_lora_rank"))
    if rank:
        # Compressed attention keeps one row for all heads, and the rotated part beside it.
        return ctx * n_layer * 2 * (rank + largest(file.arch_value("rope.dimension_count")))
    return int(ctx * 2 * sum(per_layer) * (key + value))


def _print(facts: dict[str, Any]) -> None:
    per_layer = list(facts["expert_bytes_by_layer"].values())
    parts = f" in {facts['parts']} parts" if facts["parts"] > 1 else ""
    rows = [
        ("model", f"{one_line(facts['name'])} ({one_line(facts['arch'])})"),
        ("file", f"{Path(facts['path']).name}, {size(facts['file_bytes'])}{parts}"),
        ("layers", f"{facts['n_layer']}, of which {len(per_layer)} have experts"),
    ]
    if per_layer:
        rows += [
            ("experts", f"{facts['n_expert']} per layer, {facts['n_expert_used']} used per token"),
            ("types", ", ".join(facts["expert_types"])),
            ("one expert", f"{size_range(per_layer)} per layer"),
            ("all experts", size(facts["expert_bytes_total"])),
            ("token demand", f"{size(facts['token_demand_bytes'])} of experts for one token"),
            ("layer demand", f"{size(facts['layer_demand_bytes'])} in the widest layer"),
        ]
    kv = facts["kv_bytes_estimate"]
    rows += [
        ("dense weights", _dense_line(facts)),
        ("KV cache", f"about {size(kv)} at {facts['ctx']} tokens" if kv else "unknown"),
        ("chat template", "yes" if facts["chat_template"] else "no: it completes raw text"),
        ("memory here", _memory_line(facts)),
        ("cache that fits", _cache_line(facts)),
    ]
    console.table(rows)


def _dense_line(facts: dict[str, Any]) -> str:
    rows = facts["row_bytes"]
    left = f", of which {size(rows)} stay in the file (a token reads one row)" if rows else ""
    return f"{size(facts['dense_bytes'])}{left}"


def _memory_line(facts: dict[str, Any]) -> str:
    limit = facts["memory_limit_bytes"]
    limited = f", limited to {size(limit)} by a control group" if limit else ""
    return f"{size(facts['available_bytes'])} available{limited}"


def _cache_line(facts: dict[str, Any]) -> str:
    fits = size(facts["cache_fits_bytes"])
    demand = size(facts["token_demand_bytes"])
    return {
        "dense": "nothing to cache: this model has no experts; run it with --no-stream",
        "all": f"{fits}: every expert, so each is read once",
        "some": f"{fits}: more than one token needs ({demand}), so experts used again are hits",
        "few": f"{fits}: less than one token needs ({demand}), so most routings are misses;\n"
        "free memory, use a smaller model, or fewer experts (--n-expert-used, lossy)",
    }[facts["regime"]]


def _expert_types(file: ModelFile) -> list[str]:
    n_expert = file.experts.n_expert
    return sorted(
        {
            entry.type_name
            for entry in file.tensors.values()
            if n_expert > 1 and len(entry.shape) == 3 and entry.shape[2] == n_expert
        }
    )
