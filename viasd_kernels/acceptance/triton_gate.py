"""``gate_tiers`` in Triton, in two launches: the statistics of all rows, then the walk, with its draws."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from .triton_rows import (
    DRAFT_INVALID,
    NEG_INF,
    TOKEN_OUT_OF_RANGE,
    draw_row,
    inverse,
    row_law,
    row_options,
    target_finding,
)
from .triton_stats import acceptance_stats


@triton.jit
def gate_walk_kernel(
    row_tokens_ptr,
    slim_ptr,
    uniforms_ptr,
    row_start_ptr,
    accept_ptr,
    escalate_ptr,
    temperature_ptr,
    stats_ptr,
    argmax_ptr,
    tokens_ptr,
    regions_ptr,
    num_emitted_ptr,
    escalated_ptr,
    status_ptr,
    slim_stride,
    width,
    num_rows,
    CRITERION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence: sends the drafted rows to their regions by the statistics, draws where region B asks.

    CRITERION is the row of the packed statistics that decides: 4 "ratio", 2 "tv", 0 "kl".
    """
    b = tl.program_id(0).to(tl.int64)
    first, end = tl.load(row_start_ptr + b), tl.load(row_start_ptr + b + 1)
    temperature = tl.load(temperature_ptr + b).to(tl.float32)
    greedy = temperature == 0.0
    scale = inverse(temperature)
    accept, escalate = tl.load(accept_ptr + b).to(tl.float32), tl.load(escalate_ptr + b).to(tl.float32)
    status = tl.full((), 0, tl.int32)
    emitted = tl.full((), 0, tl.int32)
    escalated = tl.full((), 0, tl.int32)
    row = first
    judged = first  # rows before this one have statistics
    walking = first < end
    whole = first < end  # every row of the block so far was kept
    while walking:
        token = tl.full((), -1, tl.int64)
        if row + 1 < end:
            token = tl.load(row_tokens_ptr + row + 1).to(tl.int64)
        if token == -1:
            walking = False
        else:
            row_ptr = slim_ptr + row * slim_stride
            argmax = tl.load(argmax_ptr + row).to(tl.int64)
            found = tl.where((token < 0) | (token >= width), TOKEN_OUT_OF_RANGE, 0)
            if (found == 0) & (argmax < 0):
                peak, _, _ = row_law(row_ptr, 0, width, scale, BLOCK)
                found = target_finding(peak)
            score = tl.load(stats_ptr + CRITERION * num_rows + row)
            if CRITERION == 4:
                keep, stop = score >= accept, score < escalate
            else:
                keep, stop = score <= accept, score > escalate
                entropy = tl.load(stats_ptr + 7 * num_rows + row)
                found = tl.where((found == 0) & (entropy != entropy), DRAFT_INVALID, found)
            masked = tl.load(stats_ptr + 6 * num_rows + row) == NEG_INF
            region = tl.where(keep, 0, tl.where(stop, 2, 1))
            region = tl.where((found != 0) | masked, 2, region)
            after = tl.where(region == 0, token, -1)
            if region == 1:
                if greedy:
                    after = argmax
                else:
                    peak, _, total = row_law(row_ptr, 0, width, scale, BLOCK)
                    after = draw_row(row_ptr, width, (peak, total), scale, tl.load(uniforms_ptr + row + 1), BLOCK)
            tl.store(tokens_ptr + row, after.to(tl.int32))
            tl.store(regions_ptr + row + 1, region.to(tl.int8))
            status |= found
            emitted += (after >= 0).to(tl.int32)
            escalated |= (region == 2).to(tl.int32)
            whole = (region != 2) & (after == token)
            walking = whole
            row += whole.to(tl.int64)
            judged += 1
    if whole:
        row_ptr = slim_ptr + row * slim_stride
        peak, argmax, total = row_law(row_ptr, 0, width, scale, BLOCK)
        found = target_finding(peak)
        status |= found
        escalated |= (found != 0).to(tl.int32)
        if found == 0:
            after = argmax
            if temperature > 0.0:
                after = draw_row(row_ptr, width, (peak, total), scale, tl.load(uniforms_ptr + first), BLOCK)
            tl.store(tokens_ptr + row, after.to(tl.int32))
            emitted += 1
    while judged < end:
        for i in tl.static_range(9):
            tl.store(stats_ptr + i * num_rows + judged, float("nan"))
        tl.store(argmax_ptr + judged, -1)
        judged += 1
    tl.store(num_emitted_ptr + b, emitted)
    tl.store(escalated_ptr + b, escalated.to(tl.int1))
    tl.store(status_ptr + b, status)


CRITERION_ROWS = {"ratio": 4, "tv": 2, "kl": 0}  # of the packed statistics


def gate_tiers(
    row_tokens: torch.Tensor,
    slim_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    criterion: str,
    accept: torch.Tensor,
    escalate: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, ...]:
    num_sequences, (num_rows, width) = row_start.shape[0] - 1, slim_logits.shape
    device = slim_logits.device
    tokens = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    regions = torch.full((num_rows,), -1, dtype=torch.int8, device=device)
    num_emitted, status = (torch.empty(num_sequences, dtype=torch.int32, device=device) for _ in range(2))
    escalated = torch.empty(num_sequences, dtype=torch.bool, device=device)
    # A row's statistics are about the token of the next one.
    following = torch.full_like(row_tokens, -1)
    following[:-1] = row_tokens[1:]
    ones = torch.ones(num_rows, dtype=torch.float32, device=device)
    stats, argmax = acceptance_stats(draft_logits, slim_logits, following, ones, 0.5, 0.3, False)
    if num_sequences:
        gate_walk_kernel[(num_sequences,)](
            row_tokens,
            slim_logits,
            uniforms,
            row_start,
            accept,
            escalate,
            temperature,
            stats,
            argmax,
            tokens,
            regions,
            num_emitted,
            escalated,
            status,
            slim_logits.stride(0),
            width,
            num_rows,
            CRITERION=CRITERION_ROWS[criterion],
            **row_options("gate_tiers", width, device),
        )
    return tokens, regions, num_emitted, escalated, status, stats, argmax
