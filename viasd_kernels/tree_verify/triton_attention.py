"""``tree_attention`` in Triton: flash-decoding, in one launch, or two where the keys of a sequence are split.

A program serves a tile of a sequence's queries that share a key head, whatever rows and heads they come from, so that
a tile of keys and values, gathered through ``slots``, is read once for all of them. Sums and the softmax are float32;
the products take the inputs' dtype.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from ..configurations import configuration
from .triton_tiles import num_tiles, tile_rows

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def num_ancestors(ancestors_ptr, rows, mask, stride, num_words):
    """A row's depth: the bits that are set in its words."""
    found = tl.zeros(rows.shape, tl.int32)
    for i in range(num_words):
        bits = tl.load(ancestors_ptr + rows.to(tl.int64) * stride + i, mask=mask, other=0)
        bits -= (bits >> 1) & 0x5555555555555555
        bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
        found += ((bits * 0x0101010101010101) >> 56).to(tl.int32)
    return found


@triton.jit
def load_vectors(pool_ptr, slots, stride, offs_d, mask, HEAD_DIM: tl.constexpr):
    offs = slots[:, None] * stride + offs_d[None, :]
    return tl.load(pool_ptr + offs, mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def attend(
    softmax,
    q,
    keys,
    values,
    visible,
    scale,
    soft_cap,
    CAPPED: tl.constexpr,
):
    """The running softmax (maxima, totals, weighted sums of values) with a tile of keys added."""
    peaks, totals, mixed = softmax
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if CAPPED:
        scores = soft_cap * (2.0 * tl.sigmoid(scores * (2.0 / soft_cap)) - 1.0)  # tanh
    scores = tl.where(visible, scores, NEG_INF)
    highest = tl.maximum(peaks, tl.max(scores, 1))
    shift = tl.where(highest == NEG_INF, 0.0, highest)  # a row that sees nothing of the tiles so far
    weights = tl.exp(scores - shift[:, None])
    faded = tl.exp(peaks - shift)
    totals = totals * faded + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * faded[:, None], input_precision="ieee")
    return highest, totals, mixed


@triton.jit
def tree_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    context_len_ptr,
    row_start_ptr,
    ancestors_ptr,
    out_ptr,
    partials_ptr,
    totals_ptr,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    slots_stride,
    ancestors_stride,
    num_words,
    num_sequences,
    num_heads,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (tile of queries, key head, split): entry i of a sequence's queries is head i % GROUP of row i // GROUP.

    A split is a part of the sequence's keys: those of its context, then those of its rows.
    """
    b, first, num_rows, entry = tile_rows(row_start_ptr, num_sequences, tl.program_id(0).to(tl.int64), GROUP, BLOCK_M)
    if entry >= num_rows * GROUP:
        return
    kv_head, split, num_splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    entries = entry + tl.arange(0, BLOCK_M)
    rows, heads = entries // GROUP, kv_head * GROUP + entries % GROUP
    row_mask = rows < num_rows
    offs_d = tl.arange(0, BLOCK_D)
    query_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_offs = (first + rows) * q_row_stride + heads * q_head_stride
    q = tl.load(q_ptr + q_offs[:, None] + offs_d[None, :], mask=query_mask, other=0.0)

    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    slots_ptr += b * slots_stride
    ancestors_ptr += first * ancestors_stride
    context = tl.load(context_len_ptr + b).to(tl.int32)
    length = context + num_rows.to(tl.int32)
    begin = tl.full((), 0, tl.int32)
    depths = tl.zeros((BLOCK_M,), tl.int32)
    if WINDOWED:
        begin = tl.maximum(context - window + 1, 0)  # the root sees nothing before, nor do the others
        depths = num_ancestors(ancestors_ptr, rows, row_mask, ancestors_stride, num_words)
    part = tl.cdiv(tl.cdiv(length - begin, num_splits), BLOCK_N) * BLOCK_N
    begin += split * part
    end = tl.minimum(begin + part, length)

    softmax = (
        tl.full((BLOCK_M,), NEG_INF, tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
    )
    context_end = tl.minimum(context, end)
    for start in range(begin, context_end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < context_end
        slots = tl.load(slots_ptr + offs_n, mask=mask_n, other=0).to(tl.int64)
        keys = load_vectors(k_ptr, slots, k_slot_stride, offs_d, mask_n, HEAD_DIM)
        values = load_vectors(v_ptr, slots, v_slot_stride, offs_d, mask_n, HEAD_DIM)
        visible = mask_n[None, :]
        if WINDOWED:
            visible = visible & ((context - offs_n)[None, :] + depths[:, None] < window)
        softmax = attend(softmax, q, keys, values, visible, scale, soft_cap, CAPPED)
    # Rows come in steps that one word of ancestor bits covers.
    STEP: tl.constexpr = BLOCK_N if BLOCK_N < 32 else 32
    for step in range(tl.maximum(begin - context, 0) // STEP, tl.cdiv(end - context, STEP)):
        others = step * STEP + tl.arange(0, STEP)
        offs_n = context + others
        mask_n = (offs_n >= begin) & (offs_n < end)
        slots = tl.load(slots_ptr + offs_n, mask=mask_n, other=0).to(tl.int64)
        keys = load_vectors(k_ptr, slots, k_slot_stride, offs_d, mask_n, HEAD_DIM)
        values = load_vectors(v_ptr, slots, v_slot_stride, offs_d, mask_n, HEAD_DIM)
        words = tl.load(ancestors_ptr + rows * ancestors_stride + step * STEP // 64, mask=row_mask, other=0)
        bits = (words >> (step * STEP % 64)).to(tl.int32)
        visible = ((bits[:, None] >> tl.arange(0, STEP)[None, :]) & 1) != 0
        visible = visible | (rows[:, None] == others[None, :])
        if WINDOWED:
            their_depths = num_ancestors(ancestors_ptr, others, mask_n, ancestors_stride, num_words)
            visible = visible & (depths[:, None] - their_depths[None, :] < window)
        softmax = attend(softmax, q, keys, values, visible & mask_n[None, :], scale, soft_cap, CAPPED)

    peaks, totals, mixed = softmax
    out_offs = (first + rows) * num_heads + heads
    if SPLIT:
        out_offs = out_offs * num_splits + split
        tl.store(totals_ptr + 2 * out_offs, peaks, mask=row_mask)
        tl.store(totals_ptr + 2 * out_offs + 1, totals, mask=row_mask)
        tl.store(partials_ptr + (out_offs * HEAD_DIM)[:, None] + offs_d[None, :], mixed, mask=query_mask)
    else:
        mixed = mixed / totals[:, None]
        tl.store(out_ptr + (out_offs * HEAD_DIM)[:, None] + offs_d[None, :], mixed.to(q.dtype), mask=query_mask)


@triton.jit
def combine_splits_kernel(
    partials_ptr,
    totals_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, head): the splits' sums of values, scaled to the highest score of all of them."""
    place = tl.program_id(0).to(tl.int64)
    splits = place * SPLITS + tl.arange(0, SPLITS)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    peaks, totals = tl.load(totals_ptr + 2 * splits), tl.load(totals_ptr + 2 * splits + 1)
    weights = tl.exp(peaks - tl.max(peaks, 0))
    mixed = tl.load(partials_ptr + (splits * HEAD_DIM)[:, None] + offs_d[None, :], mask=mask_d[None, :], other=0.0)
    mixed = tl.sum(mixed * weights[:, None], 0) / tl.sum(totals * weights, 0)
    tl.store(out_ptr + place * HEAD_DIM + offs_d, mixed.to(out_ptr.dtype.element_ty), mask=mask_d)


