"""``accept_chain`` in Triton, in three launches: totals of parts of rows, the walk, the draw.

Programs share a row in SPLITS parts where there are too few rows to fill the device.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from .triton_rows import (
    DRAFT_INVALID,
    DRAFT_ZERO,
    NEG_INF,
    RESIDUAL_EMPTY,
    TARGET_EMPTY,
    TARGET_NOT_FINITE,
    TOKEN_OUT_OF_RANGE,
    draw_part,
    inverse,
    probs,
    residual,
    row_law,
    split_rows,
    target_finding,
)


@triton.jit
def chain_partials_kernel(
    target_ptr,
    draft_ptr,
    row_start_ptr,
    temperature_ptr,
    partials_ptr,
    where_ptr,
    target_stride,
    draft_stride,
    target_width,
    draft_width,
    num_sequences,
    num_rows,
    part,
    HAS_DRAFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, split): maximum and total of a part of the target row and of the draft row.

    A greedy sequence's draft rows, and the draft rows of last rows, are not read.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    low, high = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64) + num_sequences
    while high - low > 1:  # the sequence whose rows these are: the last one that starts at or before the row
        middle = (low + high) // 2
        starts_before = tl.load(row_start_ptr + middle) <= row
        low, high = tl.where(starts_before, middle, low), tl.where(starts_before, high, middle)
    temperature = tl.load(temperature_ptr + low).to(tl.float32)
    scale = inverse(temperature)
    start = split * part
    peak, where, total = row_law(
        target_ptr + row * target_stride, start, tl.minimum(start + part, target_width), scale, BLOCK
    )
    out = partials_ptr + row * SPLITS + split
    size = num_rows * SPLITS
    tl.store(out, peak)
    tl.store(out + size, total)
    tl.store(where_ptr + row * SPLITS + split, where)
    if HAS_DRAFT:
        if (temperature > 0.0) & (row + 1 < tl.load(row_start_ptr + low + 1)):
            peak, where, total = row_law(
                draft_ptr + row * draft_stride, start, tl.minimum(start + part, draft_width), scale, BLOCK
            )
            tl.store(out + 2 * size, peak)
            tl.store(out + 3 * size, total)


@triton.jit
def combined(partials_ptr, row, size, scale, SPLITS: tl.constexpr):
    """Maximum and total of a whole row from those of its parts."""
    offs = row * SPLITS + tl.arange(0, SPLITS)
    peaks, totals = tl.load(partials_ptr + offs), tl.load(partials_ptr + size + offs)
    broken = tl.max((peaks != peaks).to(tl.int32), 0)
    peak = tl.max(tl.where(peaks != peaks, NEG_INF, peaks), 0)
    shift = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    total = tl.sum(tl.where(peaks == NEG_INF, 0.0, totals * tl.exp((peaks - shift) * scale)), 0)
    return tl.where(broken > 0, float("nan"), peak), total


@triton.jit
def chain_walk_kernel(
    row_tokens_ptr,
    target_ptr,
    draft_ptr,
    uniforms_ptr,
    row_start_ptr,
    temperature_ptr,
    partials_ptr,
    where_ptr,
    sums_ptr,
    laws_ptr,
    final_ptr,
    num_accepted_ptr,
    next_token_ptr,
    status_ptr,
    target_stride,
    draft_stride,
    target_width,
    draft_width,
    num_rows,
    part,
    HAS_DRAFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence, split): walk the chain, from the parts' totals and single logits, then sum one part of the
    weights that the final token is drawn from. Every split walks: that is a few loads."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    size = num_rows * SPLITS
    first, end = tl.load(row_start_ptr + b), tl.load(row_start_ptr + b + 1)
    temperature = tl.load(temperature_ptr + b).to(tl.float32)
    greedy = temperature == 0.0
    scale = inverse(temperature)
    status = tl.full((), 0, tl.int32)
    row = first
    rejected = tl.full((), -1, tl.int64)
    walking = first + 1 < end
    while walking:
        token = tl.load(row_tokens_ptr + row + 1).to(tl.int64)
        if token == -1:
            walking = False
        else:
            peak, total = combined(partials_ptr, row, size, scale, SPLITS)
            outside = (token < 0) | (token >= target_width)
            found = tl.where(outside, TOKEN_OUT_OF_RANGE, target_finding(peak))
            accepted = tl.full((), 0, tl.int32) > 0
            if found == 0:
                if greedy:
                    offs = row * SPLITS + tl.arange(0, SPLITS)
                    at_peak = tl.load(partials_ptr + offs) == peak
                    accepted = token == tl.min(tl.where(at_peak, tl.load(where_ptr + offs), target_width), 0)
                else:
                    q = probs(target_ptr + row * target_stride, token, target_width, peak, scale, total)
                    p = tl.full((), 1.0, tl.float32)
                    if HAS_DRAFT:
                        draft_peak, draft_total = combined(partials_ptr + 2 * size, row, size, scale, SPLITS)
                        usable = tl.abs(draft_peak) < float("inf")
                        own = probs(draft_ptr + row * draft_stride, token, draft_width, draft_peak, scale, draft_total)
                        p = tl.where(usable, own, 0.0)
                        found = tl.where(usable, tl.where(p == 0.0, DRAFT_ZERO, 0), DRAFT_INVALID)
                    coin = tl.load(uniforms_ptr + row + 1)
                    accepted = (found == 0) & (coin * p.to(tl.float64) < q.to(tl.float64))
            status |= found
            # A rejection for a stated reason takes its token from the target row, an ordinary one from the residual.
            rejected = tl.where(accepted | (found != 0), -1, token)
            row += accepted.to(tl.int64)
            walking = accepted & (row + 1 < end)

    fatal = (status & (TARGET_NOT_FINITE | TARGET_EMPTY | TOKEN_OUT_OF_RANGE)) != 0
    drawing = (first < end) & (fatal == 0)
    next_token = tl.full((), -1, tl.int64)
    if drawing:
        peak, total = combined(partials_ptr, row, size, scale, SPLITS)
        found = target_finding(peak)
        status |= found
        if found == 0:
            if greedy:
                offs = row * SPLITS + tl.arange(0, SPLITS)
                at_peak = tl.load(partials_ptr + offs) == peak
                next_token = tl.min(tl.where(at_peak, tl.load(where_ptr + offs), target_width), 0)
            else:
                draft_peak, draft_total = peak, total
                if HAS_DRAFT:
                    if rejected >= 0:
                        draft_peak, draft_total = combined(partials_ptr + 2 * size, row, size, scale, SPLITS)
                weight = tl.full((), 0.0, tl.float64)
                start = split * part
                stop = tl.minimum(start + part, target_width)
                laws = (peak, total, draft_peak, draft_total)
                while start < stop:
                    offs = start + tl.arange(0, BLOCK)
                    own = residual(
                        target_ptr + row * target_stride,
                        draft_ptr + row * draft_stride,
                        offs,
                        stop,
                        tl.minimum(stop, draft_width),
                        laws,
                        scale,
                        rejected,
                        HAS_DRAFT,
                    )
                    weight += tl.sum(own.to(tl.float64), 0)
                    start += BLOCK
                tl.store(sums_ptr + b * SPLITS + split, weight)
                next_token = tl.full((), -2, tl.int64)  # to be drawn
                if split == 0:
                    tl.store(laws_ptr + b * 4, peak)
                    tl.store(laws_ptr + b * 4 + 1, total)
                    tl.store(laws_ptr + b * 4 + 2, draft_peak)
                    tl.store(laws_ptr + b * 4 + 3, draft_total)
    if split == 0:
        tl.store(num_accepted_ptr + b, (row - first).to(tl.int32))
        tl.store(next_token_ptr + b, next_token.to(tl.int32))
        tl.store(status_ptr + b, status)
        tl.store(final_ptr + b * 2, row)
        tl.store(final_ptr + b * 2 + 1, rejected)


@triton.jit
def chain_draw_kernel(
    target_ptr,
    draft_ptr,
    uniforms_ptr,
    row_start_ptr,
    temperature_ptr,
    sums_ptr,
    laws_ptr,
    final_ptr,
    next_token_ptr,
    status_ptr,
    target_stride,
    draft_stride,
    target_width,
    draft_width,
    part,
    HAS_DRAFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence: which part the coin falls into, then where in that part."""
    b = tl.program_id(0).to(tl.int64)
    if tl.load(next_token_ptr + b) == -2:
        row, rejected = tl.load(final_ptr + b * 2), tl.load(final_ptr + b * 2 + 1)
        target_ptr += row * target_stride
        draft_ptr += row * draft_stride
        scale = inverse(tl.load(temperature_ptr + b).to(tl.float32))
        laws_ptr += b * 4
        laws = (tl.load(laws_ptr), tl.load(laws_ptr + 1), tl.load(laws_ptr + 2), tl.load(laws_ptr + 3))
        splits = tl.arange(0, SPLITS)
        sums = tl.load(sums_ptr + b * SPLITS + splits)
        total = tl.sum(sums, 0)
        if (total == 0.0) & (rejected >= 0):
            rejected = tl.full((), -1, tl.int64)
            start = tl.full((), 0, tl.int64)
            while start < target_width:
                offs = start + tl.arange(0, BLOCK)
                own = residual(target_ptr, draft_ptr, offs, target_width, draft_width, laws, scale, rejected, HAS_DRAFT)
                total += tl.sum(own.to(tl.float64), 0)
                start += BLOCK
            tl.store(status_ptr + b, tl.load(status_ptr + b) | RESIDUAL_EMPTY)
            sums = tl.where(splits == 0, total, 0.0)
            part = target_width
        threshold = tl.load(uniforms_ptr + tl.load(row_start_ptr + b)) * total
        running = tl.cumsum(sums, 0)
        last = tl.max(tl.where(sums > 0.0, splits, 0), 0)
        split = tl.min(tl.where((running > threshold) & (sums > 0.0), splits, last), 0).to(tl.int64)
        before = tl.sum(tl.where(splits < split, sums, 0.0), 0)
        token = draw_part(
            target_ptr,
            draft_ptr,
            split * part,
            target_width,
            draft_width,
            laws,
            scale,
            rejected,
            threshold,
            before,
            HAS_DRAFT,
            BLOCK,
        )
        tl.store(next_token_ptr + b, token.to(tl.int32))


