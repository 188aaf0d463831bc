"""Between a layer's first product and its attention: norm and turn queries and keys, put keys and values into slots."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from .structs import RowPlaces


@triton.jit
def head_elements(x_ptr, norm_ptr, offs, width, scale, weight_offset, NORM: tl.constexpr):
    """A head's elements in float32, with NORM times the norm's ``scale`` and weight, rounded as it would be stored."""
    stored = tl.load(x_ptr + offs, mask=offs < width, other=0.0)
    x = stored.to(tl.float32)
    if NORM:
        weight = tl.load(norm_ptr + offs, mask=offs < width, other=0.0).to(tl.float32) + weight_offset
        x = (x * scale * weight).to(stored.dtype).to(tl.float32)
    return x


@triton.jit
def rotate_and_store_kernel(
    packed_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keep_ptr,
    slots_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    num_heads,
    num_kv_heads,
    head_dim,
    half,
    eps,
    weight_offset,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, head of ``packed``): query heads go to q, those of keys and values to the row's slot if it keeps
    the attention. Element j turns with j + half, j < half; those from 2 half on stay."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    keep = tl.load(keep_ptr + row) != 0
    if not keep:
        return
    offs = tl.arange(0, BLOCK)
    inside = offs < head_dim
    x_ptr = packed_ptr + (row * (num_heads + 2 * num_kv_heads) + head) * head_dim
    slot = tl.load(slots_ptr + row)
    if head >= num_heads + num_kv_heads:
        place = (slot * num_kv_heads + head - num_heads - num_kv_heads) * head_dim
        tl.store(values_ptr + place + offs, tl.load(x_ptr + offs, mask=inside), mask=inside)
    else:
        norm_ptr, out_ptr, place = q_norm_ptr, q_ptr, (row * num_heads + head) * head_dim
        if head >= num_heads:
            norm_ptr, out_ptr, place = k_norm_ptr, keys_ptr, (slot * num_kv_heads + head - num_heads) * head_dim
        scale = tl.full((), 1.0, tl.float32)
        if NORM:
            plain = head_elements(x_ptr, norm_ptr, offs, head_dim, scale, weight_offset, False)
            scale = 1.0 / tl.sqrt(tl.sum(plain * plain, 0) / head_dim + eps)
        first, turns = offs < half, offs < 2 * half
        partner = tl.where(first, offs + half, tl.where(turns, offs - half, offs))
        angle = row * half + tl.minimum(offs, partner)
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        x = head_elements(x_ptr, norm_ptr, offs, head_dim, scale, weight_offset, NORM)
        other = head_elements(x_ptr, norm_ptr, partner, head_dim, scale, weight_offset, NORM)
        turned = x * cos + tl.where(first, -other, other) * sin
        tl.store(out_ptr + place + offs, turned.to(q_ptr.dtype.element_ty), mask=inside)


def rotate_and_store(
    packed: torch.Tensor,
    norms: Tuple[Optional[torch.Tensor], Optional[torch.Tensor]],
    angles: Tuple[torch.Tensor, torch.Tensor],
    keep: torch.Tensor,
    places: RowPlaces,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
    weight_offset: float,
) -> torch.Tensor:
    """Turn the queries of ``packed`` [R, H + 2 H_kv, Dh]; put keys and values into the layer's [num_slots, H_kv, Dh].

    Rows that do not keep the attention are left out: their queries are not written.

    Args:
        norms: of queries and keys, [Dh] each, or None twice.
        angles: cosine and sine, [R, rotary_dim / 2] float32 each.
        keep: [R] bool.
        places: the rows' slots.
        eps, weight_offset: of the norms.

    Returns:
        [R, H, Dh].
    """
    num_rows, num_packed, head_dim = packed.shape
    num_kv_heads = keys.shape[1]
    q = packed.new_empty(num_rows, num_packed - 2 * num_kv_heads, head_dim)
    cos, sin = angles
    q_norm, k_norm = norms
    rotate_and_store_kernel[(num_rows, num_packed)](
        packed,
        packed if q_norm is None else q_norm,
        packed if k_norm is None else k_norm,
        cos,
        sin,
        keep,
        places.slots,
        q,
        keys,
        values,
        q.shape[1],
        num_kv_heads,
        head_dim,
        cos.shape[1],
        eps,
        weight_offset,
        NORM=q_norm is not None,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return q
