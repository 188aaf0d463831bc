"""What the Triton kernels of this family do with single rows.

Rows are read in blocks, converted to float32 right after the load. Sums over the vocabulary that decide a draw are
float64.
"""

from typing import Tuple

import torch
import triton
import triton.language as tl

from ..configurations import configuration

NEG_INF = tl.constexpr(float("-inf"))

# Bits of viasd_kernels.Status.
TARGET_NOT_FINITE = tl.constexpr(1)
TARGET_EMPTY = tl.constexpr(2)
TOKEN_OUT_OF_RANGE = tl.constexpr(4)
DRAFT_INVALID = tl.constexpr(8)
DRAFT_ZERO = tl.constexpr(16)
RESIDUAL_EMPTY = tl.constexpr(32)


@triton.jit
def inverse(temperature):
    """1 / temperature; 0 counts as 1, and what is below the smallest normal number as that: the result is finite."""
    return 1.0 / tl.maximum(tl.where(temperature == 0.0, 1.0, temperature), 1.1754944e-38)


@triton.jit
def weighted(weight, value):
    """weight * value with 0 * anything = 0; a NaN weight stays NaN."""
    return tl.where(weight == 0.0, 0.0, weight * value)


@triton.jit
def log_weights(row_ptr, offs, width, peak, scale):
    """(x - peak) * scale of a block, -inf past the row's end; what -inf - -inf leaves is -inf."""
    x = tl.load(row_ptr + offs, mask=offs < width, other=NEG_INF).to(tl.float32)
    return tl.where(x == NEG_INF, NEG_INF, (x - peak) * scale)


@triton.jit
def row_law(row_ptr, start, end, scale, BLOCK: tl.constexpr):
    """One read of x[start:end]: the maximum (NaN if there is one), its lowest index, and the sum of
    exp((x - maximum) * scale)."""
    peak = tl.full((), NEG_INF, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    where = tl.full((), 0, tl.int64)
    broken = tl.full((), 0, tl.int32)
    first = start
    while first < end:
        offs = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + offs, mask=offs < end, other=NEG_INF).to(tl.float32)
        broken |= tl.max((x != x).to(tl.int32), 0)
        x = tl.where(x != x, NEG_INF, x)
        best = tl.max(x, 0)
        where = tl.where(best > peak, tl.min(tl.where(x == best, offs, end), 0), where)
        highest = tl.maximum(best, peak)
        shift = tl.where(tl.abs(highest) < float("inf"), highest, 0.0)
        total = total * tl.exp((peak - shift) * scale) + tl.sum(tl.exp((x - shift) * scale), 0)
        peak = highest
        first += BLOCK
    return tl.where(broken > 0, float("nan"), peak), where, total


@triton.jit
def target_finding(peak):
    """The fatal status bit of a target row with this maximum; 0 for a distribution."""
    return tl.where(tl.abs(peak) < float("inf"), 0, tl.where(peak == NEG_INF, TARGET_EMPTY, TARGET_NOT_FINITE))


@triton.jit
def probs(row_ptr, offs, width, peak, scale, total):
    return tl.exp(log_weights(row_ptr, offs, width, peak, scale)) / total


@triton.jit
def residual(target_ptr, draft_ptr, offs, target_width, draft_width, laws, scale, rejected, HAS_DRAFT: tl.constexpr):
    """float32 weights that the final token is drawn from: q, or after a rejection max(0, q - p)."""
    target_peak, target_total, draft_peak, draft_total = laws
    q = probs(target_ptr, offs, target_width, target_peak, scale, target_total)
    if HAS_DRAFT:
        if rejected >= 0:
            p = probs(draft_ptr, offs, draft_width, draft_peak, scale, draft_total)
            q = tl.maximum(q - p, 0.0)
    else:
        q = tl.where(offs == rejected, 0.0, q)
    return q


@triton.jit
def draw_part(
    target_ptr,
    draft_ptr,
    start,
    target_width,
    draft_width,
    laws,
    scale,
    rejected,
    threshold,
    running,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From ``start`` on, the first id with mass whose running sum exceeds the threshold; else the last id with mass."""
    drawn = tl.full((), -1, tl.int64)
    last = tl.full((), -1, tl.int64)
    while (start < target_width) & (drawn < 0):
        offs = start + tl.arange(0, BLOCK)
        own = residual(target_ptr, draft_ptr, offs, target_width, draft_width, laws, scale, rejected, HAS_DRAFT)
        sums = running + tl.cumsum(own.to(tl.float64), 0)
        positive = own > 0.0
        crossing = tl.min(tl.where(positive & (sums > threshold), offs, target_width), 0)
        drawn = tl.where(crossing < target_width, crossing, drawn)
        last = tl.maximum(last, tl.max(tl.where(positive, offs, -1), 0))
        running += tl.sum(own.to(tl.float64), 0)
        start += BLOCK
    return tl.where(drawn >= 0, drawn, last)


@triton.jit
def draw_row(row_ptr, width, law, scale, coin, BLOCK: tl.constexpr):
    """A draw from a whole row, whose maximum and total are ``law``."""
    laws = (law[0], law[1], law[0], law[1])
    nothing = tl.full((), -1, tl.int64)
    total = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int64)
    while start < width:
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(probs(row_ptr, offs, width, law[0], scale, law[1]).to(tl.float64), 0)
        start += BLOCK
    start = tl.full((), 0, tl.int64)
    running = tl.full((), 0.0, tl.float64)
    return draw_part(row_ptr, row_ptr, start, width, width, laws, scale, nothing, coin * total, running, False, BLOCK)


PROGRAMS = 512  # fill a large device some four times over
MAX_SPLITS = 32


def split_rows(num_rows: int, width: int, device: torch.device) -> Tuple[int, int, "dict[str, int]"]:
    """How many parts a row is cut into, elements of a part, and the options of a launch: BLOCK and num_warps."""
    options = row_options("rows", width, device)
    blocks = triton.cdiv(width, options["BLOCK"])
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS, max(num_rows, 1)))
    splits = min(wanted, MAX_SPLITS, triton.next_power_of_2(blocks))
    return splits, triton.cdiv(blocks, splits) * options["BLOCK"], options


def row_options(kernel: str, width: int, device: torch.device) -> "dict[str, int]":
    """A kernel's BLOCK, the elements of a row that a program holds at a time, and num_warps."""
    config = configuration("acceptance", kernel, device, width)
    return {**config, "BLOCK": min(config["BLOCK"], max(16, triton.next_power_of_2(width)))}
