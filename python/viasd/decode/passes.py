"""One pass: a draft's rows through a model tier, and each request's settings on their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from viasd.decode.sequence import SequenceState
from viasd.drafters import Draft
from viasd.errors import InvalidInput
from viasd.models.base import KVCache, Model, Rows, row_starts
from viasd.routing import Route
from viasd.sampling import edit_row, mask_rows

Coins = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Pass:
    """The rows of B sequences after a pass.

    Args:
        draft: the rows' tokens, their parents and proposals.
        row_start: [B+1] first row of each sequence.
        slots: [R] where the rows' keys are.
        raw: [R, V] logits as the model gave them.
        logits: [R, V] with the requests' settings applied, before temperature.
        captured: layer -> [R, D], the hidden states that entered it.
    """

    draft: Draft
    row_start: list[int]
    slots: list[int]
    raw: torch.Tensor
    logits: torch.Tensor
    captured: dict[int, torch.Tensor]

    def select(self, indices: Sequence[int]) -> Pass:
        """The rows of these sequences alone."""
        if len(indices) == len(self.row_start) - 1:
            return self
        rows = [row for b in indices for row in range(self.row_start[b], self.row_start[b + 1])]
        index = torch.tensor(rows, device=self.logits.device)
        draft = self.draft
        part = Draft(
            [draft.row_tokens[b] for b in indices],
            None if draft.logits is None else draft.logits[index],
            draft.parents and [draft.parents[b] for b in indices],
            draft.proposal,
        )
        return Pass(
            part,
            row_starts(map(len, part.row_tokens)),
            [self.slots[row] for row in rows],
            self.raw[index],
            self.logits[index],
            {layer: hidden[index] for layer, hidden in self.captured.items()},
        )

    def settle(self, sequences: Sequence[SequenceState], cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        """Keep the slots and states of each sequence's root and of the rows on its path; the other slots go back."""
        for b, sequence in enumerate(sequences):
            kept = [0, *paths[b]]
            own = self.slots[self.row_start[b] : self.row_start[b + 1]]
            sequence.slots.extend(own[row] for row in kept)
            cache.pool.give([slot for row, slot in enumerate(own) if row not in kept])
            rows = [self.row_start[b] + row for row in kept]
            sequence.captured = {layer: hidden[rows] for layer, hidden in self.captured.items()}


def run_pass(
    model: Model,
    cache: KVCache,
    sequences: Sequence[SequenceState],
    draft: Draft,
    *,
    route: Route | None = None,
    capture_layers: Sequence[int] = (),
) -> Pass:
    """Run the draft's rows through one tier."""
    row_start = row_starts(map(len, draft.row_tokens))
    slots = cache.pool.take(row_start[-1])
    rows = Rows(
        tokens=[token for own in draft.row_tokens for token in own],
        positions=[len(s.tokens) - 1 + depth for b, s in enumerate(sequences) for depth in draft.depths(b)],
        row_start=row_start,
        slots=slots,
        context=[sequence.slots for sequence in sequences],
        parents=[parent for own in draft.parents for parent in own] if draft.parents else None,
    )
    output = model.forward(rows, cache, route=route, capture_layers=capture_layers)
    prefixes = [(sequence, sequence.tokens[:-1]) for sequence in sequences]
    logits = apply_settings(output.logits, prefixes, draft.row_tokens, draft.parents, row_start)
    return Pass(draft, row_start, slots, output.logits, logits, output.captured)


def apply_settings(
    logits: torch.Tensor,
    prefixes: Sequence[tuple[SequenceState, list[int]]],
    row_tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]] | None,
    row_start: Sequence[int],
) -> torch.Tensor:
    """[R, V] logits after each request's settings; the input stays as it is.

    Args:
        logits: [R, V].
        prefixes: B pairs of a sequence and the tokens that precede its first row.
        row_tokens, parents, row_start: as in ``Draft`` and ``Pass``.
    """
    edited = logits
    for b, (sequence, prefix) in enumerate(prefixes):
        process = sequence.request.logits_processor
        if not sequence.sampling.edits and not process:
            continue
        if edited is logits:
            edited = logits.clone()
        before: list[list[int] | None] = []  # what precedes and ends with each row; None where no output can
        for row, token in enumerate(row_tokens[b]):
            parent = row - 1 if parents is None else parents[b][row]
            path = prefix if row == 0 else before[parent]
            own = edited[row_start[b] + parent] if row else None
            if path is None or (own is not None and (token in sequence.eos or own[token] == -torch.inf)):
                before.append(None)
                continue
            path = [*path, token]
            before.append(path)
            values = edit_row(edited[row_start[b] + row], sequence.sampling, path, sequence.num_prompt)
            if process:
                values = _checked(process(path, values), values)
            edited[row_start[b] + row] = values
    return mask_rows(edited, [sequence.sampling for sequence, _ in prefixes], row_start)


def _checked(processed: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    if getattr(processed, "shape", None) != given.shape:
        got = getattr(processed, "shape", None)
        got = type(processed).__name__ if got is None else list(got)
        raise InvalidInput(f"logits_processor must return logits of shape {list(given.shape)}, got {got}")
    return processed


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
) -> torch.Tensor:
    """[n] probability of each token under its row of masked logits at its temperature; 0 for ids beyond the row.

    They stay on the device: nothing that is decided waits for them.
    """
    if not rows:
        return torch.ones(0, device=logits.device)
    chosen = logits[torch.tensor(rows, device=logits.device)].float()
    # The maximum goes first: a tiny temperature would otherwise overflow.
    chosen = (chosen - chosen.amax(-1, keepdim=True)) / torch.tensor(temperature, device=logits.device).unsqueeze(1)
    ids = torch.tensor(tokens, device=logits.device)
    inside = ids < logits.shape[-1]
    probs = chosen.log_softmax(-1).gather(1, ids.where(inside, 0).unsqueeze(1)).squeeze(1).exp()
    return probs.where(inside, 0.0)
