"""Which bytes count as dense, and that every one of them is read once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.dense import dense_ranges, subtract, union
from engine.experts import Bank, ExpertLayer
from engine.mapping import PAGE
from engine.model_file import TensorEntry

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))),
    max_size=8,
)


def bytes_of(found: list[tuple[int, int]]) -> set[int]:
    return {byte for first, last in found for byte in range(first, last)}


@given(ranges)
def test_union_covers_the_same_bytes_once(given_ranges: list[tuple[int, int]]) -> None:
    merged = union(given_ranges)
    assert bytes_of(merged) == bytes_of(given_ranges)
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(ranges, ranges)
def test_subtract_leaves_what_is_outside(
    wanted: list[tuple[int, int]], holes: list[tuple[int, int]]
) -> None:
    left = subtract(union(wanted), union(holes))
    assert bytes_of(left) == bytes_of(wanted) - bytes_of(holes)


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=6), st.integers(1, 5))
def test_every_byte_is_dense_or_inside_a_bank(sizes: list[int], slice_pages: int) -> None:
    """Tensors and banks alternate without gaps; pages they share belong to the dense ranges."""
    weights, layers, offset = [], [], 100
    for number, size in enumerate(sizes):
        weights.append(TensorEntry(f"w{number}", 0, offset, size, "f32", (size // 4,)))
        offset += size
        bank = Bank(f"b{number}", 0, offset, slice_pages * 1000, 4)
        layers.append(ExpertLayer(number, (bank,)))
        offset += 4 * bank.slice_bytes
    (dense,) = dense_ranges(weights, layers, 1)
    inside = union(
        (bank.inside_first, bank.inside_last) for layer in layers for bank in layer.banks
    )
    assert not bytes_of(dense) & bytes_of(inside)
    covered = bytes_of(dense) | bytes_of(inside)
    assert set(range(100, offset)) <= covered
    assert all(first % PAGE == 0 and last % PAGE == 0 for first, last in dense)
