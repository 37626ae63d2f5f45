"""The split of the state over the ranks: complete, without overlap, balanced, and the same whoever computes it."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.worker.checkpoint import save_plan

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=12)


@settings(max_examples=200, deadline=None)
@given(shapes=shapes, scale=st.sampled_from([1, 100_000]), world_size=st.integers(1, 5))
def test_every_row_is_saved_once(shapes: list[list[int]], scale: int, world_size: int) -> None:
    """Over the ranks, the stretches of each tensor follow one another without a gap, and a small one is not cut."""
    tensors = [(f"t{i}", tuple(s), math.prod(s) * 4 * scale) for i, s in enumerate(shapes)]
    found: dict[str, list[tuple[int, int]]] = {name: [] for name, _, _ in tensors}
    for rank in range(world_size):
        for name, first, last in save_plan.stretch(tensors, rank, world_size):
            found[name].append((first, last))
    for name, shape, nbytes in tensors:
        rows = shape[0] if shape else 1
        ends = [0, *(last for _, last in found[name])]
        assert [first for first, _ in found[name]] == ends[:-1], name
        assert ends[-1] == rows
        assert found[name], f"{name} is saved even if it is empty"
        assert nbytes >= save_plan.SPLIT_BYTES or len(found[name]) == 1


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.integers(1000, 5000), min_size=1, max_size=8), world_size=st.integers(1, 6))
def test_ranks_save_equal_shares(rows: list[int], world_size: int) -> None:
    """Of large tensors each rank saves its share of the bytes, to within a few rows."""
    tensors = [(f"t{i}", (n, 1000), n * 4000) for i, n in enumerate(rows)]
    size = {name: nbytes // shape[0] for name, shape, nbytes in tensors}
    shares = [
        sum((b - a) * size[n] for n, a, b in save_plan.stretch(tensors, r, world_size)) for r in range(world_size)
    ]
    assert max(shares) - min(shares) <= 2 * 4000


def test_parts_do_not_overlap() -> None:
    """Each part starts past the one before, at a multiple of ALIGN."""
    tensors = {"a": torch.zeros(3, dtype=torch.int8), "b": torch.zeros(5, dtype=torch.float64), "c": torch.zeros(())}
    parts = save_plan.plan(tensors, {"r": torch.zeros(2)}, 0, 1)
    assert [p.name for p in parts] == ["a", "b", "c", "rank/00000/r"]
    assert [p.start for p in parts] == [0, 64, 128, 192]


def test_tied_weights_are_saved_once() -> None:
    """A tensor of two names has its bytes in one place; a view of other shape is no tie."""
    weight = torch.randn(4, 6)
    tensors = {"embedding": weight, "head": weight, "view": weight.view(6, 4)}
    assert save_plan.aliases(tensors) == {"head": "embedding"}
    assert [p.name for p in save_plan.plan(tensors, {}, 0, 1)] == ["embedding", "view"]


def test_what_is_whole_beside_shards_is_rank_0_s() -> None:
    """Under `gather_bytes` of it: so that a rank's state is in two shards. Without shards, or above, it is dealt out as ever."""
    whole = {f"t{i}": torch.zeros(4) for i in range(6)}
    assert [p.name for p in save_plan.plan(whole, {}, 1, 2, gather_bytes=1 << 20)] == ["t3", "t4", "t5"]
