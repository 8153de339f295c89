"""A run in figures: what it was set to, and how it went, in words and as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from engine.config import SETTINGS, RunConfig, get
from engine.results import StreamCounts
from tuiwork.text import MIB, one_line, size

if TYPE_CHECKING:
    from engine.results import Answer
    from engine.session import Session


def chosen_line(session: Session) -> str:
    """What runs and how: one line for the start of a run."""
    info, used = session.model_info, session.resolved
    name = f"{one_line(info.name)} ({one_line(info.arch)})"
    common = f"{used.model.threads} threads, context {info.ctx}"
    if not used.stream.enabled:
        return f"{name}, not streaming: mapped file, {common}{lossy_words(used)}"
    cache = f"cache {used.stream.cache_mb} MiB" if used.stream.cache_mb else "no cache"
    if session.cache_reason:
        cache += f" ({session.cache_reason})"
    direct = "O_DIRECT" if used.stream.o_direct else "buffered"
    lossy = lossy_words(used)
    return (
        f"{name}, {info.n_expert} experts, top-{info.n_expert_used}: streaming with {cache}, "
        f"{used.stream.io_threads} lanes ({direct}), {common}{lossy}"
    )


def lossy_words(config: RunConfig) -> str:
    """`; LOSSY: …` with the settings that change the answer, or nothing."""
    changed = [
        f"{key.rpartition('.')[2]} = {get(config, key)}"
        for key, spec in SETTINGS.items()
        if spec.lossy_at(get(config, key))
    ]
    return f"; LOSSY: {', '.join(changed)}" if changed else ""


def answer_line(answer: Answer) -> str:
    """How one answer went: one line."""
    parts = [f"{answer.n_generated} tokens"]
    if answer.tok_s is not None:
        parts.append(f"{answer.tok_s:.2f} tok/s")
    prompt = f"prompt {answer.n_prompt} tokens"
    if answer.n_reused:
        prompt += f" ({answer.n_reused} reused)"
    if answer.prefill_tok_s is not None:
        prompt += f" at {answer.prefill_tok_s:.1f} tok/s"
    parts.append(prompt)
    figures = answer.figures
    hits = figures.get("cache_hit_pct", -1)
    if hits >= 0:
        parts.append(f"hits {hits:.1f} %")
    if figures.get("experts_routed", 0) > 0 and figures["read_MiB"] >= 0:
        parts.append(_read_words(figures))
    if figures.get("experts_dropped", 0) > 0:
        share = 100 * figures["experts_dropped"] / figures["experts_routed"]
        parts.append(f"dropped {share:.1f} % of routings")
    parts.append(_STOP_WORDS.get(answer.stop_reason, answer.stop_reason))
    return " · ".join(parts)


_STOP_WORDS = {
    "eos": "ended by itself",
    "stop": "met a stop text",
    "length": "reached its length",
    "context": "the context is full",
    "cancelled": "stopped",
}


def _read_words(figures: dict[str, float]) -> str:
    tokens = figures.get("tokens", 0)
    if tokens <= 0:
        return "read nothing"
    return f"read {size(figures['read_MiB'] * MIB / tokens)} per token"


def run_document(session: Session, answer: Answer) -> dict[str, Any]:
    """The document of `run --json`. Times in seconds, sizes in bytes; null where not measured."""
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tokens": answer.tokens,
        "n_prompt": answer.n_prompt,
        "n_reused": answer.n_reused,
        "n_generated": answer.n_generated,
        "tok_s": answer.tok_s,
        "prefill_tok_s": answer.prefill_tok_s,
        "stop_reason": answer.stop_reason,
        "stream": stream_counts(session),
        "layers": [dataclasses.asdict(counts) for counts in session.layer_counts()],
        "model": dataclasses.asdict(session.model_info),
        "config": config_document(session.resolved),
        "summary": answer.figures,
        "notes": session.notes,
    }


def stream_counts(session: Session) -> dict[str, Any]:
    """What was looked up and read so far, prefill included; null where nothing streams."""
    counts = session.counts()
    if counts is None:
        return dict.fromkeys(field.name for field in dataclasses.fields(StreamCounts))
    return dataclasses.asdict(counts)


def config_document(config: RunConfig) -> dict[str, Any]:
    """A configuration as its profile would be: tables of TOML keys."""
    document: dict[str, Any] = {}
    for key in SETTINGS:
        table, dot, name = key.partition(".")
        if dot:
            document.setdefault(table, {})[name] = get(config, key)
        else:
            document[key] = get(config, key)
    return document
