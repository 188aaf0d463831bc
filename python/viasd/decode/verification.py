"""One verifying pass: a draft's rows through a model tier, and which of them are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from viasd.decode.sequence import SequenceState
from viasd.drafters import Draft
from viasd.models.base import KVCache, Model, Rows, row_starts
from viasd.routing import Route
from viasd.sampling import mask_rows
from viasd_kernels import Status, accept_chain, build_tree, verify_tree

Coins = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """What one pass decided, for B sequences.

    Args:
        row_start: [B+1] first row of each sequence.
        paths: B lists: the accepted drafted rows in order, as indices within the sequence.
        next_token: [B] the token drawn after the last accepted row; -1 where its distribution is broken.
        status: [B] what was found wrong.
        logits: [R, V] masked by the requests' settings, before temperature.
    """

    row_start: list[int]
    paths: list[list[int]]
    next_token: list[int]
    status: list[Status]
    logits: torch.Tensor

    def judges(self, b: int) -> list[int]:
        """Rows whose distributions judged sequence b's accepted tokens, then the one its next token was drawn from."""
        return [self.row_start[b] + row for row in (0, *self.paths[b])]


def verify(
    model: Model,
    cache: KVCache,
    sequences: Sequence[SequenceState],
    draft: Draft,
    coins: Coins,
    *,
    route: Route | None = None,
    capture_layers: Sequence[int] = (),
) -> Verification:
    """Run the draft's rows through one tier and verify them against it, exactly.

    Afterwards each sequence's slots hold the keys of its root and of the accepted rows.
    """
    row_start = row_starts(len(tokens) for tokens in draft.row_tokens)
    new_slots = cache.pool.take(row_start[-1])
    rows = Rows(
        tokens=[token for own in draft.row_tokens for token in own],
        positions=[len(s.tokens) - 1 + depth for b, s in enumerate(sequences) for depth in draft.depths(b)],
        row_start=row_start,
        slots=new_slots,
        context=[sequence.slots for sequence in sequences],
        parents=[parent for own in draft.parents for parent in own] if draft.parents else None,
    )
    output = model.forward(rows, cache, route=route, capture_layers=capture_layers)
    logits = mask_rows(output.logits, [sequence.sampling for sequence in sequences], row_start)
    verification = judge(sequences, draft, rows, logits, coins)
    for b, sequence in enumerate(sequences):
        kept = [0, *verification.paths[b]]
        own = new_slots[row_start[b] : row_start[b + 1]]
        sequence.slots.extend(own[row] for row in kept)
        cache.pool.give([slot for row, slot in enumerate(own) if row not in kept])
        judges = verification.judges(b)
        sequence.captured = {layer: hidden[judges] for layer, hidden in output.captured.items()}
    return verification


def judge(
    sequences: Sequence[SequenceState], draft: Draft, rows: Rows, logits: torch.Tensor, coins: Coins
) -> Verification:
    """The verdict on a draft from the masked logits [R, V] of its rows."""
    device, row_start = logits.device, list(rows.row_start)
    tokens = torch.tensor(rows.tokens, device=device)
    start = torch.tensor(row_start, device=device)
    temperature = torch.tensor([sequence.sampling.temperature for sequence in sequences], device=device)
    uniforms = coins_for(sequences, row_start, coins, device)
    if rows.parents is None:
        chain = accept_chain(
            tokens, logits, uniforms, start, temperature=temperature, draft_logits=draft.logits, check=False
        )
        num_accepted, next_token, status = torch.stack(list(chain)).tolist()
        paths = [list(range(1, count + 1)) for count in num_accepted]
    else:
        parents = torch.tensor(rows.parents, device=device, dtype=torch.int32)
        widest = max(len(own) for own in draft.row_tokens)
        verdict = verify_tree(
            build_tree(parents, start, max_rows=widest, check=False),
            tokens,
            logits,
            uniforms,
            start,
            temperature=temperature,
            draft_logits=draft.logits,
            # Greedy requests need no distribution, whatever the tree was drawn from.
            proposal=draft.proposal if draft.logits is not None else "deterministic",
            check=False,
        )
        num_accepted, next_token, status = torch.stack(list(verdict[1:])).tolist()
        path = verdict.path.tolist()
        paths = [path[first + 1 : first + 1 + count] for first, count in zip(row_start[:-1], num_accepted, strict=True)]
    return Verification(row_start, paths, next_token, [Status(bits) for bits in status], logits)


def coins_for(
    sequences: Sequence[SequenceState], row_start: Sequence[int], coins: Coins, device: torch.device
) -> torch.Tensor:
    """[R] float64: one coin per row, from each request's own seed and pass count."""
    draws = [sequence.next_draw() for sequence in sequences]
    if all(sequence.greedy for sequence in sequences):
        return torch.zeros(row_start[-1], dtype=torch.float64, device=device)  # never read
    seeds = torch.tensor([sequence.seed for sequence in sequences], device=device)
    widest = max(end - first for first, end in pairwise(row_start))
    grid = coins(seeds, torch.tensor(draws, device=device), widest)
    index = [b * widest + row for b, (first, end) in enumerate(pairwise(row_start)) for row in range(end - first)]
    return grid.flatten()[torch.tensor(index, device=device)]


def token_probs(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], temperature: list[float]
) -> list[float]:
    """Probability of each token under its row of masked logits at its temperature; 0 for ids beyond the row."""
    if not rows:
        return []
    chosen = logits[torch.tensor(rows, device=logits.device)].float()
    # The maximum goes first: a tiny temperature would otherwise overflow.
    chosen = (chosen - chosen.amax(-1, keepdim=True)) / torch.tensor(temperature, device=logits.device).unsqueeze(1)
    ids = torch.tensor(tokens, device=logits.device)
    inside = ids < logits.shape[-1]
    probs = chosen.log_softmax(-1).gather(1, ids.where(inside, 0).unsqueeze(1)).squeeze(1).exp()
    return probs.where(inside, 0.0).tolist()
