"""The compiled part of the callback (`engine/native/*.c`): found, checked, and declared.

`hatch_build.py` compiles it when tuiwork is installed. Where that could not be done, `library` is
None, `reason` says why, and Python does the same work.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "native" / "core.so"
VERSION = 1
MOST_STEPS = 8
"""Nodes between a routing and what its router saw, at most."""
UNMARKED, MARKED, EXPERTS = 0, 1, 2
"""What the callback knows of a node: nothing, that Python must see it, that it uses experts."""

_int, _i32, _i64, _pointer = ctypes.c_int, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Settings(ctypes.Structure):
    """`struct settings`: what a decode may do."""

    _fields_ = [
        *((name, _i64) for name in ("clock", "budget_bytes")),
        *((name, _i32) for name in ("overlap", "prefetch", "steady", "top_k", "n_sure")),
        *((name, _i32) for name in ("most_under_way", "keeps_edges", "moves_pages", "poison")),
        *((name, _i32) for name in ("most_delay_us", "refuses_moves")),
        ("least_share", ctypes.c_double),
    ]


class Counts(ctypes.Structure):
    """`struct counts`: what happened so far."""

    NAMES = (
        *("hits", "misses", "evictions", "moved", "apart"),
        *("reads", "read_bytes", "io_ns", "stall_ns", "mgmt_ns", "routed"),
    )
    _fields_ = [(name, _i64) for name in NAMES]


class Arrays(ctypes.Structure):
    """`struct arrays`: where the memory of Python's arrays is."""

    NAMES = (
        *("resident", "parts", "worth", "nearness", "last"),
        *("state", "hits", "misses", "last_used"),
        *("named", "routed", "right", "read", "used", "late"),
        *("routings", "experts_routed"),
        *("lane_bytes", "lane_reads", "lane_busy_ns", "lane_latencies"),
    )
    _fields_ = [(name, _pointer) for name in NAMES]


class Router(ctypes.Structure):
    """`struct router`: how a layer's experts are guessed."""

    _fields_ = [
        *((name, _pointer) for name in ("graph", "plan", "vector", "product")),
        *((name, _pointer) for name in ("bias", "selection_bias")),
        *((name, _i32) for name in ("n_rows", "n_columns", "activation")),
    ]


class Front(ctypes.Structure):
    """`struct front`: what the eval callback knows of the present graph."""

    _fields_ = [
        *((name, _i64) for name in ("index", "since_mark", "visited", "known", "n_expected")),
        *((name, _pointer) for name in ("expected", "roles", "layers", "banks", "names")),
        *((name, _i64) for name in ("stopped", "routing", "failed")),
        *((name, _pointer) for name in ("core", "slow")),
        *((name, _i32) for name in ("data_offset", "shape_offset")),
        *((name, _i32) for name in ("sources_offset", "name_offset")),
    ]


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "core_new": (_pointer, _int, _int, _int, _int, *(_pointer,) * 4),
    "core_free": (None, _pointer),
    "core_set_shard": (None, _pointer, _int, _pointer, _i64, _int),
    "core_add_bank": (None, _pointer, _int, _i64, _int, _int, *(_i64,) * 5),
    "core_set_router": (None, _pointer, _int, _pointer),
    "core_set_steps": (None, _pointer, _int, _pointer, _int),
    "core_start_lane": (_int, _pointer),
    "core_stop_lanes": (None, _pointer),
    "core_take_over": (None, _pointer, _i64, _int, _i64),
    "core_settings": (ctypes.POINTER(Settings), _pointer),
    "core_counts": (ctypes.POINTER(Counts), _pointer),
    "core_resident_bytes": (_i64, _pointer),
    "core_present_layer": (_int, _pointer),
    "core_n_uses": (_i64, _pointer),
    "core_is_flying": (_int, _pointer),
    "core_gone": (_i64, _pointer, _pointer, _int),
    "core_failure": (_int, _pointer, _pointer),
    "core_load": (_int, _pointer, _int, _pointer, _int, _pointer, _pointer, _int),
    "core_asked": (_int, _pointer, _int, _int),
    "core_abandon": (None, _pointer),
    "core_settle": (None, _pointer),
    "core_inconsistency": (_int, _pointer),
}


def _load() -> tuple[Any, str]:
    try:
        # A call gives the interpreter's lock away: it may wait for the disk.
        loaded = ctypes.CDLL(str(PATH))
    except OSError as error:
        missing = "the compiled core is missing; with a C compiler, install tuiwork again"
        return None, str(error) if PATH.exists() else missing
    wanted = (VERSION, *map(ctypes.sizeof, (Settings, Counts, Arrays, Front, Router)))
    sizes = (_i64 * len(wanted))()
    loaded.core_sizes(sizes)
    if tuple(sizes) != wanted:
        return None, "the compiled core is another version's: install tuiwork again"
    for name, (restype, *argtypes) in _FUNCTIONS.items():
        function = loaded[name]
        function.restype, function.argtypes = restype, argtypes
        setattr(loaded, name, function)
    return loaded, ""


library, reason = _load()
"""The loaded library or None, and why there is none."""


def address_of_callback() -> int:
    """Of `core_on_node`, an eval callback whose data is a `Front`."""
    return ctypes.cast(library.core_on_node, _pointer).value or 0
