"""What happens where a layer's experts are chosen: decide, then load.

Experts are loaded at the routing node, the first place where they are known. Only while experts may
be dropped or routings are observed does loading wait for the node where the layer's weights are
final, because only there is it known what each expert is worth.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns

import numpy as np

from engine import policy
from engine.compiled import CompiledLoading
from engine.counters import RoutingCounters, StepCounters
from engine.errors import GraphError
from engine.expert_store import ExpertStore
from engine.ggml import Tensor
from engine.graph import GraphPlan
from engine.guessing import Guess, Guesser
from engine.lane_jobs import Read
from engine.loading import ExpertLoader
from engine.marks import Mark, Role
from engine.node_values import ids_of_one, matrix_at, weights_at, weights_of_one
from engine.observed import Routes, Routing, as_handled
from engine.policy import ColdRule
from engine.prefetch_trial import PrefetchTrial
from engine.token_core import TokenSettings


class ExpertRouter:
    """Handles the marked nodes of each layer. Lives on the callback's thread."""

    def __init__(
        self, plan: GraphPlan, loader: ExpertLoader, counters: RoutingCounters, top_k: int
    ) -> None:
        """`top_k`: experts per token as the model was opened."""
        self.plan = plan
        self.loader = loader
        self.counters = counters
        self.compiled = CompiledLoading(loader, counters)
        self.top_k = top_k
        self.prefill = False
        self.guesser: Guesser | None = None
        """Names the next layer's experts, if they are to be read ahead."""
        self.trial: PrefetchTrial | None = None
        """Says for which decoded tokens; None: for all."""
        self.rule: ColdRule | None = None
        self.live_top_k = 0
        self.routes: Routes | None = None
        self.observer: Callable[[Routing], None] | None = None
        self._addresses: dict[tuple[Role, int], int] = {}
        self._substituted: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def store(self) -> ExpertStore:
        """Where the experts are."""
        return self.loader.store

    @property
    def step(self) -> StepCounters:
        """What the present decode did so far."""
        return self.loader.step

    def begin_decode(self, n_tokens: int, *, prefill: bool) -> None:
        """A decode of so many tokens comes next."""
        if prefill != self.prefill and self.loader.ahead.steady:
            # Compiled code begins and ends with nothing under way; then so must Python.
            self.loader.settle()
            self.loader.resume()
        self.prefill = prefill
        wanted = None
        is_watched = self.observer is not None or self.loader.on_reads is not None
        if n_tokens == 1 and not (prefill or is_watched):
            wanted = TokenSettings(
                overlap=self.loader.overlap,
                prefetch=self.guesser is not None and self.prefetches_now,
                steady=self.loader.ahead.steady,
                top_k=self.present_top_k,
                least_share=self.least_share,
            )
        self.compiled.begin_decode(self.guesser, wanted)
        self.loader.begin_step()

    @property
    def only_loads(self) -> bool:
        """Whether a token's routing is loaded as it is, and nobody looks at it."""
        return not (self.routes or self.live_top_k or self.rule or self.observer)

    def marks(self) -> Iterator[tuple[str, Mark]]:
        """The nodes that the present settings need, by name."""
        at_weights = self._waits_for_weights
        for index, layer in enumerate(self.plan.layers):
            final = layer.final_weights if at_weights else None
            yield layer.routing, Mark(Role.ROUTING, index, stages=final is None)
            if final:
                yield final, Mark(Role.FINAL_WEIGHTS, index, stages=True)
            # Where the model neither normalises nor scales, both are one node.
            if self.live_top_k and layer.raw_weights and layer.raw_weights != final:
                yield layer.raw_weights, Mark(Role.RAW_WEIGHTS, index)
            if self._substitutes and layer.ranking and layer.probabilities:
                yield layer.ranking, Mark(Role.RANKING, index, visit=False)
                yield layer.probabilities, Mark(Role.PROBABILITIES, index, visit=False)
            if self.loader.overlap:
                for bank, user in enumerate(layer.bank_users):
                    yield user, Mark(Role.EXPERTS, index, bank=bank)

    @property
    def lossy(self) -> bool:
        """Whether anything but the model's own choice may run now."""
        return bool(self.rule or self.live_top_k)

    @property
    def reads_overlap(self) -> bool:
        """Whether anything is read while the model computes."""
        return self.loader.overlap or self.guesser is not None

    @property
    def _substitutes(self) -> bool:
        return self.rule is not None and self.rule.substitute

    @property
    def _waits_for_weights(self) -> bool:
        dropping = self.rule is not None and not self.rule.substitute
        return dropping or self.observer is not None

    def check_live_top_k(self, top_k: int) -> None:
        """Raise GraphError where the model's graph does not show how to leave slots out."""
        if top_k and not all(layer.raw_weights for layer in self.plan.layers):
            raise GraphError(
                "this model's graph does not show where routing weights are made, so experts "
                "per token can only be changed by opening the model again"
            )

    def seen(self, mark: Mark, address: int) -> None:
        """Remember where a marked node is in the graph that comes now."""
        self._addresses[mark.role, mark.index] = address

    def visit(self, mark: Mark, address: int) -> None:
        """Handle a marked node that was just computed."""
        self.loader.take_store_back()
        if mark.role is Role.ROUTING:
            self._on_routing(mark.index, address)
        elif mark.role is Role.RAW_WEIGHTS:
            self._mask_tail(mark.index, address)
        elif mark.role is Role.FINAL_WEIGHTS:
            self._on_weights(mark.index, address)

    def _on_routing(self, index: int, address: int) -> None:
        started = perf_counter_ns()
        tensor = Tensor.from_address(address)
        if self.only_loads and tensor.ne[1] == 1:
            # Hot path. One token's ids lie side by side whatever the strides of the view are.
            chosen = (ctypes.c_int32 * tensor.ne[0]).from_address(tensor.data)[:]
            self._count_routed(index, 1, len(chosen))
            self._stage(index, chosen, started)
            return
        ids = matrix_at(tensor, ctypes.c_int32)
        if self.routes is not None:
            ids[...] = self.routes.ids(index, len(ids))
            # A diagnostic's own work is not the engine's.
            started = perf_counter_ns()
        used = self._used(ids)
        self._count_routed(index, len(used), used.size)
        if self._substitutes and self._rule_applies:
            self._substitute(index, used)
        self._repeat_first(ids)
        if self._waits_for_weights and self.plan.layers[index].final_weights:
            self.step.mgmt_ns += perf_counter_ns() - started
        else:
            self._stage(index, used.ravel().tolist(), started)

    def _repeat_first(self, ids: np.ndarray) -> None:
        """Slots behind the live top-k weigh nothing; let them name an expert that is used."""
        if self.live_top_k:
            ids[:, self.live_top_k :] = ids[:, :1]

    def _used(self, ids: np.ndarray) -> np.ndarray:
        return ids[:, : self.live_top_k] if self.live_top_k else ids

    @property
    def _rule_applies(self) -> bool:
        return self.rule is not None and (self.rule.in_prefill or not self.prefill)

    def _count_routed(self, index: int, tokens: int, experts: int) -> None:
        self.counters.routings[index] += tokens
        self.counters.routed[index] += experts
        self.step.routed += experts

    def _stage(self, index: int, experts: Sequence[int], started: int) -> list[Read]:
        forced = None
        if self.routes is not None:
            # A diagnostic's own work is not the engine's.
            before = perf_counter_ns()
            forced = self._forced_guess(index)
            started += perf_counter_ns() - before
        core = self.loader.core
        if core is None:
            return self.loader.load(index, experts, self._next_guess(index, forced), started)
        routing = self._addresses[Role.ROUTING, index]
        seen = self.guesser.input_address(index, routing) if self.guesser is not None else 0
        self.step.mgmt_ns += perf_counter_ns() - started
        core.load(index, experts, seen, forced)
        return []

    def token_decoded(self, wall_ns: int) -> None:
        """A single token was decoded in so much time."""
        if self.trial is not None and self.guesser is not None and not self.loader.ahead.steady:
            self.trial.token(wall_ns / 1e6)

    @property
    def prefetch(self) -> str:
        """Whether the next layer is read ahead: on, off, or auto, which is either by turns."""
        if self.guesser is None:
            return "off"
        return "on" if self.trial is None or self.loader.ahead.steady else "auto"

    @property
    def prefetches_now(self) -> bool:
        """Whether the next layer of this decode may be read ahead, if it can be guessed."""
        if self.loader.ahead.steady:
            # A prompt's guesses are lanes' work, and when that is done depends on time.
            return not self.prefill
        return self.prefill or self.trial is None or self.trial.prefetch

    def _next_guess(self, index: int, forced: Sequence[int] | None) -> Guess | None:
        if self.guesser is None or not self.prefetches_now:
            return None
        if self.prefill and index + 2 == len(self.plan.layers):
            return None  # the last layer routes the prompt's end alone
        routing, top_k = self._addresses[Role.ROUTING, index], self.present_top_k
        least = self.least_share
        return self.guesser.next_layer(index, routing, top_k, least_share=least, forced=forced)

    @property
    def present_top_k(self) -> int:
        """Experts per token now."""
        return self.live_top_k or self.top_k

    @property
    def least_share(self) -> float:
        """What an expert must weigh of a token to be read ahead: less of it would be dropped."""
        if self.rule is None or not self._rule_applies:
            return 0.0
        return self.rule.threshold(self.present_top_k)

    def _forced_guess(self, index: int) -> Sequence[int] | None:
        if self.routes is None or self.guesser is None or index + 1 >= len(self.plan.layers):
            return None
        return self.routes.guess(index + 1, self.least_share)

    def _mask_tail(self, index: int, address: int) -> None:
        """Leave the slots behind the live top-k out, as the model itself would with fewer."""
        tensor = Tensor.from_address(address)
        # GET_ROWS makes [1, top-k, tokens]: slots are the second dimension.
        values = matrix_at(tensor, ctypes.c_float, rows=2, columns=1)
        masked = -np.inf if self.plan.layers[index].softmax_after else 0.0
        values[:, self.live_top_k :] = masked

    def _on_weights(self, index: int, address: int) -> None:
        started = perf_counter_ns()
        layer = self.plan.layers[index]
        if self.live_top_k and layer.raw_weights == layer.final_weights:
            self._mask_tail(index, address)
        routing = Tensor.from_address(self._addresses[Role.ROUTING, index])
        final = Tensor.from_address(address)
        if self.routes is not None:
            forced = self.routes.weights(index, routing.ne[1])
            if forced is not None:
                weights_at(final, (routing.ne[1], routing.ne[0]))[...] = forced
            # A diagnostic's own work is not the engine's.
            started = perf_counter_ns()
        if self.observer is None and routing.ne[1] == 1:
            experts = self._drop_from_one(index, routing, final)
            if experts is not None:
                if self.live_top_k:
                    self._repeat_first(matrix_at(routing, ctypes.c_int32))
                self._stage(index, experts, started)
                return
        all_ids = matrix_at(routing, ctypes.c_int32)
        ids = self._used(all_ids)
        weights = self._used(weights_at(final, all_ids.shape))
        resident = self._resident(index, ids)
        asked, made = ids.copy(), weights.copy()
        dropped = self._drop(index, ids, weights, resident)
        self._repeat_first(all_ids)
        kept = ids if dropped is None else ids[~dropped]
        if self.observer is None:
            self._stage(index, kept.ravel().tolist(), started)
            return
        # Before staging, which takes note of what was routed to.
        ahead = np.isin(asked, list(self.loader.ahead.unrouted(index)))
        reads = self._stage(index, kept.ravel().tolist(), started)
        self._observe(index, asked, made, (resident, ahead), dropped, reads)

    def _resident(self, index: int, ids: np.ndarray) -> np.ndarray:
        is_resident = self.store.is_resident
        flags = [is_resident(index, expert) for expert in ids.ravel().tolist()]
        return np.array(flags, bool).reshape(ids.shape)

    def _drop_from_one(self, index: int, routing: Tensor, final: Tensor) -> Sequence[int] | None:
        """`_drop` for one token, without arrays: the experts to stage. None: do it with them."""
        slots = min(self.live_top_k or routing.ne[0], routing.ne[0])
        chosen = ids_of_one(routing, slots)
        ids: list[int] = chosen[:]
        rule = self.rule
        if rule is None or rule.substitute or not self._rule_applies:
            return ids
        values = weights_of_one(final, routing.ne[0], slots)
        if values is None:
            return None
        weights: list[float] = values[:]
        is_resident = self.store.is_resident
        resident = [is_resident(index, expert) for expert in ids]
        weak = policy.weak_slots(ids, weights, resident, rule.threshold(slots))
        if weak is None:
            return None
        self.counters.examined[index] += slots
        dropped, mass = weak
        if not dropped:
            return ids
        self._count_discarded(index, [ids[slot] for slot in dropped], mass)
        self.counters.dropped[index] += len(dropped)
        self.step.dropped += len(dropped)
        left = policy.drop_slots(ids, weights, dropped, renormalise=rule.renormalise)
        chosen[:], values[:] = left[0], left[1]  # type: ignore[assignment]  # plain numbers go in
        return [expert for slot, expert in enumerate(ids) if slot not in dropped]

    def _drop(
        self, index: int, ids: np.ndarray, weights: np.ndarray, resident: np.ndarray
    ) -> np.ndarray | None:
        rule = self.rule
        if rule is None or rule.substitute or not self._rule_applies or not ids.size:
            return None
        self.counters.examined[index] += ids.size
        candidates = policy.weak_and_cold(weights, resident, rule.threshold(ids.shape[1]))
        dropped = policy.spare_shared_reads(ids, candidates)
        if dropped.any():
            lost = policy.shares(weights)[dropped]
            self._count_discarded(index, ids[dropped].tolist(), float(lost.sum()))
            self.counters.dropped[index] += int(dropped.sum())
            self.step.dropped += int(dropped.sum())
            policy.drop(ids, weights, dropped, renormalise=rule.renormalise)
        return dropped

    def _count_discarded(self, index: int, experts: Sequence[int], mass: float) -> None:
        for expert in experts:
            self.store.counters.last_discarded[index, expert] = self.store.clock
        self.step.mass_discarded += mass
        self.counters.mass_discarded_ppb[index] += round(mass * 1e9)

    def _substitute(self, index: int, ids: np.ndarray) -> None:
        rule = self.rule
        places = [self._addresses.get((role, index)) for role in (Role.RANKING, Role.PROBABILITIES)]
        if rule is None or places[0] is None or places[1] is None or not ids.size:
            return
        self.counters.examined[index] += ids.size
        resident = self._resident(index, ids)
        if resident.all() and self.observer is None:
            return
        ranking = matrix_at(Tensor.from_address(places[0]), ctypes.c_int32)
        probabilities = matrix_at(Tensor.from_address(places[1]), ctypes.c_float)
        values = np.take_along_axis(probabilities, ids, axis=1)
        if self.plan.layers[index].softmax_after:
            values = np.exp(values - values.max(axis=1, keepdims=True))
        weak = policy.weak_and_cold(values, resident, rule.threshold(ids.shape[1]))
        weak = policy.spare_shared_reads(ids, weak)
        if self.observer is None and not weak.any():
            return
        everyone = np.arange(self.store.layers[index].n_expert)[None]
        chosen = policy.substitutes(ids, ranking, weak, self._resident(index, everyone)[0])
        replaced = chosen >= 0
        if self.observer is not None:
            self._substituted[index] = (ids.copy(), chosen)
        if replaced.any():
            lost = policy.shares(values)[replaced]
            self._count_discarded(index, ids[replaced].tolist(), float(lost.sum()))
            self.counters.substituted[index] += int(replaced.sum())
            self.step.substituted += int(replaced.sum())
            ids[...] = np.where(replaced, chosen, ids)

    def _observe(
        self,
        index: int,
        asked: np.ndarray,
        weights: np.ndarray,
        before: tuple[np.ndarray, np.ndarray],
        dropped: np.ndarray | None,
        reads: Sequence[Read],
    ) -> None:
        assert self.observer is not None
        substituted = None
        if index in self._substituted:
            asked, substituted = self._substituted.pop(index)
        routing = as_handled(index, asked, weights, before, dropped, reads, substituted)
        self.observer(routing)
