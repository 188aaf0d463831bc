"""The drafter protocol: propose tokens, with the distribution they were drawn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from viasd.errors import InvalidInput
from viasd.sampling import Sampling


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may look at, for B sequences.

    Args:
        request_ids: [B] identify the requests across calls.
        tokens: B lists: prompt and output so far, pending tokens included; the last one is the root of the draft.
        max_tokens: [B] how many tokens may be drafted; may be 0.
        sampling: [B] each request's settings.
        cache: the target's cache, for drafters that share it.
        slots: B lists: each sequence's slots in that cache (all its tokens but the last).
        captured: [B] the hidden states that entered ``capture_layers`` in each sequence's last pass, layer -> [n, D],
            for the root and the accepted rows; empty before the first pass.
        draw: ``draw(indices, logits [n, V], drafted)`` samples one token for each of these sequences, with its
            settings and its own coins; ``drafted[i]`` are the tokens of this draft that precede it. Returns the ids and
            the masked logits they were drawn from, which is what the draft must report. It counts as one draft pass.
    """

    request_ids: Sequence[int]
    tokens: Sequence[list[int]]
    max_tokens: Sequence[int]
    sampling: Sequence[Sampling]
    cache: Any
    slots: Sequence[Sequence[int]]
    captured: Sequence[dict[int, torch.Tensor]]
    draw: Callable[[Sequence[int], torch.Tensor, Sequence[Sequence[int]]], tuple[list[int], torch.Tensor]]

    @property
    def all_greedy(self) -> bool:
        return all(sampling.temperature == 0 for sampling in self.sampling)


@dataclass(frozen=True)
class Draft:
    """A proposal for B sequences.

    Args:
        row_tokens: B lists: the root, then the drafted tokens.
        logits: [R, Vd]; row r is the distribution from which row r's successor (chain) or children (tree) were drawn.
            None: the proposal is deterministic, or the requests are greedy.
        parents: B lists: each row's parent within its sequence, -1 for the root. None: chains.
        proposal: how a tree's siblings were drawn: "deterministic", "without_replacement" or "with_replacement".
    """

    row_tokens: list[list[int]]
    logits: torch.Tensor | None = None
    parents: list[list[int]] | None = None
    proposal: str = "deterministic"

    def depths(self, b: int) -> list[int]:
        """How far each row of sequence b is from its root; a row whose parent does not precede it ends the list."""
        if self.parents is None:
            return list(range(len(self.row_tokens[b])))
        depths: list[int] = []
        for row, parent in enumerate(self.parents[b]):
            if (row == 0) != (parent == -1) or not -1 <= parent < max(row, 1):
                break
            depths.append(0 if row == 0 else depths[parent] + 1)
        return depths


@dataclass(frozen=True)
class Verdict:
    """What became of a draft: per sequence, the accepted drafted tokens and the token that followed (-1: none)."""

    request_ids: Sequence[int]
    accepted: list[list[int]]
    next_token: list[int]


class Drafter(ABC):
    """Proposes tokens. Anything may propose; what it reports must be what it drew from."""

    name: str = "drafter"
    capture_layers: tuple[int, ...] = ()
    expected_acceptance: tuple[float, ...] = (0.8,)  # of a token of level 0, 1, ..., before any verdict

    def start(self) -> Drafter:
        """The drafter of one decode run; what keeps state per request returns a fresh one that shares its weights."""
        return self

    @abstractmethod
    def propose(self, context: DraftContext) -> Draft:
        """At most ``context.max_tokens[b]`` tokens for sequence b."""

    def levels(self, tokens: Sequence[int], limit: int) -> list[int]:
        """What to expect of the next ``limit`` tokens drafted after ``tokens``, or of fewer that could be.

        Levels index ``expected_acceptance``. They may depend on ``tokens`` alone, never on what will be drawn.
        """
        return [0] * limit

    def observe(self, verdict: Verdict) -> None:  # noqa: B027 - most drafters have nothing to learn
        """Told what the first verifier, slim or full, made of the last draft."""

    def close(self, request_ids: Sequence[int]) -> None:  # noqa: B027 - nor anything to give back
        """These requests are finished."""


def draft_logits(num_rows: int, rows: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor | None:
    """[R, Vd] from the rows that were drawn from; the others stay 0 and are never read. None without any."""
    if not rows:
        return None
    logits = rows[0][1].new_zeros(num_rows, rows[0][1].shape[-1])
    logits[torch.tensor([row for row, _ in rows], device=logits.device)] = torch.stack([values for _, values in rows])
    return logits


def check_draft(name: str, draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise ``InvalidInput`` for a draft that would silently change what is decoded."""
    if len(draft.row_tokens) != len(context.tokens) or (draft.parents and len(draft.parents) != len(context.tokens)):
        raise InvalidInput(f"drafter {name}: expected {len(context.tokens)} drafts, got {len(draft.row_tokens)}")
    for b, tokens in enumerate(draft.row_tokens):
        if not tokens or tokens[0] != context.tokens[b][-1]:
            raise InvalidInput(f"drafter {name}: a draft starts with the newest token, got {tokens[:1]}")
        if not all(0 <= token < vocab_size for token in tokens):
            raise InvalidInput(f"drafter {name}: ids must lie in [0, {vocab_size}), got {tokens}")
        depths = draft.depths(b)
        if len(depths) != len(tokens) or max(depths) > max(context.max_tokens[b], 0):
            raise InvalidInput(
                f"drafter {name}: at most {context.max_tokens[b]} tokens in a row may be drafted, parents before "
                f"children, one parent per row; got {len(tokens) - 1} drafted tokens of depths {depths}"
            )
