"""What a run can be told: every setting with its type, default, range and one-line meaning.

Pure: nothing here touches llama.cpp, the disk or the machine. A setting's TOML key is its field
name with dashes, under the table named like its part: `stream.cache-mb`.
"""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.errors import InputError

AUTO = "auto"
SMALLEST_CACHE_MIB = 1500
"""A smaller cache holds less than a token of any model worth streaming: all cost, no hits."""

LARGEST_MIB = 2**24
"""16 TiB: far above any machine, far below where byte counts stop fitting 64 bits."""

LARGEST_COUNT = 2**24
"""Bounds token counts, so that they fit every C integer of llama.cpp with room to spare."""


def setting(default: Any, doc: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field that carries its meaning and its allowed range."""
    metadata = {"doc": doc, "low": low, "high": high}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelPart:
    """Which model, and how much of the machine it computes with."""

    path: str = setting("", "the GGUF file; of a split model, its first part")
    ctx: int = setting(
        4096,
        "context length in tokens; 0: what the model was trained for",
        low=0,
        high=LARGEST_COUNT,
    )
    threads: int | Literal["auto"] = setting(
        AUTO, "compute threads; auto: one per physical core", low=1, high=512
    )
    batch: int = setting(
        0, "prompt tokens per prefill batch; 0: chosen from the cache size", low=0, high=4096
    )


@dataclass(frozen=True)
class StreamPart:
    """How experts get from disk into memory. Nothing here changes a byte of output."""

    enabled: bool = setting(True, "stream experts; false: plain llama.cpp with a mapped file")
    cache_mb: int | Literal["auto"] = setting(
        AUTO,
        "expert cache in MiB; 0: none, re-read every token; auto: from free memory",
        low=0,
        high=LARGEST_MIB,
    )
    cache_floor_mb: int | Literal["auto"] = setting(
        AUTO,
        "memory in MiB that an automatic cache leaves to the system; auto: a sixteenth of all "
        "there is, from 512 to 1536",
        low=0,
        high=LARGEST_MIB,
    )
    cache_ceil_mb: int = setting(
        0, "most an automatic cache may take, in MiB; 0: no ceiling", low=0, high=LARGEST_MIB
    )
    force_cache: bool = setting(False, f"allow a cache below {SMALLEST_CACHE_MIB} MiB")
    io_threads: int = setting(4, "parallel readers (I/O lanes)", low=1, high=64)
    o_direct: bool = setting(True, "read past the page cache where the filesystem allows it")
    overlap: Literal["auto", "on", "off"] = setting(
        AUTO, "read one projection of a layer's experts while another is computed; auto: on"
    )
    prefetch: Literal["auto", "on", "off"] = setting(
        AUTO,
        "read what the next layer will probably route to while this one computes; auto: where "
        "timing both shows that it pays, or, while experts may be dropped, always, in a way that "
        "does not depend on time",
    )
    warm_start: bool = setting(
        False,
        "after opening, read what earlier sessions of this model used most while nothing else is "
        "read, and remember what this one uses",
    )
    dense_weights: Literal["anon", "warm", "mmap"] = setting(
        "anon", "always-needed weights: own memory, pre-read page cache, or mapped on demand"
    )


@dataclass(frozen=True)
class RoutingPart:
    """Lossy settings: each of these changes what the model answers."""

    n_expert_used: int = setting(
        0, "lossy: experts per token; 0: the model's own number", low=0, high=1024
    )
    drop_cold_experts: float = setting(
        0.0,
        "lossy: leave out an expert that is not in the cache and weighs less than this "
        "fraction of a uniform share",
        low=0.0,
        high=1.0,
    )
    cold_policy: Literal["drop", "substitute"] = setting(
        "drop",
        "lossy: what happens to a cold, weak expert: left out, or replaced by a resident one",
    )
    drop_renorm: bool = setting(True, "survivors keep the routing's original total weight")
    drop_in_prefill: bool = setting(False, "lossy: drop while reading the prompt, too")


@dataclass(frozen=True)
class SamplingPart:
    """How the next token is chosen from the logits."""

    temp: float = setting(0.0, "temperature; 0: always the likeliest token", low=0.0, high=10.0)
    top_k: int = setting(
        40, "sample among this many likeliest tokens; 0: all", low=0, high=LARGEST_COUNT
    )
    top_p: float = setting(
        0.95, "sample among the tokens that make up this mass", low=0.0, high=1.0
    )
    min_p: float = setting(
        0.05, "leave out tokens below this fraction of the likeliest", low=0.0, high=1.0
    )
    seed: int = setting(1, "seed of the sampler", low=0, high=2**32 - 1)


@dataclass(frozen=True)
class RunPart:
    """What to generate."""

    prompt: str = setting("", "the user's message")
    system: str = setting("", "the system message; empty: none")
    n_predict: int = setting(256, "most tokens to generate", low=1, high=LARGEST_COUNT)
    stop: list[str] = setting([], "texts that end the answer")
    raw: bool = setting(False, "complete the prompt as it is, without the chat template")
    ignore_eos: bool = setting(False, "go on past the model's end tokens")


@dataclass(frozen=True)
class RunConfig:
    """Everything a run can be told, in the parts a profile has as tables."""

    description: str = setting("", "what situation this profile serves")
    model: ModelPart = field(default_factory=ModelPart)
    stream: StreamPart = field(default_factory=StreamPart)
    routing: RoutingPart = field(default_factory=RoutingPart)
    sampling: SamplingPart = field(default_factory=SamplingPart)
    run: RunPart = field(default_factory=RunPart)

    def replace(self, changes: dict[str, Any]) -> RunConfig:
        """A copy with dotted TOML keys (`stream.cache-mb`) set to new, already typed values."""
        parts: dict[str, dict[str, Any]] = {}
        own: dict[str, Any] = {}
        for key, value in changes.items():
            table, dot, name = key.partition(".")
            if dot:
                parts.setdefault(table, {})[name.replace("-", "_")] = value
            else:
                own[table.replace("-", "_")] = value
        for table, values in parts.items():
            own[table] = dataclasses.replace(getattr(self, table), **values)
        return dataclasses.replace(self, **own)

    def to_measure(self) -> RunConfig:
        """The same for a run that is measured: nothing in it comes from earlier sessions."""
        return self.replace({"stream.warm-start": False})


@dataclass(frozen=True)
class Setting:
    """One setting as help, validation and editors see it."""

    key: str
    type: Any  # a typing hint, such as `int | Literal["auto"]`
    default: Any
    doc: str
    low: float | None
    high: float | None

    @property
    def lossy(self) -> bool:
        """Whether turning this can change what the model answers."""
        return self.doc.startswith("lossy:")

    def lossy_at(self, value: Any) -> bool:
        """Whether `value` by itself changes what the model answers."""
        return (
            self.lossy and isinstance(value, (int, float)) and value > 0 and self.type is not bool
        )


def _collect(part: type, prefix: str) -> dict[str, Setting]:
    hints = get_type_hints(part)
    found: dict[str, Setting] = {}
    for f in dataclasses.fields(part):
        hint = hints[f.name]
        key = prefix + f.name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            found.update(_collect(hint, key + "."))  # type: ignore[arg-type]
            continue
        default = f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        meta = f.metadata
        found[key] = Setting(key, hint, default, meta["doc"], meta["low"], meta["high"])
    return found


SETTINGS: dict[str, Setting] = _collect(RunConfig, "")
"""Every setting by its dotted TOML key."""


LIVE_SETTINGS = frozenset(
    {
        "stream.cache-mb",
        "stream.io-threads",
        "stream.overlap",
        "stream.prefetch",
        "stream.force-cache",
        "routing.n-expert-used",
        "routing.drop-cold-experts",
        "routing.cold-policy",
        "routing.drop-renorm",
        "routing.drop-in-prefill",
    }
)
"""What can change between tokens, beside everything of `sampling` and `run`."""


def is_live(key: str) -> bool:
    """Whether a setting can change between tokens."""
    return key in LIVE_SETTINGS or key.startswith(("sampling.", "run."))


@dataclass(frozen=True)
class Problem:
    """A setting whose value cannot be used, and the other settings that make it so."""

    key: str
    message: str
    because: tuple[str, ...] = ()


def get(config: RunConfig, key: str) -> Any:
    """The value of a dotted TOML key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name.replace("-", "_"))
    return value


