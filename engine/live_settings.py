"""Settings that can change between tokens, without opening the model again."""

from __future__ import annotations

from typing import Any

from engine.config import AUTO, SETTINGS, RunConfig, is_live, require_valid
from engine.errors import InputError
from engine.opening import OpenModel, new_store, read_as_asked
from engine.residency import ExpertCache
from engine.sizing import cold_rule
from engine.telemetry import MIB


def changed_config(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """`config` with live changes.

    Raises InputError for an unknown or impossible value, or one that needs the model reopened.
    """
    unknown = [key for key in changes if key not in SETTINGS]
    if unknown:
        raise InputError(f"there is no setting called {unknown[0]}")
    changed = config.replace(changes)
    require_valid(changed)
    for key in changes:
        if not is_live(key):
            raise InputError(f"{key} can only be changed by opening the model again")
    if changes.get("stream.cache-mb") == AUTO:
        raise InputError("stream.cache-mb can only be set to a number of MiB while it runs")
    return changed


def apply(opened: OpenModel, config: RunConfig, changes: dict[str, Any], *, poison: bool) -> None:
    """Make a streaming model run as `config` says, of which `changes` are new.

    Raises InputError or GraphError for a top-k that this model cannot change to; then nothing has
    changed.
    """
    assert opened.router is not None and opened.lanes is not None
    opened.router.loader.settle()
    if "routing.n-expert-used" in changes:
        _set_top_k(opened, config.routing.n_expert_used)
    if "stream.io-threads" in changes:
        opened.lanes.set_count(config.stream.io_threads)
    if "stream.cache-mb" in changes:
        _set_budget(opened, int(config.stream.cache_mb) * MIB, poison=poison)
        if not config.model.batch:
            opened.fit_batch(opened.store.budget_bytes)
    opened.notes += [n for n in read_as_asked(opened, config) if n not in opened.notes]
    opened.router.rule = cold_rule(config)
    opened.hook.mark_nodes()


def _set_top_k(opened: OpenModel, top_k: int) -> None:
    router = opened.router
    assert router is not None
    if top_k > opened.top_k:
        raise InputError(
            f"routing.n-expert-used = {top_k}: the model was opened with {opened.top_k} experts "
            "per token; more need it opened again"
        )
    live = 0 if top_k in (0, opened.top_k) else top_k
    router.check_live_top_k(live)
    router.live_top_k = live


def _set_budget(opened: OpenModel, budget: int, *, poison: bool) -> None:
    router = opened.router
    assert router is not None
    if budget and isinstance(router.store, ExpertCache):
        router.store.set_budget(budget)
    else:
        router.store.close()
        router.loader.use_store(new_store(opened, budget, poison=poison))
