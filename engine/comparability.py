"""What makes runs incomparable, or one of them worth little: reasons to doubt a ratio.

Pure. A caveat is made of what the files say; what they do not say is named as unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from engine.run_figures import Run
from engine.stats import FEWEST_TOKENS
from engine.steadiness import drift, warm_up

FEW_TOKENS = 64
"""Fewer say little about a run: intervals get wide, and cover less often than they promise."""

SAME_SHARE_PCT = 1.0
"""At one setting, dropped shares closer than this many percent of the routings are the same."""

MUCH_OVERHEAD = 0.05
"""Time between decodes, as a share of the token's, above which it is worth a word."""


@dataclass(frozen=True)
class Caveat:
    """One reason for doubt."""

    kind: str
    text: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    """What is so, and in which runs, counted from 0."""
    between: bool
    """Whether it is about pairs of runs of different groups, or about each run by itself."""
    advice: str = ""

    def concerns(self, a: int, b: int) -> bool:
        """Whether it is a reason to doubt the ratio of these two runs."""
        found = [n for n, (_, runs) in enumerate(self.groups) for run in (a, b) if run in runs]
        return len(set(found)) > 1 if self.between else bool(found)


_ORDINALS = ("first", "second", "third", "last")

Told = Callable[[Run], "str | None"]


def caveats(runs: Sequence[Run]) -> list[Caveat]:
    """Every reason for doubt, those about pairs first."""
    found: dict[str, Caveat] = {}
    for kind, text, told in _SHARED_FACTS:
        groups = _grouped(runs, told)
        if len(groups) > 1:
            # Models of different names have different shapes, too: once is enough.
            found.setdefault(kind, Caveat(kind, text, groups, between=True))
    alone = (_sampled, _traced, _few_tokens, _warm_ups, _drifts, _overhead, _unfinished)
    found_alone = [check(runs) for check in alone]
    return [
        *found.values(),
        *_dropped(runs),
        *(caveat for caveat in found_alone if caveat is not None and caveat.groups),
    ]


def unchecked(runs: Sequence[Run]) -> dict[str, tuple[int, ...]]:
    """What could not be compared because runs do not tell it, with those runs."""
    silent = {
        what: tuple(n for n, run in enumerate(runs) if told(run) is None)
        for what, told in _NECESSARY.items()
    }
    return {what: ns for what, ns in silent.items() if ns}


def _grouped(runs: Sequence[Run], told: Told) -> tuple[tuple[str, tuple[int, ...]], ...]:
    groups: dict[str, list[int]] = {}
    for n, run in enumerate(runs):
        value = told(run)
        if value is not None:
            groups.setdefault(value, []).append(n)
    return tuple((value, tuple(members)) for value, members in groups.items())


def _key(*keys: str) -> Told:
    """What the preamble says under the first of these keys that it has; 4 and 4.0 are one."""

    def told(run: Run) -> str | None:
        number = run.number(*keys)
        return f"{number:g}" if number is not None else run.metrics.preamble_value(*keys)

    return told


def _together(*keys: str) -> Told:
    """These keys' values in one; None unless the preamble has them all."""

    def told(run: Run) -> str | None:
        found = {key: run.metrics.preamble_value(key) for key in keys}
        known = None not in found.values()
        return ", ".join(f"{key} {text}" for key, text in found.items()) if known else None

    return told


def _model_name(run: Run) -> str | None:
    name = run.metrics.preamble_value("model", "path")
    return PurePath(name.replace("\\", "/")).name if name else None


def _engine(run: Run) -> str | None:
    return run.metrics.format or None


def _version(run: Run) -> str | None:
    version = run.metrics.preamble_value("version")
    llama = run.metrics.preamble_value("llama_cpp")
    if version is None:
        return None
    openmp = " with OpenMP" if run.number("openmp") == 1 else ""
    core = ", experts loaded in Python" if _loads_in_python(run) else ""
    return f"{version}, llama.cpp {llama}{openmp}{core}" if llama else version


def _loads_in_python(run: Run) -> bool:
    """Not for being traced, which `_traced` tells, and not for having no experts to load."""
    is_traced = run.number("route_traced") or run.number("io_traced")
    is_compiled = run.number("compiled_core") != 0
    return run.number("moe_stream") == 1 and not (is_traced or is_compiled)


def _prompt(run: Run) -> str | None:
    count = run.metrics.summary.get("n_prompt")
    return f"{count} tokens" if count else None


def _fed(run: Run) -> str | None:
    seed, forced = run.number("random_tokens"), run.number("forced_routes")
    if seed is None and forced is None:
        return None
    tokens = f"random tokens of seed {seed:g}" if seed is not None and seed >= 0 else "its answer"
    return f"{tokens}, forced routes" if forced else tokens


_SHARED_FACTS: tuple[tuple[str, str, Told], ...] = (
    ("model", "different models", _model_name),
    ("model", "different models", _together("arch", "n_layer", "n_expert")),
    ("model", "different models", _together("expert_bytes_total", "dense_bytes")),
    ("context", "different context lengths", _key("n_ctx", "ctx")),
    ("threads", "different numbers of threads", _key("threads", "n_threads")),
    ("version", "different engines", _engine),
    ("version", "different versions", _version),
    ("machine", "different processors", _key("cpu")),
    ("top_k", "different numbers of experts per token", _key("n_expert_used")),
    ("prompt", "different prompts", _prompt),
    ("fed", "different tokens were fed to the model", _fed),
)


def _temperature(run: Run) -> float | None:
    return run.number("temp", "temperature")


def _sampled(runs: Sequence[Run]) -> Caveat:
    found = tuple(
        (f"temperature {warmth:g}", (n,))
        for n, run in enumerate(runs)
        if (warmth := _temperature(run)) is not None and warmth > 0
    )
    return Caveat(
        "sampled",
        "sampled, so that another text may have been timed",
        found,
        between=False,
        advice="run with --temp 0",
    )


