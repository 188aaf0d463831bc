"""Calls into ``csrc/acceptance``: addresses and sizes of contiguous, rightly typed tensors."""

from typing import Optional, Tuple

import torch

from ..native import address, launch_place, load_cuda, load_native, matrix, ready, team_logits
from .op import empty_stats
from .structs import CRITERIA


def acceptance_stats(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: torch.Tensor,
    alpha: float,
    beta: float,
    undershoot: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The packed statistics and the target's argmax."""
    tokens, temperature = ready(tokens, torch.int64), ready(temperature, torch.float64)
    stats, target_argmax = empty_stats(target_logits, draft_logits)
    load_native().acceptance_stats(
        draft_logits=matrix(draft_logits),
        target_logits=matrix(target_logits),
        tokens=tokens.data_ptr(),
        temperature=temperature.data_ptr(),
        num_rows=tokens.shape[0],
        alpha=alpha,
        beta=beta,
        undershoot=undershoot,
        stats=stats.data_ptr(),
        target_argmax=target_argmax.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    return stats, target_argmax


def accept_chain(
    row_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row_tokens, row_start = ready(row_tokens, torch.int64), ready(row_start, torch.int64)
    uniforms, temperature = ready(uniforms, torch.float64), ready(temperature, torch.float64)
    num_sequences = row_start.shape[0] - 1
    num_accepted, next_token, status = (row_start.new_empty(num_sequences, dtype=torch.int32) for _ in range(3))
    arguments = {
        "row_tokens": row_tokens.data_ptr(),
        "uniforms": uniforms.data_ptr(),
        "row_start": row_start.data_ptr(),
        "temperature": temperature.data_ptr(),
        "num_sequences": num_sequences,
        "num_accepted": num_accepted.data_ptr(),
        "next_token": next_token.data_ptr(),
        "status": status.data_ptr(),
    }
    place = launch_place(row_start.device)
    if place is None:
        load_native().accept_chain(
            **arguments,
            num_rows=row_tokens.shape[0],
            target_logits=matrix(target_logits),
            draft_logits=matrix(draft_logits),
            num_threads=torch.get_num_threads(),
        )
    else:
        target, draft, weights = team_logits(num_sequences, target_logits, draft_logits)
        load_cuda().accept_chain(
            **arguments,
            target_logits=matrix(target),
            draft_logits=matrix(draft),
            weights=address(weights),
            place=place,
        )
    return num_accepted, next_token, status


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
    """tokens, regions, num_emitted, escalate, status, the packed statistics and the slim rows' argmax."""
    row_tokens, row_start = ready(row_tokens, torch.int64), ready(row_start, torch.int64)
    uniforms, temperature = ready(uniforms, torch.float64), ready(temperature, torch.float64)
    accept, escalate = ready(accept, torch.float64), ready(escalate, torch.float64)
    num_rows, num_sequences = row_tokens.shape[0], row_start.shape[0] - 1
    tokens, regions = torch.empty(num_rows, dtype=torch.int32), torch.empty(num_rows, dtype=torch.int8)
    num_emitted, status = (torch.empty(num_sequences, dtype=torch.int32) for _ in range(2))
    escalate_flags = torch.empty(num_sequences, dtype=torch.bool)
    stats, target_argmax = empty_stats(slim_logits, draft_logits)
    load_native().gate_tiers(
        row_tokens=row_tokens.data_ptr(),
        uniforms=uniforms.data_ptr(),
        row_start=row_start.data_ptr(),
        accept=accept.data_ptr(),
        escalate=escalate.data_ptr(),
        temperature=temperature.data_ptr(),
        num_sequences=num_sequences,
        num_rows=num_rows,
        criterion=CRITERIA.index(criterion),
        slim_logits=matrix(slim_logits),
        draft_logits=matrix(draft_logits),
        tokens=tokens.data_ptr(),
        regions=regions.data_ptr(),
        num_emitted=num_emitted.data_ptr(),
        escalate_flags=escalate_flags.data_ptr(),
        status=status.data_ptr(),
        stats=stats.data_ptr(),
        target_argmax=target_argmax.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    return tokens, regions, num_emitted, escalate_flags, status, stats, target_argmax
