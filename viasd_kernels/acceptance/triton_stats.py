"""``acceptance_stats`` in Triton: one program per row, which reads both rows twice."""

import math
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from .op import empty_stats
from .triton_rows import inverse, log_weights, row_law, row_options, weighted


@triton.jit
def acceptance_stats_kernel(
    draft_ptr,
    target_ptr,
    tokens_ptr,
    temperature_ptr,
    stats_ptr,
    argmax_ptr,
    draft_stride,
    target_stride,
    draft_width,
    target_width,
    num_rows,
    log_alpha,
    log_beta,
    HAS_DRAFT: tl.constexpr,
    UNDERSHOOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, which reads it twice: for maxima and totals, then for the sums."""
    row = tl.program_id(0).to(tl.int64)
    draft_ptr += row * draft_stride
    target_ptr += row * target_stride
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    scale = inverse(temperature)
    draft_peak, draft_total = tl.full((), float("nan"), tl.float32), tl.full((), 1.0, tl.float32)
    if HAS_DRAFT:
        draft_peak, _, draft_total = row_law(draft_ptr, 0, draft_width, scale, BLOCK)
    target_peak, argmax, target_total = row_law(target_ptr, 0, target_width, scale, BLOCK)
    draft_log_total, target_log_total = tl.log(draft_total), tl.log(target_total)

    zeros = tl.zeros((BLOCK,), tl.float32)
    kl_draft_target, kl_target_draft, distance, cost, draft_sum, target_sum = zeros, zeros, zeros, zeros, zeros, zeros
    for start in range(0, target_width, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        log_q = log_weights(target_ptr, offs, target_width, target_peak, scale) - target_log_total
        q = tl.exp(log_q)
        target_sum += weighted(q, log_q)
        if HAS_DRAFT:
            log_p = log_weights(draft_ptr, offs, draft_width, draft_peak, scale) - draft_log_total
            p = tl.exp(log_p)
            # Infinite where one of the two masks the token, NaN where both do: there both weights are 0.
            ratio = log_p - log_q
            second = -ratio if UNDERSHOOT else ratio
            kl_draft_target += weighted(p, ratio)
            kl_target_draft += weighted(q, -ratio)
            distance += tl.abs(p - q)
            over, under = log_alpha + ratio, log_beta + second
            cost += weighted(p, tl.where(over < 0.0, 0.0, over)) + weighted(q, tl.where(under < 0.0, 0.0, under))
            draft_sum += weighted(p, log_p)

    draft_valid = tl.abs(draft_peak) < float("inf")
    target_valid = tl.abs(target_peak) < float("inf")
    both = draft_valid & target_valid
    token = tl.load(tokens_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < target_width)
    target_gap = log_weights(target_ptr, token, tl.where(known, target_width, 0), target_peak, scale)
    in_draft = known & (token < draft_width)
    draft_gap = log_weights(draft_ptr, token, tl.where(in_draft, draft_width, 0), draft_peak, scale)

    stats_ptr += row
    tl.store(stats_ptr, tl.where(both, tl.sum(kl_draft_target, 0), float("nan")))
    tl.store(stats_ptr + num_rows, tl.where(both, tl.sum(kl_target_draft, 0), float("nan")))
    tl.store(stats_ptr + 2 * num_rows, tl.where(both, 0.5 * tl.sum(distance, 0), float("nan")))
    tl.store(stats_ptr + 3 * num_rows, tl.where(both, tl.sum(cost, 0), float("nan")))
    tl.store(stats_ptr + 4 * num_rows, tl.where(target_valid & known, tl.exp(target_gap), float("nan")))
    tl.store(stats_ptr + 5 * num_rows, tl.where(draft_valid & known, draft_gap - draft_log_total, float("nan")))
    tl.store(stats_ptr + 6 * num_rows, tl.where(target_valid & known, target_gap - target_log_total, float("nan")))
    tl.store(stats_ptr + 7 * num_rows, tl.where(draft_valid, -tl.sum(draft_sum, 0), float("nan")))
    tl.store(stats_ptr + 8 * num_rows, tl.where(target_valid, -tl.sum(target_sum, 0), float("nan")))
    tl.store(argmax_ptr + row, tl.where(target_valid, argmax, -1))


def acceptance_stats(
    draft_logits: Optional[torch.Tensor],
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: torch.Tensor,
    alpha: float,
    beta: float,
    undershoot: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    stats, argmax = empty_stats(target_logits, draft_logits)
    num_rows, width = target_logits.shape
    if num_rows:
        draft = target_logits if draft_logits is None else draft_logits
        acceptance_stats_kernel[(num_rows,)](
            draft,
            target_logits,
            tokens,
            temperature,
            stats,
            argmax,
            draft.stride(0),
            target_logits.stride(0),
            draft.shape[1],
            width,
            num_rows,
            math.log(1 - alpha),
            math.log(beta),
            HAS_DRAFT=draft_logits is not None,
            UNDERSHOOT=undershoot,
            **row_options("rows", width, target_logits.device),
        )
    return stats, argmax
