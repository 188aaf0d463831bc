"""What waits for the full model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from viasd.decode.passes import Pass, token_probs
from viasd.decode.sequence import Proposed, SequenceState
from viasd.drafters import Draft
from viasd.drafters.base import draft_logits
from viasd.models.base import SlotPool, row_starts


@dataclass(frozen=True)
class Escalation:
    """One sequence's part of a full pass.

    Args:
        sequence: its newest verified token is the root.
        proposals: what follows the root.
        num_trusted: how many of them are emitted already and stand, whatever the full model thinks (tiered mode).
        block: tokens in the draft and how many of them have passed an earlier tier, where this pass completes the
            verdict on a draft; None where the draft was counted before.
    """

    sequence: SequenceState
    proposals: list[Proposed]
    num_trusted: int = 0
    block: tuple[int, int] | None = None


def recalled(sequence: SequenceState, pool: SlotPool) -> Escalation:
    """All that is pending: to be verified in exact mode, to get the full model's keys in tiered mode."""
    pending = sequence.recall_pending(pool)
    return Escalation(sequence, pending, len(pending) if sequence.tiered else 0)


def rest_of_draft(sequence: SequenceState, rows: Pass, b: int, num_kept: int) -> list[Proposed]:
    """The drafted tokens of a pass's sequence b from where the gate stopped, with the proposals behind them."""
    draft, first = rows.draft, rows.row_start[b]
    proposals = None if draft.logits is None or sequence.greedy else draft.logits
    tokens = draft.row_tokens[b][num_kept + 1 :]
    if proposals is None:
        certain = torch.ones(len(tokens), device=rows.logits.device)
        return [Proposed(token, "draft", prob) for token, prob in zip(tokens, certain.unbind(), strict=True)]
    judges = range(first + num_kept, first + num_kept + len(tokens))
    probs = token_probs(proposals, judges, tokens, [sequence.sampling.temperature] * len(tokens)).unbind()
    return [
        Proposed(token, "draft", prob, proposals[row]) for token, prob, row in zip(tokens, probs, judges, strict=True)
    ]


def waiting_draft(escalations: Sequence[Escalation], vocab_size: int) -> Draft:
    """Everything that waits, as chains; where a proposal has no row while another one has, its row is one-hot."""
    row_tokens = [[e.sequence.tokens[-1], *(p.token for p in e.proposals)] for e in escalations]
    row_start = row_starts(map(len, row_tokens))
    where = [
        (row_start[b] + i, proposed)
        for b, escalation in enumerate(escalations)
        for i, proposed in enumerate(escalation.proposals)
        if not escalation.sequence.greedy and i >= escalation.num_trusted  # of the others none is read
    ]
    some = next((proposed.row for _, proposed in where if proposed.row is not None), None)
    if some is None:
        return Draft(row_tokens)
    rows = []
    for row, proposed in where:
        values = some.new_full((vocab_size,), -torch.inf)
        if proposed.row is None:
            values[proposed.token] = 0.0
        else:
            values[: len(proposed.row)] = proposed.row
        rows.append((row, values))
    return Draft(row_tokens, draft_logits(row_start[-1], rows))
