"""Schemas, bodies and fakes of the three ops. Imports neither Triton nor the native module.

Statistics travel packed: one float tensor [9, R], whose rows are ``STATS_ROWS`` in order, and ``target_argmax``.
"""

from typing import Optional, Tuple

import torch

from ..library import register_op
from . import reference
from .structs import Stats

STATS_ROWS = tuple(name for name in Stats._fields if name != "target_argmax")


def pack_stats(stats: Stats) -> Tuple[torch.Tensor, torch.Tensor]:
    """([9, R] floats, [R] target_argmax)."""
    return torch.stack([getattr(stats, name) for name in STATS_ROWS]), stats.target_argmax


def unpack_stats(packed: torch.Tensor, target_argmax: torch.Tensor) -> Stats:
    """The inverse of ``pack_stats``; the fields are views."""
    return Stats(target_argmax=target_argmax, **{name: packed[i] for i, name in enumerate(STATS_ROWS)})


def _acceptance_stats(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: torch.Tensor,
    alpha: float,
    beta: float,
    undershoot: bool,
    impl: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    if impl == "reference":
        return pack_stats(
            reference.acceptance_stats(
                draft_logits,
                target_logits,
                tokens,
                temperature=temperature,
                alpha=alpha,
                beta=beta,
                undershoot=undershoot,
            )
        )
    if impl == "native":
        from . import native

        return native.acceptance_stats(draft_logits, target_logits, tokens, temperature, alpha, beta, undershoot)
    if impl == "triton":
        from . import triton

        return triton.acceptance_stats(draft_logits, target_logits, tokens, temperature, alpha, beta, undershoot)
    raise NotImplementedError(f"acceptance_stats: no {impl!r} implementation")


def _acceptance_stats_fake(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: torch.Tensor,
    alpha: float,
    beta: float,
    undershoot: bool,
    impl: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return empty_stats(target_logits, draft_logits)


def _accept_chain(
    row_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    impl: str,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if impl == "reference":
        num_accepted, next_token, status = reference.accept_chain(
            row_tokens, target_logits, uniforms, row_start, temperature=temperature, draft_logits=draft_logits
        )
        return num_accepted, next_token, status
    if impl == "native":
        from . import native

        return native.accept_chain(row_tokens, target_logits, uniforms, row_start, temperature, draft_logits)
    if impl == "triton":
        from . import triton

        return triton.accept_chain(row_tokens, target_logits, uniforms, row_start, temperature, draft_logits)
    raise NotImplementedError(f"accept_chain: no {impl!r} implementation")


def _accept_chain_fake(
    row_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    impl: str,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_accepted, next_token, status = (_per_sequence(row_start, torch.int32) for _ in range(3))
    return num_accepted, next_token, status


def _gate_tiers(
    row_tokens: torch.Tensor,
    slim_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    criterion: str,
    accept: torch.Tensor,
    escalate: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    impl: str,
) -> Tuple[torch.Tensor, ...]:
    if impl == "reference":
        *verdict, stats = reference.gate_tiers(
            row_tokens,
            slim_logits,
            uniforms,
            row_start,
            criterion=criterion,
            accept=accept,
            escalate=escalate,
            temperature=temperature,
            draft_logits=draft_logits,
        )
        return (*verdict, *pack_stats(stats))
    if impl == "native":
        from . import native

        return native.gate_tiers(
            row_tokens, slim_logits, uniforms, row_start, criterion, accept, escalate, temperature, draft_logits
        )
    if impl == "triton":
        from . import triton

        return triton.gate_tiers(
            row_tokens, slim_logits, uniforms, row_start, criterion, accept, escalate, temperature, draft_logits
        )
    raise NotImplementedError(f"gate_tiers: no {impl!r} implementation")


def _gate_tiers_fake(
    row_tokens: torch.Tensor,
    slim_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    criterion: str,
    accept: torch.Tensor,
    escalate: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    impl: str,
) -> Tuple[torch.Tensor, ...]:
    return (
        torch.empty_like(row_tokens, dtype=torch.int32),
        torch.empty_like(row_tokens, dtype=torch.int8),
        _per_sequence(row_start, torch.int32),
        _per_sequence(row_start, torch.bool),
        _per_sequence(row_start, torch.int32),
        *empty_stats(slim_logits, draft_logits),
    )


def _per_sequence(row_start: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return row_start.new_empty(row_start.shape[0] - 1, dtype=dtype)


def empty_stats(target_logits: torch.Tensor, draft_logits: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Packed statistics of target_logits' rows, not filled in."""
    num_rows, dtype = target_logits.shape[0], reference.accumulation_dtype(draft_logits, target_logits)
    packed = target_logits.new_empty((len(STATS_ROWS), num_rows), dtype=dtype)
    return packed, target_logits.new_empty(num_rows, dtype=torch.int32)


acceptance_stats = register_op(
    "acceptance_stats(Tensor draft_logits, Tensor target_logits, Tensor tokens, Tensor temperature, float alpha, "
    "float beta, bool undershoot, str impl) -> (Tensor stats, Tensor target_argmax)",
    _acceptance_stats,
    _acceptance_stats_fake,
)

accept_chain = register_op(
    "accept_chain(Tensor row_tokens, Tensor target_logits, Tensor uniforms, Tensor row_start, Tensor temperature, "
    "Tensor? draft_logits, str impl) -> (Tensor num_accepted, Tensor next_token, Tensor status)",
    _accept_chain,
    _accept_chain_fake,
)

gate_tiers = register_op(
    "gate_tiers(Tensor row_tokens, Tensor slim_logits, Tensor uniforms, Tensor row_start, str criterion, "
    "Tensor accept, Tensor escalate, Tensor temperature, Tensor? draft_logits, str impl) -> (Tensor tokens, "
    "Tensor regions, Tensor num_emitted, Tensor escalate_flags, Tensor status, Tensor stats, Tensor target_argmax)",
    _gate_tiers,
    _gate_tiers_fake,
)
