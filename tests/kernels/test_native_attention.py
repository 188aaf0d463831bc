"""The native tree_attention against the reference on random trees, and the bits and blindness that users rely on."""

from __future__ import annotations

from random import Random

import pytest
import torch
from decoder_configs import STABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import assert_as_good, by_dtype, by_level, cpu_level, same_bits, torch_threads

from viasd_kernels.tree_verify import build_tree, tree_attention


class Rows:
    """Queries of random trees over random contexts, in a pool of any strides; what no sequence uses holds NaN."""

    def __init__(
        self, lengths: list[int], contexts: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype, seed: int
    ) -> None:
        rng, generator = Random(seed), torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        used = [length + context for length, context in zip(lengths, contexts, strict=True)]
        self.row_start, self.context_len = torch.tensor([0, *lengths]).cumsum(0), torch.tensor(contexts).long()
        self.q = torch.randn(sum(lengths), num_heads, dim, generator=generator).to(dtype)
        num_slots = sum(used) + 5
        order = torch.randperm(num_slots, generator=generator)[: sum(used)]
        self.pools = []
        for layout in rng.sample(["slots first", "heads first", "every other slot", "part of a head"], 2):
            pool = torch.full((num_slots, num_kv_heads, dim), torch.nan, dtype=dtype)
            pool[order] = torch.randn(sum(used), num_kv_heads, dim, generator=generator).to(dtype)
            self.pools.append(laid_out(pool, layout))
        self.slots = torch.full((len(lengths), max([*used, 0]) + 1), -7, dtype=torch.int32)
        for number, own in enumerate(order.split(used)):
            self.slots[number, : len(own)] = own
        parents = [rng.randrange(max(0, row - 9), row) if row else -1 for length in lengths for row in range(length)]
        self.tree = build_tree(torch.tensor(parents, dtype=torch.int64), self.row_start, max_rows=max([*lengths, 1]))

    def run(self, impl: str = "native", dtype: torch.dtype | None = None, **options) -> torch.Tensor:
        q, k_pool, v_pool = (x.to(dtype or x.dtype) for x in (self.q, *self.pools))
        places = (self.slots, self.context_len, self.row_start, self.tree.ancestors)
        return tree_attention(q, k_pool, v_pool, *places, scale=q.shape[2] ** -0.5, impl=impl, **options)


def laid_out(pool: torch.Tensor, layout: str) -> torch.Tensor:
    """The same pool in other strides, NaN in between."""
    if layout == "heads first":
        return pool.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every other slot":
        return torch.stack([pool, torch.full_like(pool, torch.nan)], 1)[:, 0]
    if layout == "part of a head":
        return torch.cat([torch.full_like(pool, torch.nan), pool], 2)[..., pool.shape[2] :]
    return pool


@by_level
@by_dtype
@settings(STABLE, max_examples=30)
@given(
    shape=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 7, 40, 70, 140]), st.sampled_from([0, 1, 20, 63, 64, 200, 257, 300])),
        max_size=3,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (7, 1), (60, 1)]),
    dim=st.sampled_from([1, 6, 16, 20, 31, 72]),
    window=st.sampled_from([None, 1, 3, 60, 250]),
    soft_cap=st.sampled_from([None, 1.0, 30.0]),
    seed=st.integers(0, 2**20),
)
def test_errs_at_most_twice_as_much_as_the_reference(level, dtype, shape, heads, dim, window, soft_cap, seed) -> None:
    rows = Rows([own for own, _ in shape], [context for _, context in shape], heads, dim, dtype, seed)
    options = {"window": window, "soft_cap": soft_cap}
    exact, same_dtype = rows.run("reference", torch.float64, **options), rows.run("reference", **options)
    with cpu_level(level):
        assert_as_good(rows.run(**options), same_dtype, exact)


@by_level
@by_dtype
@pytest.mark.parametrize("window", [None, 90])
def test_the_number_of_threads_changes_no_bit(level: str, dtype: torch.dtype, window: int | None) -> None:
    rows = Rows([70, 1, 9], [300, 600, 20], (6, 2), 20, dtype, seed=0)
    with cpu_level(level):
        outs = []
        for count in (1, 2, 3, 5):
            with torch_threads(count):
                outs.append(rows.run(window=window))
        assert all(same_bits(out, outs[0]) for out in outs)


@by_level
@by_dtype
def test_neither_do_rows_that_come_after(level: str, dtype: torch.dtype) -> None:
    rows = Rows([70], [240], (6, 2), 20, dtype, seed=1)
    with cpu_level(level):
        every = rows.run()
        q, ancestors = rows.q, rows.tree.ancestors
        for count in range(1, 70):
            rows.q, rows.row_start = q[:count], torch.tensor([0, count])
            rows.tree = rows.tree._replace(ancestors=ancestors[:count])
            assert same_bits(rows.run(), every[:count])


@by_level
@by_dtype
@pytest.mark.parametrize("broken", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_a_row_does_not_see_stays_out(level: str, dtype: torch.dtype, broken: float, where: str) -> None:
    """One broken slot of the context, out of reach of the rows deep in the tree, and one of a row."""
    rows = Rows([90], [50], (6, 2), 20, dtype, seed=2)
    depth = rows.tree.depth.tolist()
    pool = rows.pools[where == "value"]
    with cpu_level(level):
        healthy = rows.run(window=8)
        for entry in (45, 50 + 30):
            slot = rows.slots[0, entry]
            kept = pool[slot].clone()
            pool[slot] = broken
            out = rows.run(window=8)
            pool[slot] = kept
            if entry < 50:
                sees = torch.tensor([50 + own - entry < 8 for own in depth])
            else:
                words = rows.tree.ancestors[:, 0] >> 30 & 1 == 1
                sees = torch.tensor([own - depth[30] < 8 for own in depth]) & words
                sees[30] = True
            assert 0 < sees.sum() < 90
            assert same_bits(out[~sees], healthy[~sees])
            assert not out[sees].isfinite().all(-1).any()