PROGRAMS = 256  # fill a large device about twice
MAX_SPLITS = 32
SPLIT_KEYS = 64  # fewer are not worth a program


def attention_sizes(q: torch.Tensor, num_sequences: int, group: int) -> Tuple[int, int, "dict[str, int]"]:
    """BLOCK_M and BLOCK_D, and the configuration for heads of so many elements."""
    block_d = max(16, triton.next_power_of_2(q.shape[2]))
    kernel = "tree_attention_float32" if q.dtype == torch.float32 else "tree_attention"
    config = configuration("tree_verify", kernel, q.device, block_d)
    entries = triton.cdiv(q.shape[0], num_sequences) * group
    return min(config["MAX_BLOCK_M"], max(16, triton.next_power_of_2(entries))), block_d, config


def tree_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    row_start: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    soft_cap: Optional[float],
    window: Optional[int],
) -> torch.Tensor:
    """Rows that belong to no sequence hold anything."""
    num_rows, num_heads, head_dim = q.shape
    num_sequences, max_len = slots.shape
    out = q.new_empty(q.shape)
    if not (out.numel() and num_sequences):
        return out
    num_kv_heads = k_pool.shape[1]
    group = num_heads // num_kv_heads
    block_m, block_d, config = attention_sizes(q, num_sequences, group)
    tiles = num_tiles(num_rows * group, num_sequences, block_m)
    # From shapes alone: a program learns how many keys there are.
    busy = max(num_sequences, num_rows * group // block_m) * num_kv_heads
    wanted = min(triton.cdiv(PROGRAMS, busy), triton.cdiv(max_len, SPLIT_KEYS), MAX_SPLITS)
    splits = triton.next_power_of_2(wanted)
    size = num_rows * num_heads * splits if splits > 1 else 0
    partials = q.new_empty(size, head_dim, dtype=torch.float32)
    totals = q.new_empty(size, 2, dtype=torch.float32)
    tree_attention_kernel[(tiles, num_kv_heads, splits)](
        q,
        k_pool,
        v_pool,
        slots,
        context_len,
        row_start,
        ancestors,
        out,
        partials,
        totals,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        slots.stride(0),
        ancestors.stride(0),
        ancestors.shape[1],
        num_sequences,
        num_heads,
        scale,
        1.0 if soft_cap is None else soft_cap,
        0 if window is None else window,
        HEAD_DIM=head_dim,
        GROUP=group,
        CAPPED=soft_cap is not None,
        WINDOWED=window is not None,
        SPLIT=splits > 1,
        BLOCK_M=block_m,
        BLOCK_N=config["BLOCK_N"],
        BLOCK_D=block_d,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    if splits > 1:
        combine_splits_kernel[(num_rows * num_heads,)](
            partials, totals, out, HEAD_DIM=head_dim, SPLITS=splits, BLOCK_D=block_d, num_warps=4
        )
    return out
