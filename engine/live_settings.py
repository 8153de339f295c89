"""Settings that can change between tokens, without opening the model again."""

from __future__ import annotations

from typing import Any

from engine.config import SETTINGS, RunConfig, is_live, require_valid
from engine.errors import InputError
from engine.open_model import OpenModel
from engine.residency import ExpertCache
from engine.sizing import choose_cache, cold_rule
from engine.streaming import new_store, read_as_asked


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
    return changed


def apply(opened: OpenModel, config: RunConfig, changes: dict[str, Any], *, poison: bool) -> None:
    """Make a streaming model run as `config` says, of which `changes` are new.

    Raises InputError or GraphError for a top-k that this model cannot change to, or for more lanes
    than the system gives; then nothing has changed.
    """
    assert opened.router is not None and opened.lanes is not None
    loader = opened.router.loader
    loader.settle()
    try:
        _apply_settled(opened, config, changes, poison=poison)
    finally:
        loader.resume()


def _apply_settled(
    opened: OpenModel, config: RunConfig, changes: dict[str, Any], *, poison: bool
) -> None:
    assert opened.router is not None and opened.lanes is not None
    live_top_k = opened.router.live_top_k
    if "routing.n-expert-used" in changes:
        live_top_k = _live_top_k(opened, config.routing.n_expert_used)
    if "stream.io-threads" in changes:
        opened.lanes.set_count(config.stream.io_threads)
    opened.router.live_top_k = live_top_k
    if "stream.cache-mb" in changes:
        taken = opened.store.resident_bytes
        choice = choose_cache(config, opened.layers, opened.top_k, taken)
        resize(opened, config, choice.budget_bytes, poison=poison)
    if any(key.startswith(("stream.", "routing.")) for key in changes):
        # Else what timing has found out about prefetch still holds.
        read_as_asked(opened, config)
    opened.router.rule = cold_rule(config)
    opened.hook.mark_nodes()


def resize(opened: OpenModel, config: RunConfig, budget_bytes: int, *, poison: bool) -> None:
    """Give a streaming model another cache budget, and the batch that fits it."""
    _set_budget(opened, budget_bytes, poison=poison)
    if not config.model.batch:
        opened.fit_batch(budget_bytes)


def _live_top_k(opened: OpenModel, top_k: int) -> int:
    router = opened.router
    assert router is not None
    if top_k > opened.top_k:
        raise InputError(
            f"routing.n-expert-used = {top_k}: the model was opened with {opened.top_k} experts "
            "per token; more need it opened again"
        )
    live = 0 if top_k in (0, opened.top_k) else top_k
    router.check_live_top_k(live)
    return live


def _set_budget(opened: OpenModel, budget: int, *, poison: bool) -> None:
    router = opened.router
    assert router is not None
    router.loader.settle()
    if budget and isinstance(router.store, ExpertCache):
        router.store.set_budget(budget)
    else:
        router.loader.stop_warming()
        before, store = router.store, new_store(opened, budget, poison=poison)
        router.loader.use_store(store)
        before.close()
    router.loader.resume()
