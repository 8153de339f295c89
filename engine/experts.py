"""What the experts of a model are made of, and where their bytes lie in its file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.errors import GraphError
from engine.graph import GraphPlan
from engine.mapping import PAGE, page_ceil, page_floor
from engine.model_file import ModelFile


@dataclass(frozen=True)
class Bank:
    """All experts of one projection in one layer, as they lie in a shard."""

    name: str
    shard: int
    offset: int
    slice_bytes: int
    n_expert: int

    @cached_property
    def core_bytes(self) -> int:
        """Bytes of a slice that can be moved: whole pages of its own, as many for every expert.

        Equal ranges keep the number of memory mappings bounded: moving ever other ranges would cut
        the address space into ever smaller ones.
        """
        if self.offset % PAGE == self.slice_bytes % PAGE == 0:
            return self.slice_bytes
        return max(0, page_floor(self.slice_bytes) - PAGE)

    @property
    def edge_bytes(self) -> int:
        """Bytes of the bank's own pages that belong to no slice's core."""
        return self.inside_last - self.inside_first - self.n_expert * self.core_bytes

    def core_first(self, expert: int) -> int:
        """Where the `core_bytes` of an expert begin."""
        return page_ceil(self.offset + expert * self.slice_bytes)

    @cached_property
    def inside_first(self) -> int:
        """First page that holds nothing but this bank."""
        return page_ceil(self.offset)

    @cached_property
    def inside_last(self) -> int:
        """End of the last page that holds nothing but this bank."""
        return max(self.inside_first, page_floor(self.offset + self.slice_bytes * self.n_expert))


@dataclass(frozen=True)
class ExpertTag:
    """What a read of a slice is for."""

    index: int
    """The routed layer, counted from 0."""
    layer: int
    """The block's number in the model."""
    expert: int
    projection: str

    def __str__(self) -> str:
        return f"layer {self.layer}, expert {self.expert}, {self.projection}"


@dataclass(frozen=True)
class ExpertLayer:
    """The banks of one routing, and what one of its experts weighs."""

    number: int
    banks: tuple[Bank, ...]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one expert over all banks."""
        return sum(bank.slice_bytes for bank in self.banks)

    @property
    def n_expert(self) -> int:
        """How many experts the routing chooses from."""
        return self.banks[0].n_expert


def expert_layers(plan: GraphPlan, file: ModelFile) -> list[ExpertLayer]:
    """Where the learned banks lie in the file.

    Raises GraphError for a bank that the file does not hold as one matrix per expert.
    """
    layers = []
    for routed in plan.layers:
        banks = []
        for name in routed.banks:
            entry = file.tensors.get(name)
            if entry is None or len(entry.shape) != 3:
                raise GraphError(f"{name} is used as an expert bank but is none in the file")
            n_expert = entry.shape[2]
            banks.append(Bank(name, entry.shard, entry.offset, entry.nbytes // n_expert, n_expert))
        layers.append(ExpertLayer(routed.number, tuple(banks)))
    return layers


def slice_pages(bank: Bank, expert: int) -> tuple[int, int]:
    """The pages that hold an expert's slice, without those shared with other tensors."""
    start = bank.offset + expert * bank.slice_bytes
    return (
        max(page_floor(start), bank.inside_first),
        min(page_ceil(start + bank.slice_bytes), bank.inside_last),
    )
