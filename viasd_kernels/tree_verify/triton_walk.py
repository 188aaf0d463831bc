"""``verify_tree`` in Triton: one program per sequence, which walks from the root.

At a node under judgement the target's weights exp((x - max) / T), and the proposal's where children were drawn, are
written down, so that a rejection can change them. Their sums are float64; divided by them, they are probabilities.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from ..acceptance.triton_rows import (
    DRAFT_INVALID,
    DRAFT_ZERO,
    RESIDUAL_EMPTY,
    TARGET_EMPTY,
    TOKEN_OUT_OF_RANGE,
    inverse,
    log_weights,
    probs,
    row_law,
    target_finding,
)
from ..configurations import configuration
from .structs import PROPOSALS

TREE_PRUNED = tl.constexpr(64)  # of viasd_kernels.Status, as the others

DETERMINISTIC = tl.constexpr(PROPOSALS.index("deterministic"))
WITHOUT_REPLACEMENT = tl.constexpr(PROPOSALS.index("without_replacement"))


@triton.jit
def inspect_rows(tree, path_ptr, num_rows, width, BLOCK_ROWS: tl.constexpr):
    """Empties the path but for the root; TREE_PRUNED for a broken link, or a token in a row that cannot be followed."""
    depth_ptr, first_child_ptr, next_sibling_ptr, tokens_ptr = tree
    found = tl.full((), 0, tl.int32)
    for start in range(0, num_rows, BLOCK_ROWS):
        offs = start + tl.arange(0, BLOCK_ROWS)
        mask = offs < num_rows
        child = tl.load(first_child_ptr + offs, mask=mask, other=-1)
        sibling = tl.load(next_sibling_ptr + offs, mask=mask, other=-1)
        token = tl.load(tokens_ptr + offs, mask=mask, other=-1)
        depth = tl.load(depth_ptr + offs, mask=mask, other=0)
        broken = (child != -1) & ((child <= offs) | (child >= num_rows))
        broken = broken | ((sibling != -1) & ((sibling <= offs) | (sibling >= num_rows)))
        pruned = (offs > 0) & (token != -1) & ((depth < 0) | (token < 0) | (token >= width))
        found |= tl.max((broken | pruned).to(tl.int32), 0) * TREE_PRUNED
        tl.store(path_ptr + offs, tl.where(offs == 0, 0, -1), mask=mask)
    return found


@triton.jit
def next_usable(tree, row, link, num_rows, width, wanted):
    """The first row at ``link`` or among its later siblings that can be followed and has the wanted token (-1: any).

    Links are followed forward only, so every search ends, with -1 where nothing is found.
    """
    depth_ptr, _, next_sibling_ptr, tokens_ptr = tree
    found = tl.full((), -1, tl.int64)
    while (found < 0) & (row < link) & (link < num_rows):
        token = tl.load(tokens_ptr + link).to(tl.int64)
        usable = (tl.load(depth_ptr + link) >= 0) & (token >= 0) & (token < width)
        found = tl.where(usable & ((wanted < 0) | (token == wanted)), link, found)
        row = link
        link = tl.load(next_sibling_ptr + link).to(tl.int64)
    return found


@triton.jit
def write_weights(row_ptr, weights_ptr, width, peak, scale, BLOCK: tl.constexpr):
    """Writes a row's weights down and returns their sum."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, width, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        weights = tl.exp(log_weights(row_ptr, offs, width, peak, scale))
        tl.store(weights_ptr + offs, weights, mask=offs < width)
        total += tl.sum(weights.to(tl.float64), 0)
    tl.debug_barrier()  # any thread may read what another one wrote
    return total


@triton.jit
def remove_weight(weights_ptr, token, width, BLOCK: tl.constexpr):
    """Makes the token's weight 0 and returns the sum of the others."""
    tl.debug_barrier()
    tl.store(weights_ptr + token, 0.0)
    tl.debug_barrier()
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, width, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(weights_ptr + offs, mask=offs < width, other=0.0).to(tl.float64), 0)
    return total


@triton.jit
def remaining(weights_ptr, draft_weights_ptr, offs, width, draft_width, factor):
    """max(0, r - d) of a block, in the scale of r's weights."""
    target = tl.load(weights_ptr + offs, mask=offs < width, other=0.0)
    draft = tl.load(draft_weights_ptr + offs, mask=offs < draft_width, other=0.0)
    return tl.maximum(target - factor * draft, 0.0)