def _trace_kinds(run: Run) -> str | None:
    """Which traces were recorded; None if the file does not tell."""
    told = {
        kind: run.metrics.preamble_value(f"{kind}_traced", f"{kind}_trace")
        for kind in ("route", "io")
    }
    if set(told.values()) == {None}:
        return None
    return " and ".join(
        f"{kind} trace" for kind, text in told.items() if text not in (None, "0", "")
    )


def _traced(runs: Sequence[Run]) -> Caveat:
    found = tuple((kinds, (n,)) for n, run in enumerate(runs) if (kinds := _trace_kinds(run)))
    return Caveat(
        "traced", "recorded a trace, which costs time", found, between=False, advice="run without"
    )


def _drop_setting(run: Run) -> float | None:
    return run.number("drop_cold_experts", "drop_cold_frac")


def _drop_share(run: Run) -> float | None:
    return run.drop_pct


def _substitute_share(run: Run) -> float | None:
    return run.substitute_pct


_SHARES: tuple[tuple[str, str, Callable[[Run], float | None]], ...] = (
    ("drop_rate", "different shares of experts dropped", _drop_share),
    ("substitute_rate", "different shares of experts replaced", _substitute_share),
)


def _dropped(runs: Sequence[Run]) -> list[Caveat]:
    """Different shares of experts left out, or replaced."""
    found = []
    for kind, text, share in _SHARES:
        groups: list[tuple[float | None, float, list[int]]] = []
        for n, run in enumerate(runs):
            pct, setting = share(run), _drop_setting(run)
            if pct is None:
                continue
            for other_setting, other_pct, members in groups:
                near = SAME_SHARE_PCT if setting == other_setting else 0.05
                if abs(pct - other_pct) <= near:
                    members.append(n)
                    break
            else:
                groups.append((setting, pct, [n]))
        if len(groups) > 1:
            shown = tuple((f"{pct:.1f} %", tuple(members)) for _, pct, members in groups)
            found.append(
                Caveat(
                    kind,
                    text,
                    shown,
                    between=True,
                    advice="speed is not all that differs: measure quality, too",
                )
            )
    return found


def _few_tokens(runs: Sequence[Run]) -> Caveat:
    found = tuple((str(len(run)), (n,)) for n, run in enumerate(runs) if len(run) < FEW_TOKENS)
    return Caveat(
        "few_tokens",
        f"fewer than {FEW_TOKENS} tokens",
        found,
        between=False,
        advice=f"run longer; below {FEWEST_TOKENS} no pair counts as separated",
    )


def _warm_ups(runs: Sequence[Run]) -> Caveat:
    sizes = [warm_up(run.token_ms) for run in runs]
    found = tuple((f"{size} tokens", (n,)) for n, size in enumerate(sizes) if size)
    cut = max((run.skip + size for run, size in zip(runs, sizes, strict=True) if size), default=0)
    too_short = any(len(run.metrics) - cut < FEW_TOKENS for run in runs)
    return Caveat(
        "warm_up",
        "starts slower than it goes on",
        found,
        between=False,
        advice=f"--skip {cut} cuts that off, from every run"
        + (f", but leaves one with fewer than {FEW_TOKENS} tokens" if too_short else ""),
    )


def _drifts(runs: Sequence[Run]) -> Caveat:
    found = []
    for n, run in enumerate(runs):
        change = drift(run.token_ms[warm_up(run.token_ms) :])
        if change is not None:
            words = (
                f"{change.slowest_tok_s:.3g} tok/s in its {_ORDINALS[change.slowest]} quarter, "
                f"{change.fastest_tok_s:.3g} in its {_ORDINALS[change.fastest]}"
            )
            found.append((words, (n,)))
    return Caveat(
        "drift",
        "the rate drifts within the run",
        tuple(found),
        between=False,
        advice="repeat it, interleaved with the others (tuiwork sweep)",
    )


def _overhead(runs: Sequence[Run]) -> Caveat | None:
    known = [run for run in runs if run.has_loop_times]
    if known and len(known) < len(runs):
        groups = (
            ("not told", tuple(n for n, run in enumerate(runs) if not run.has_loop_times)),
            ("told", tuple(n for n, run in enumerate(runs) if run.has_loop_times)),
        )
        return Caveat(
            "loop_overhead",
            "time between decodes (loop_overhead_ms) is not in all files",
            groups,
            between=True,
            advice="pairs of both kinds compare decodes alone",
        )
    much = tuple(
        (f"{100 * share:.0f} %", (n,))
        for n, run in enumerate(runs)
        if (share := 1 - float(run.decode_ms.sum() / run.token_ms.sum())) > MUCH_OVERHEAD
    )
    return Caveat("loop_overhead", "much time between decodes", much, between=False)


def _unfinished(runs: Sequence[Run]) -> Caveat:
    """Files without a summary, or with one about another number of tokens than they have."""
    found = []
    for n, run in enumerate(runs):
        counted = run.metrics.summary.get("tokens")
        if not run.metrics.summary:
            found.append(("no summary line", (n,)))
        elif counted is not None and counted != str(len(run.metrics)):
            found.append((f"{len(run.metrics)} rows, its summary says {counted}", (n,)))
    return Caveat("incomplete", "may not be the whole run", tuple(found), between=False)


_NECESSARY: dict[str, Callable[[Run], object]] = {
    "model": _model_name,
    "context": _key("n_ctx", "ctx"),
    "threads": _key("threads", "n_threads"),
    "version": _version,
    "sampling": _temperature,
    "tracing": _trace_kinds,
    "drop rate": _drop_share,
}
