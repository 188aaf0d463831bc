"""``bypass_linear`` in Triton: programs own a few outputs each, so that every weight is read once for all rows."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..configurations import configuration
from .config import ACTIVATIONS

MAX_ROWS = 64  # rows of a tile; more rows take several tiles, which read the weights once each


@triton.jit
def add_products(sums, x, weight_ptr, weight_offs, mask, PRECISION: tl.constexpr):
    weight = tl.load(weight_ptr + weight_offs, mask=mask, other=0.0)
    return tl.dot(x, tl.trans(weight), sums, input_precision=PRECISION)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """silu (1) or the tanh approximation of GELU (2); both are gate times a sigmoid."""
    if ACTIVATION == 1:
        return gate * tl.sigmoid(gate)
    # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (gate + 0.044715 gate^3)
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def bypass_linear_kernel(
    x_ptr,
    weight_ptr,
    keep_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    num_rows,
    depth,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (outputs, rows): BLOCK_N of ``num_outputs`` outputs, with activation of both halves, of BLOCK_R rows."""
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows, outputs = offs_r < num_rows, offs_n < num_outputs
    keep = tl.load(keep_ptr + offs_r, mask=rows, other=0) != 0
    tile = rows[:, None] & outputs[None, :]
    out_offs = offs_r[:, None] * num_outputs + offs_n[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_r[:, None] * residual_stride + offs_n[None, :], mask=tile, other=0.0)
    else:
        residual = tl.zeros((BLOCK_R, BLOCK_N), out_ptr.dtype.element_ty)
    if tl.max(keep.to(tl.int32), 0) == 0:
        tl.store(out_ptr + out_offs, residual, mask=tile)
        return

    sums = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    second_sums = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        x_mask, weight_mask = keep[:, None], outputs[:, None]
        if not EVEN_DEPTH:
            x_mask = x_mask & (offs_k < depth)[None, :]
            weight_mask = weight_mask & (offs_k < depth)[None, :]
        x = tl.load(x_ptr + offs_r[:, None] * x_stride + offs_k[None, :], mask=x_mask, other=0.0)
        weight_offs = offs_n[:, None] * weight_stride + offs_k[None, :]
        sums = add_products(sums, x, weight_ptr, weight_offs, weight_mask, PRECISION)
        if ACTIVATION != 0:
            weight_offs = (offs_n + num_outputs)[:, None] * weight_stride + offs_k[None, :]
            second_sums = add_products(second_sums, x, weight_ptr, weight_offs, weight_mask, PRECISION)

    if HAS_BIAS:
        sums += tl.load(bias_ptr + offs_n, mask=outputs, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != 0:
        if HAS_BIAS:
            second_sums += tl.load(bias_ptr + num_outputs + offs_n, mask=outputs, other=0.0).to(tl.float32)[None, :]
        sums = activated(sums, ACTIVATION) * second_sums
    if HAS_RESIDUAL:
        sums += residual.to(tl.float32)
    tl.store(out_ptr + out_offs, tl.where(keep[:, None], sums.to(residual.dtype), residual), mask=tile)


def bypass_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    keep: torch.Tensor,
    bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    activation: Optional[str],
) -> torch.Tensor:
    num_rows, depth = x.shape
    num_outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = x.new_empty(num_rows, num_outputs)
    if out.numel():
        block_r = min(MAX_ROWS, max(16, triton.next_power_of_2(num_rows)))
        config = configuration("layer_skip", "bypass_linear", x.device, block_r)
        block_k = min(config["BLOCK_K_BYTES"] // x.element_size(), max(16, triton.next_power_of_2(depth)))
        bypass_linear_kernel[(triton.cdiv(num_outputs, config["BLOCK_N"]), triton.cdiv(num_rows, block_r))](
            x,
            weight,
            keep,
            weight if bias is None else bias,
            x if residual is None else residual,
            out,
            x.stride(0),
            weight.stride(0),
            0 if residual is None else residual.stride(0),
            num_rows,
            depth,
            num_outputs,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=0 if activation is None else 1 + ACTIVATIONS.index(activation),
            EVEN_DEPTH=depth % block_k == 0,
            PRECISION="ieee",
            BLOCK_R=block_r,
            BLOCK_N=config["BLOCK_N"],
            BLOCK_K=block_k,
            num_warps=config["num_warps"],
            num_stages=config["num_stages"],
        )
    return out
