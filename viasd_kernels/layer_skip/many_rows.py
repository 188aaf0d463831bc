"""Passes of many rows (a prompt's): torch's own products and attention, which such shapes suit."""

from typing import Optional

import torch
import torch.nn.functional as F

from ..tree_verify.reference import soft_capped, visible_keys


def linear_many(
    x: torch.Tensor,
    weight: torch.Tensor,
    keep: torch.Tensor,
    bias: Optional[torch.Tensor],
    activation: Optional[str],
) -> torch.Tensor:
    """``bypass_linear`` without a residual; sums are rounded to the dtype before the activation, too."""
    out = F.linear(x, weight, bias)
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        out = (F.silu(gate) if activation == "silu_mul" else F.gelu(gate, approximate="tanh")) * up
    return out.masked_fill_(~keep.unsqueeze(1), 0.0)


def attend_many(
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
    """``tree_attention``, sequence by sequence; reads back where they lie."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pool.shape[1]
    contexts, starts = context_len.tolist(), row_start.tolist()
    for sequence, (context, begin, end) in enumerate(zip(contexts, starts, starts[1:])):
        used = slots[sequence, : context + end - begin].long()
        queries = q[begin:end].transpose(0, 1)  # [H, rows, Dh]
        keys, values = (pool[used].transpose(0, 1) for pool in (k_pool, v_pool))  # [H_kv, context + rows, Dh]
        visible = visible_keys(ancestors[begin:end], context, window)
        if soft_cap is None:
            mixed = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=visible, scale=scale, enable_gqa=group > 1
            )[0]
        else:
            scores = soft_capped(queries.float() @ keys.float().repeat_interleave(group, 0).mT * scale, soft_cap)
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype)
            mixed = weights @ values.repeat_interleave(group, 0)
        out[begin:end] = mixed.transpose(0, 1)
    return out