def accept_chain(
    row_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_sequences, (num_rows, width) = row_start.shape[0] - 1, target_logits.shape
    num_accepted, next_token, status = (
        torch.empty(num_sequences, dtype=torch.int32, device=target_logits.device) for _ in range(3)
    )
    if not num_sequences:
        return num_accepted, next_token, status
    splits, part, options = split_rows(num_rows, width, target_logits.device)
    has_draft = draft_logits is not None
    draft = draft_logits if draft_logits is not None else target_logits
    sizes = (target_logits.stride(0), draft.stride(0), width, draft.shape[1])
    partials = target_logits.new_empty((4, num_rows, splits), dtype=torch.float32)
    where = target_logits.new_empty((num_rows, splits), dtype=torch.int64)
    sums = target_logits.new_empty((num_sequences, splits), dtype=torch.float64)
    laws = target_logits.new_empty((num_sequences, 4), dtype=torch.float32)
    final = target_logits.new_empty((num_sequences, 2), dtype=torch.int64)
    constants = {"HAS_DRAFT": has_draft, "SPLITS": splits, **options}
    if num_rows:
        chain_partials_kernel[(num_rows, splits)](
            target_logits,
            draft,
            row_start,
            temperature,
            partials,
            where,
            *sizes,
            num_sequences,
            num_rows,
            part,
            **constants,
        )
    chain_walk_kernel[(num_sequences, splits)](
        row_tokens,
        target_logits,
        draft,
        uniforms,
        row_start,
        temperature,
        partials,
        where,
        sums,
        laws,
        final,
        num_accepted,
        next_token,
        status,
        *sizes,
        num_rows,
        part,
        **constants,
    )
    chain_draw_kernel[(num_sequences,)](
        target_logits,
        draft,
        uniforms,
        row_start,
        temperature,
        sums,
        laws,
        final,
        next_token,
        status,
        *sizes,
        part,
        **constants,
    )
    return num_accepted, next_token, status
