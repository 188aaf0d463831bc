"""``build_tree`` in Triton: one program per row, which follows its parents to the root and looks for its next of kin.

No row waits for another: what a row's own chain of parents says is enough to know whether it is kept.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl

from .triton_tiles import num_tiles, tile_rows

BLOCK = 128  # rows searched at a time for a child and a sibling


@triton.jit
def build_tree_kernel(
    parents_ptr,
    row_start_ptr,
    ancestors_ptr,
    depth_ptr,
    first_child_ptr,
    next_sibling_ptr,
    num_sequences,
    max_rows,
    num_words,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, first, num_rows, row = tile_rows(row_start_ptr, num_sequences, tl.program_id(0).to(tl.int64), 1, 1)
    if row >= num_rows:
        return
    parents_ptr += first
    num_rows = tl.minimum(num_rows, max_rows)  # no row past them is anybody's child
    word_ids = tl.arange(0, BLOCK_W)
    words = tl.zeros((BLOCK_W,), tl.int64)
    depth = tl.full((), 0, tl.int32)
    kept = (row == 0) | (row < max_rows)
    current = row
    while kept & (current > 0):
        parent = tl.load(parents_ptr + current).to(tl.int64)
        kept = (parent >= 0) & (parent < current)
        words |= tl.where(word_ids == parent >> 6, tl.full((), 1, tl.int64) << (parent & 63), 0)
        depth += 1
        current = parent

    nobody = tl.full((), 2**31 - 1, tl.int64)
    child, sibling = nobody, nobody
    if kept:
        parent = tl.full((), -1, tl.int64)
        if row > 0:
            parent = tl.load(parents_ptr + row).to(tl.int64)
        start = row + 1
        # The root has no siblings: -1 may not be matched with rows whose parent is missing.
        while (start < num_rows) & ((child == nobody) | ((sibling == nobody) & (row > 0))):
            offs = start + tl.arange(0, BLOCK)
            theirs = tl.load(parents_ptr + offs, mask=offs < num_rows, other=-1).to(tl.int64)
            child = tl.minimum(child, tl.min(tl.where(theirs == row, offs, nobody), 0))
            sibling = tl.minimum(sibling, tl.min(tl.where((theirs == parent) & (row > 0), offs, nobody), 0))
            start += BLOCK
    place = first + row
    tl.store(ancestors_ptr + place * num_words + word_ids, tl.where(kept, words, 0), mask=word_ids < num_words)
    tl.store(depth_ptr + place, tl.where(kept, depth, -1))
    tl.store(first_child_ptr + place, tl.where(child == nobody, -1, child).to(tl.int32))
    tl.store(next_sibling_ptr + place, tl.where(sibling == nobody, -1, sibling).to(tl.int32))


def build_tree(
    parents: torch.Tensor, row_start: torch.Tensor, max_rows: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that belong to no sequence are not written."""
    num_rows, num_sequences, num_words = parents.shape[0], row_start.shape[0] - 1, (max_rows + 63) // 64
    ancestors = parents.new_empty(num_rows, num_words, dtype=torch.int64)
    depth, first_child, next_sibling = (parents.new_empty(num_rows, dtype=torch.int32) for _ in range(3))
    if num_rows and num_sequences:
        build_tree_kernel[(num_tiles(num_rows, num_sequences, 1),)](
            parents,
            row_start,
            ancestors,
            depth,
            first_child,
            next_sibling,
            num_sequences,
            max_rows,
            num_words,
            BLOCK_W=triton.next_power_of_2(num_words),
            BLOCK=BLOCK,
            num_warps=1,
        )
    return ancestors, depth, first_child, next_sibling
