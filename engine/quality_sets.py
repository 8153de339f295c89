"""Which lossy settings are compared with the lossless run. Pure, but for reading a TOML file.

A set is a matrix: every combination of the values that its keys list. `--set-of` gives one on the
command line, a TOML file several (`[[sets]]`), and without either there is a default for the
model's top-k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import SETTINGS, RunConfig, check_value, get, shown
from engine.errors import InputError
from engine.profile import full_key, parse, parse_value, read_text, suggest

N_USED = "routing.n-expert-used"
FRACTION = "routing.drop-cold-experts"
POLICY = "routing.cold-policy"
RENORM = "routing.drop-renorm"

LOSSLESS_ROUTING = {
    key: spec.default for key, spec in SETTINGS.items() if key.startswith("routing.")
}
"""The defaults of every routing setting: nothing lossy."""

DEFAULT_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
MOST_SETTINGS = 200
"""Each takes about as long as the lossless run."""

LOSSLESS = "lossless"
DROP = "drop"
DROP_RAW = "drop, not renormalised"
SUBSTITUTE = "substitute"
FEWER = "fewer experts"
COMBINED = "combined"
FAMILIES = (DROP, DROP_RAW, SUBSTITUTE, FEWER)
"""Settings that differ in one number only, so that each makes a curve."""


@dataclass(frozen=True)
class Variant:
    """One setting to measure: what differs from the lossless run."""

    name: str
    family: str
    settings: dict[str, Any]
    """Typed values by dotted key; empty for the lossless run."""

    @property
    def strength(self) -> float:
        """The number by which a family's settings differ: the fraction, or experts per token."""
        return float(self.settings.get(FRACTION) or self.settings.get(N_USED) or 0)


REFERENCE = Variant(LOSSLESS, LOSSLESS, {})


def variant(settings: Mapping[str, Any]) -> Variant:
    """Name a setting by what it does. Values that are the lossless defaults say nothing."""
    changed = {k: v for k, v in settings.items() if v != LOSSLESS_ROUTING.get(k)}
    fraction, n_used = changed.get(FRACTION, 0.0), changed.get(N_USED, 0)
    substitutes = changed.get(POLICY) == "substitute"
    raw = changed.get(RENORM) is False and not substitutes
    in_prefill = bool(changed.get("routing.drop-in-prefill"))
    if not fraction:
        # Without a fraction the other knobs of dropping do nothing.
        changed = {N_USED: n_used} if n_used else {}
    words = [f"top-{n_used}"] if n_used else []
    if fraction:
        words.append(f"{'substitute' if substitutes else 'drop'} {fraction:g}")
        words += ["raw"] if raw else []
        words += ["+prefill"] if in_prefill else []
    family = _family(fraction, n_used, substitutes, raw)
    if fraction and in_prefill:
        family += ", in prefill too"
    return Variant(" ".join(words) or LOSSLESS, family, changed)


def _family(fraction: float, n_used: int, substitutes: bool, raw: bool) -> str:
    if n_used and fraction:
        return COMBINED
    if n_used:
        return FEWER
    if not fraction:
        return LOSSLESS
    return SUBSTITUTE if substitutes else DROP_RAW if raw else DROP


def default_variants(top_k: int) -> list[Variant]:
    """Drop fractions with and without renormalising, substitution, and fewer experts."""
    matrices: list[dict[str, list[Any]]] = [
        {FRACTION: list(DEFAULT_FRACTIONS), RENORM: [True, False]},
        {POLICY: ["substitute"], FRACTION: list(DEFAULT_FRACTIONS)},
        {N_USED: fewer_experts(top_k)},
    ]
    return [found for matrix in matrices for found in combinations(matrix)]


def fewer_experts(top_k: int) -> list[int]:
    """Numbers of experts below `top_k`, largest first: all of few, four of many."""
    if top_k <= 5:
        return list(range(top_k - 1, 0, -1))
    marks = (top_k - 1, round(0.75 * top_k), round(0.5 * top_k), round(0.25 * top_k))
    return sorted(set(marks), reverse=True)