def allowed(setting: Setting) -> str:
    """What a setting accepts, in words."""
    choices = _choices(setting.type)
    kind = _plain_type(setting.type)
    if kind is bool:
        return "true or false"
    if kind is str:
        return "one of " + ", ".join(choices) if choices else "a text"
    if kind is list:
        return "a list of texts"
    noun = "a whole number" if kind is int else "a number"
    if setting.low is not None and setting.high is not None:
        noun += f" from {_bound(setting.low)} to {_bound(setting.high)}"
    return f"{noun}, or {', '.join(choices)}" if choices else noun


def check_value(setting: Setting, value: Any) -> str | None:
    """Why `value` does not suit `setting`, or None. An int suits a number, a bool does not."""
    choices = _choices(setting.type)
    kind = _plain_type(setting.type)
    if isinstance(value, str) and choices:
        return None if value in choices else f"{shown(value)} is not allowed: {allowed(setting)}"
    if not _fits(kind, value):
        return f"{shown(value)} is {_type_name(value)}, not {allowed(setting)}"
    # Written so that NaN, which compares false with everything, is out of range too.
    too_low = setting.low is not None and not value >= setting.low
    too_high = setting.high is not None and not value <= setting.high
    if too_low or too_high:
        return f"{shown(value)} is out of range: {allowed(setting)}"
    if isinstance(value, str) and "\0" in value:
        return f"{shown(value)} holds a NUL character, which no text or path can have"
    return None