@triton.jit
def subtract_draft(weights_ptr, draft_weights_ptr, width, draft_width, factor, BLOCK: tl.constexpr):
    """r <- max(0, r - d) unless nothing were left; returns the sum of what is, or would be, left."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, width, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(remaining(weights_ptr, draft_weights_ptr, offs, width, draft_width, factor).to(tl.float64), 0)
    if total > 0.0:
        for start in range(0, width, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            left = remaining(weights_ptr, draft_weights_ptr, offs, width, draft_width, factor)
            tl.store(weights_ptr + offs, left, mask=offs < width)
        tl.debug_barrier()
    return total


@triton.jit
def draw_token(weights_ptr, width, threshold, BLOCK: tl.constexpr):
    """The first id with mass whose running sum exceeds the threshold; else the last id with mass."""
    drawn, last = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    running = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int32)
    while (start < width) & (drawn < 0):
        offs = start + tl.arange(0, BLOCK)
        own = tl.load(weights_ptr + offs, mask=offs < width, other=0.0)
        sums = running + tl.cumsum(own.to(tl.float64), 0)
        crossing = tl.min(tl.where((own > 0.0) & (sums > threshold), offs, width), 0)
        drawn = tl.where(crossing < width, crossing, drawn)
        last = tl.maximum(last, tl.max(tl.where(own > 0.0, offs, -1), 0))
        running += tl.sum(own.to(tl.float64), 0)
        start += BLOCK
    return tl.where(drawn >= 0, drawn, last)


@triton.jit
def judge_children(
    tree,
    child,
    coins_ptr,
    weights_ptr,
    draft_weights_ptr,
    draft_row_ptr,
    num_rows,
    width,
    draft_width,
    total,
    scale,
    PROPOSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From ``child`` on, the first that is accepted, or -1; the sum of what is left of the target; what was found."""
    found = tl.full((), 0, tl.int32)
    accepted = tl.full((), -1, tl.int64)
    draft_peak, draft_sum = tl.full((), 0.0, tl.float32), tl.full((), 1.0, tl.float32)
    draft_total = tl.full((), 1.0, tl.float64)
    if PROPOSAL != DETERMINISTIC:
        if child >= 0:
            draft_peak, _, draft_sum = row_law(draft_row_ptr, 0, draft_width, scale, BLOCK)
            if target_finding(draft_peak) == 0:
                draft_total = write_weights(draft_row_ptr, draft_weights_ptr, draft_width, draft_peak, scale, BLOCK)
            else:
                found |= DRAFT_INVALID
                child = tl.full((), -1, tl.int64)
    while (child >= 0) & (accepted < 0):
        token = tl.load(tree[3] + child).to(tl.int64)
        own = tl.load(weights_ptr + token)
        chance = tl.full((), 1.0, tl.float32)
        if PROPOSAL != DETERMINISTIC:
            drawn = tl.load(draft_weights_ptr + token, mask=token < draft_width, other=0.0)
            chance = tl.where(drawn > 0.0, (drawn / draft_total).to(tl.float32), 0.0)
            # A repeated sibling was emptied by the rule itself; what the proposal never had is reported.
            at_first = probs(draft_row_ptr, token, draft_width, draft_peak, scale, draft_sum)
            found |= tl.where(at_first > 0.0, 0, DRAFT_ZERO)
        prob = (own / total).to(tl.float32)
        coin = tl.load(coins_ptr + child)
        if (chance > 0.0) & (coin * chance.to(tl.float64) < prob.to(tl.float64)):
            accepted = child
        else:
            if chance > 0.0:
                if PROPOSAL == DETERMINISTIC:
                    left = remove_weight(weights_ptr, token, width, BLOCK)
                    tl.store(weights_ptr + token, own, mask=left == 0.0)
                else:
                    factor = (total / draft_total).to(tl.float32)
                    left = subtract_draft(weights_ptr, draft_weights_ptr, width, draft_width, factor, BLOCK)
                    if PROPOSAL == WITHOUT_REPLACEMENT:
                        draft_total = remove_weight(draft_weights_ptr, token, draft_width, BLOCK)
                tl.debug_barrier()
                found |= tl.where(left > 0.0, 0, RESIDUAL_EMPTY)
                total = tl.where(left > 0.0, left, total)
            child = next_usable(tree, child, tl.load(tree[2] + child).to(tl.int64), num_rows, width, -1)
    return accepted, total, found


