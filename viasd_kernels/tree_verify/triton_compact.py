"""``compact_kv`` in Triton: a program moves the same elements of all of a sequence's rows: nobody waits for another."""

import torch
import triton
import triton.language as tl

BLOCK = 512  # elements of a row that a program moves
PATH_BLOCK = 64


@triton.jit
def compact_kv_kernel(
    cache_ptr,
    path_ptr,
    num_accepted_ptr,
    row_start_ptr,
    start_ptr,
    staging_ptr,
    sequence_stride,
    position_stride,
    head_stride,
    cache_len,
    head_dim,
    row_size,
    PATH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence, elements of a row). What would leave the sequence's rows or the cache stays as it is."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(row_start_ptr + b).to(tl.int64)
    num_rows = tl.load(row_start_ptr + b + 1).to(tl.int64) - first
    start = tl.load(start_ptr + b).to(tl.int64)
    num_moves = tl.load(num_accepted_ptr + b).to(tl.int64) + 1
    inside = (num_moves >= 1) & (num_moves <= num_rows) & (start >= 0) & (start <= cache_len - num_rows)
    if not inside:
        return
    path_ptr += first
    wrong, backwards = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for j in range(0, num_moves, PATH_BLOCK):
        offs = j + tl.arange(0, PATH_BLOCK)
        moved = offs < num_moves
        rows = tl.load(path_ptr + offs, mask=moved, other=0).to(tl.int64)
        wrong |= tl.max((moved & ((rows < 0) | (rows >= num_rows))).to(tl.int32), 0)
        backwards |= tl.max((moved & (rows < offs)).to(tl.int32), 0)
    if wrong != 0:
        return

    offs = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < row_size
    own_ptr = cache_ptr + b * sequence_stride + start * position_stride
    own_ptr += offs // head_dim * head_stride + offs % head_dim
    staging_ptr += first * row_size + offs
    if backwards == 0:  # as from verify_tree: no move overwrites what a later one reads
        for j in range(0, num_moves):
            moved = tl.load(own_ptr + tl.load(path_ptr + j).to(tl.int64) * position_stride, mask=mask)
            tl.debug_barrier()  # another thread may still have to read what this one overwrites
            tl.store(own_ptr + j * position_stride, moved, mask=mask)
    else:
        for j in range(0, num_moves):
            moved = tl.load(own_ptr + tl.load(path_ptr + j).to(tl.int64) * position_stride, mask=mask)
            tl.store(staging_ptr + j * row_size, moved, mask=mask)
        tl.debug_barrier()
        for j in range(0, num_moves):
            tl.store(own_ptr + j * position_stride, tl.load(staging_ptr + j * row_size, mask=mask), mask=mask)


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes; what is wider moves as several int64


def compact_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    row_start: torch.Tensor,
    start: torch.Tensor,
) -> None:
    # Bits written past torch: autograd is told as if an operation of its own had changed them.
    torch.autograd.graph.increment_version((k, v))
    if not (k.numel() and path.numel()):
        return
    for cache in (k, v):
        bits = cache.view(BITS.get(cache.element_size(), torch.int64))
        num_sequences, cache_len, num_heads, head_dim = bits.shape
        row_size = num_heads * head_dim
        compact_kv_kernel[(num_sequences, triton.cdiv(row_size, BLOCK))](
            bits,
            path,
            num_accepted,
            row_start,
            start,
            bits.new_empty(path.shape[0], row_size),
            bits.stride(0),
            bits.stride(1),
            bits.stride(2),
            cache_len,
            head_dim,
            row_size,
            PATH_BLOCK=PATH_BLOCK,
            BLOCK=BLOCK,
            num_warps=4,
        )