def shown(value: Any) -> str:
    """A value as it is quoted in a message: on one line, and never longer than is useful."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else text[:70] + "…"


def validate(config: RunConfig) -> list[Problem]:
    """Every impossible value, and every pair of settings that cannot go together."""
    problems = [
        Problem(key, message)
        for key, spec in SETTINGS.items()
        if (message := check_value(spec, get(config, key))) is not None
    ]
    if problems:
        return problems
    cache = config.stream.cache_mb
    if isinstance(cache, int) and 0 < cache < SMALLEST_CACHE_MIB and not config.stream.force_cache:
        problems.append(
            Problem(
                "stream.cache-mb",
                f"{cache} MiB is refused: a cache this small costs more than it saves. "
                f"Use 0 (no cache), at least {SMALLEST_CACHE_MIB}, or auto; "
                "stream.force-cache = true overrides this",
            )
        )
    if config.routing.drop_cold_experts > 0 and cache == 0:
        problems.append(
            Problem(
                "routing.drop-cold-experts",
                "dropping cold experts needs the cache: without one every expert is cold. "
                "Set stream.cache-mb, or set this to 0",
                because=("stream.cache-mb",),
            )
        )
    return problems


def require_valid(config: RunConfig) -> None:
    """Raise InputError that names every problem of `config`."""
    problems = validate(config)
    if problems:
        raise InputError("; ".join(f"{p.key}: {p.message}" for p in problems))


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    found: tuple[str, ...] = ()
    for arg in get_args(hint):
        found += _choices(arg)
    return found


def _plain_type(hint: Any) -> type:
    if get_origin(hint) is list:
        return list
    for arg in (hint, *get_args(hint)):
        for plain in (bool, int, float, str):
            if arg is plain:
                found: type = plain
                return found
    return str  # a Literal of texts


def _bound(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def _fits(kind: type, value: Any) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _type_name(value: Any) -> str:
    names: dict[type, str] = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a table",
        datetime.datetime: "a date",
        datetime.date: "a date",
        datetime.time: "a time",
    }
    return names.get(type(value), f"a {type(value).__name__}")