@triton.jit
def verify_tree_kernel(
    depth_ptr,
    first_child_ptr,
    next_sibling_ptr,
    tokens_ptr,
    target_ptr,
    draft_ptr,
    argmax_ptr,
    uniforms_ptr,
    row_start_ptr,
    temperature_ptr,
    weights_ptr,
    path_ptr,
    num_accepted_ptr,
    next_token_ptr,
    status_ptr,
    target_stride,
    draft_stride,
    width,
    draft_width,
    HAS_TARGET: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    PROPOSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """PROPOSAL is the index of one of PROPOSALS. Without a target, ``width`` is more than any id."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(row_start_ptr + b).to(tl.int64)
    num_rows = tl.load(row_start_ptr + b + 1).to(tl.int64) - first
    num_accepted, status = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    next_token = tl.full((), -1, tl.int64)
    temperature = tl.load(temperature_ptr + b).to(tl.float32)
    sampled = temperature > 0.0
    scale = inverse(temperature)
    path_ptr += first
    tree = (depth_ptr + first, first_child_ptr + first, next_sibling_ptr + first, tokens_ptr + first)
    if HAS_TARGET:
        weights_ptr += b * (width + draft_width)

    status |= inspect_rows(tree, path_ptr, num_rows, width, BLOCK_ROWS)
    tl.debug_barrier()  # the walk writes where this wrote
    node = tl.full((), 0, tl.int64)
    walking = num_rows > 0
    while walking:
        row = first + node
        peak, token = tl.full((), 0.0, tl.float32), tl.full((), -1, tl.int64)
        found = tl.full((), TARGET_EMPTY, tl.int32)
        given = tl.full((), 0, tl.int32) > 0
        if HAS_ARGMAX:
            given = sampled == 0
            if given:
                token = tl.load(argmax_ptr + row).to(tl.int64)
                found = tl.where((token < 0) | (token >= width), TOKEN_OUT_OF_RANGE, 0)
        if HAS_TARGET:
            if given == 0:
                peak, token, _ = row_law(target_ptr + row * target_stride, 0, width, scale, BLOCK)
                found = target_finding(peak)
        status |= found
        accepted = tl.full((), -1, tl.int64)
        if found == 0:
            child = tl.load(tree[1] + node).to(tl.int64)
            child = next_usable(tree, node, child, num_rows, width, tl.where(sampled, -1, token))
            accepted = tl.where(sampled, -1, child)
            if HAS_TARGET:
                if sampled:
                    total = write_weights(target_ptr + row * target_stride, weights_ptr, width, peak, scale, BLOCK)
                    accepted, total, found = judge_children(
                        tree,
                        child,
                        uniforms_ptr + first,
                        weights_ptr,
                        weights_ptr + width,
                        draft_ptr + row * draft_stride,
                        num_rows,
                        width,
                        draft_width,
                        total,
                        scale,
                        PROPOSAL,
                        BLOCK,
                    )
                    status |= found
                    if accepted < 0:
                        threshold = tl.load(uniforms_ptr + first) * total
                        # Half a block: a scan of doubles takes the registers of a whole one.
                        token = draw_token(weights_ptr, width, threshold, BLOCK // 2).to(tl.int64)
            next_token = tl.where(accepted < 0, token, -1)
        walking = accepted >= 0
        if walking:
            num_accepted += 1
            tl.store(path_ptr + num_accepted, accepted.to(tl.int32))
            node = accepted
    tl.store(num_accepted_ptr + b, num_accepted)
    tl.store(next_token_ptr + b, next_token.to(tl.int32))
    tl.store(status_ptr + b, status)


BLOCK_ROWS = 128
ANY_ID = 2**62


def verify_tree(
    depth: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    row_tokens: torch.Tensor,
    full_logits: Optional[torch.Tensor],
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    proposal: str,
    full_argmax: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Path entries of rows that belong to no sequence hold anything."""
    num_sequences, device = row_start.shape[0] - 1, row_tokens.device
    path = torch.empty(row_tokens.shape, dtype=torch.int32, device=device)
    num_accepted, next_token, status = (torch.empty(num_sequences, dtype=torch.int32, device=device) for _ in range(3))
    if not num_sequences:
        return path, num_accepted, next_token, status
    has_target = full_logits is not None
    width = full_logits.shape[1] if full_logits is not None else ANY_ID
    has_draft = draft_logits is not None and has_target
    draft_width = draft_logits.shape[1] if draft_logits is not None and has_target else 0
    weights = torch.empty(num_sequences * (width + draft_width) if has_target else 0, device=device)
    target = weights if full_logits is None else full_logits
    draft = target if draft_logits is None else draft_logits
    config = configuration("tree_verify", "verify_tree", device, width)
    verify_tree_kernel[(num_sequences,)](
        depth,
        first_child,
        next_sibling,
        row_tokens,
        target,
        draft,
        row_tokens if full_argmax is None else full_argmax,
        uniforms,
        row_start,
        temperature,
        weights,
        path,
        num_accepted,
        next_token,
        status,
        target.stride(0),
        draft.stride(0),
        width,
        draft_width,
        HAS_TARGET=has_target,
        HAS_ARGMAX=full_argmax is not None,
        PROPOSAL=PROPOSALS.index(proposal) if has_draft else PROPOSALS.index("deterministic"),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK=min(config["BLOCK"], max(16, triton.next_power_of_2(width))),
        num_warps=config["num_warps"],
    )
    return path, num_accepted, next_token, status
