"""Calls into ``csrc/acceptance`` on the CPU: addresses and sizes of contiguous, rightly typed tensors."""

from typing import Optional, Tuple

import torch

from ..native import load_native, matrix, ready


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
    num_accepted, next_token, status = (torch.empty(num_sequences, dtype=torch.int32) for _ in range(3))
    load_native().accept_chain(
        row_tokens=row_tokens.data_ptr(),
        uniforms=uniforms.data_ptr(),
        row_start=row_start.data_ptr(),
        temperature=temperature.data_ptr(),
        num_sequences=num_sequences,
        num_rows=row_tokens.shape[0],
        target_logits=matrix(target_logits),
        draft_logits=matrix(draft_logits),
        num_accepted=num_accepted.data_ptr(),
        next_token=next_token.data_ptr(),
        status=status.data_ptr(),
    )
    return num_accepted, next_token, status