def combinations(matrix: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Every combination of a matrix's values, the first key varying slowest.

    Raises InputError for too many.
    """
    keys = list(matrix)
    if math.prod(len(values) for values in matrix.values()) > MOST_SETTINGS:
        raise InputError(_too_many(math.prod(len(values) for values in matrix.values())))
    return [
        variant(dict(zip(keys, values, strict=True)))
        for values in itertools.product(*(matrix[key] for key in keys))
    ]


def parse_sets(texts: Sequence[str]) -> list[Variant]:
    """`--set-of` texts: `key=a,b,c`, several keys of one set joined by `+`.

    `cold-policy=substitute+drop-cold-experts=0.5,1.0`. Raises InputError.
    """
    return _distinct([found for text in texts for found in _parse_set(text)])


def _parse_set(text: str) -> list[Variant]:
    origin = f"--set-of {text}"
    matrix: dict[str, list[Any]] = {}
    for part in text.split("+"):
        name, equals, values = part.partition("=")
        if not equals or not name.strip() or not values.strip():
            raise InputError(
                f"{origin}: write it as key=value,value and join keys by +, for example "
                "drop-cold-experts=0.5,1.0+drop-renorm=false"
            )
        key = _key(name.strip(), origin)
        items = [parse_value(SETTINGS[key], item) for item in values.split(",")]
        _add(matrix, key, items, origin)
    return combinations(matrix)


def read_sets(path: Path) -> list[Variant]:
    """The sets of a TOML file: `[[sets]]`, each key with a value or a list. Raises InputError."""
    document = parse(read_text(path), path)
    unknown = [name for name in document if name != "sets"]
    tables = document.get("sets")
    if unknown or not isinstance(tables, list) or not tables:
        what = f"there is no {shown(unknown[0])} here" if unknown else "has no [[sets]]"
        raise InputError(
            f"{path}: {what}; write [[sets]] on a line of its own, and below it settings with "
            "the values to try, as in drop-cold-experts = [0.5, 1.0]"
        )
    found: list[Variant] = []
    for number, table in enumerate(tables, 1):
        found += _read_set(table, f"{path}: [[sets]] number {number}")
    return _distinct(found)


def _read_set(table: Any, origin: str) -> list[Variant]:
    if not isinstance(table, dict) or not table:
        raise InputError(f"{origin}: holds no settings")
    matrix: dict[str, list[Any]] = {}
    # `routing.n-expert-used = 2` makes a table of its own in TOML.
    inner = table.pop("routing", {})
    if not isinstance(inner, dict):
        raise InputError(f"{origin}: routing is no table of settings")
    for name, value in {**table, **inner}.items():
        _add(matrix, _key(name, origin), value if isinstance(value, list) else [value], origin)
    return combinations(matrix)


def _key(name: str, origin: str) -> str:
    key = full_key(name)
    if key is None:
        raise InputError(f"{origin}: there is no setting {shown(name)}{suggest(name)}")
    if not key.startswith("routing."):
        raise InputError(
            f"{origin}: {key} is not lossy: it changes no answer, so there is nothing to compare. "
            "Set it for all runs (--set), and compare settings of routing: "
            + ", ".join(k.partition(".")[2] for k in LOSSLESS_ROUTING)
        )
    return key


def _add(matrix: dict[str, list[Any]], key: str, values: list[Any], origin: str) -> None:
    if key in matrix:
        raise InputError(f"{origin}: {key} is there twice; list its values once")
    if not values:
        raise InputError(f"{origin}: {key} lists no value")
    for value in values:
        problem = check_value(SETTINGS[key], value)
        if problem:
            raise InputError(f"{origin}: {key}: {problem}")
    is_float = SETTINGS[key].type is float
    matrix[key] = [float(value) if is_float else value for value in values]


def _distinct(variants: Sequence[Variant]) -> list[Variant]:
    """Without repetitions, and without the lossless run, which is always measured."""
    found = {v.name: v for v in variants if v.family != LOSSLESS}
    if not found:
        raise InputError(
            "the chosen settings are all lossless: nothing would be compared. A fraction of 0 "
            "drops nothing; drop-renorm and cold-policy act only with drop-cold-experts"
        )
    if len(found) > MOST_SETTINGS:
        raise InputError(_too_many(len(found)))
    return list(found.values())


def _too_many(n: int) -> str:
    return (
        f"{n} settings are too many: at most {MOST_SETTINGS}, because each takes as long as the "
        "lossless run"
    )


def configured(config: RunConfig) -> Variant | None:
    """The lossy setting that a configuration itself asks for, or None."""
    found = variant({key: get(config, key) for key in LOSSLESS_ROUTING})
    return None if found.family == LOSSLESS else found


def check_fit(variants: Sequence[Variant], top_k: int, n_expert: int) -> list[Variant]:
    """The variants that differ from a model of this top-k. Raises InputError for impossible ones.

    A top-k that is the model's own is dropped from a setting, and the setting if nothing is left.
    """
    found = []
    for one in variants:
        n_used = one.settings.get(N_USED, 0)
        if n_used > n_expert:
            raise InputError(
                f"n-expert-used = {n_used}: the model has {n_expert} experts per layer and routes "
                f"to {top_k}"
            )
        settings = {k: v for k, v in one.settings.items() if k != N_USED or v != top_k}
        found.append(variant(settings))
    return _distinct(found)
