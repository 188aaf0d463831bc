"""``bypass_norm`` in Triton: one program per row, which stays in registers from its only read to its writes."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl


@triton.jit
def rms_normed(x, weight_ptr, offs, width, eps, weight_offset):
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) of a row in float32, zeros past ``width``."""
    weight = tl.load(weight_ptr + offs, mask=offs < width, other=0.0).to(tl.float32) + weight_offset
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)) * weight


@triton.jit
def bypass_norm_kernel(
    hidden_ptr,
    delta_ptr,
    keep_ptr,
    weight_ptr,
    delta_weight_ptr,
    hidden_out_ptr,
    normed_ptr,
    hidden_stride,
    delta_stride,
    width,
    eps,
    weight_offset,
    HAS_DELTA: tl.constexpr,
    POST_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < width
    stored = tl.load(hidden_ptr + row * hidden_stride + offs, mask=inside, other=0.0)
    if HAS_DELTA:
        keep = tl.load(keep_ptr + row) != 0
        # A bypassed row's delta is not read, and what it keeps are the bits as they were loaded.
        delta = tl.load(delta_ptr + row * delta_stride + offs, mask=inside & keep, other=0.0).to(tl.float32)
        if POST_NORM:
            delta = rms_normed(delta, delta_weight_ptr, offs, width, eps, weight_offset)
            delta = delta.to(stored.dtype).to(tl.float32)
        added = (stored.to(tl.float32) + delta).to(stored.dtype)
        stored = tl.where(keep, added, stored)
    tl.store(hidden_out_ptr + row * width + offs, stored, mask=inside)
    normed = rms_normed(stored.to(tl.float32), weight_ptr, offs, width, eps, weight_offset)
    tl.store(normed_ptr + row * width + offs, normed.to(stored.dtype), mask=inside)


def norm_block(width: int) -> Tuple[int, int]:
    """Elements that a program holds, the whole row, and its warps: 16 elements to a thread, so that none spills."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 512))


def bypass_norm(
    hidden: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    delta_weight: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = hidden.shape
    hidden_out, normed = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
    if num_rows:
        block, num_warps = norm_block(width)
        added = hidden if delta is None else delta
        bypass_norm_kernel[(num_rows,)](
            hidden,
            added,
            keep,
            weight,
            weight if delta_weight is None else delta_weight,
            hidden_out,
            normed,
            hidden.stride(0),
            added.stride(0),
            width,
            eps,
            weight_offset,
            HAS_DELTA=delta is not None,
            POST_NORM=delta_weight is not None,
            BLOCK=block,
            num_warps=num_warps,
        )
    return hidden_out, normed
