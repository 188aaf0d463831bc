"""One request's state in the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from viasd.decode.draft_length import DraftLength
from viasd.decode.request import Request, Result, Tier
from viasd.models.base import SlotPool


@dataclass(frozen=True)
class Proposed:
    """A token that waits for the full model.

    ``tier`` proposed it; ``prob`` is its probability there. ``row`` [V] is the distribution it is a draw from, as it
    was at that time (None where the request is greedy or the draft's own logits serve).
    """

    token: int
    tier: Tier
    prob: float
    row: torch.Tensor | None = None


class SequenceState:
    """Tokens, slots and pending tokens of one request.

    ``tokens`` holds the prompt, the verified output, then what is pending. ``slots[i]`` holds the keys of
    ``tokens[i]``: the newest token's are never in the cache, since it is the first row of the next pass. Keys of the
    first ``num_verified - 1`` tokens are the full model's; the rest were written by a slim pass and are never trusted
    by a full one.
    """

    def __init__(self, request: Request, request_id: int, max_positions: int) -> None:
        sampling = request.sampling
        assert sampling.seed is not None
        assert sampling.eos_token_ids is not None
        self.id = request_id
        self.sampling = sampling
        self.seed: int = sampling.seed
        self.eos = frozenset(sampling.eos_token_ids)
        self.tokens = list(request.prompt_tokens)
        self.num_verified = len(self.tokens)
        self.limit = min(len(self.tokens) + sampling.max_new_tokens, max_positions)
        self.slots: list[int] = []
        self.pending: list[Proposed] = []
        self.captured: dict[int, torch.Tensor] = {}
        self.num_draws = 0
        self.draft_length: DraftLength | None = None
        self.result = Result(prompt_tokens=list(request.prompt_tokens))

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def stats_temperature(self) -> float:
        """Probabilities that are only reported take 1 where the request is greedy."""
        return self.sampling.temperature or 1.0

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.tokens)

    @property
    def ended(self) -> bool:
        """The newest token ends the output, if it stands."""
        at_eos = self.tokens[-1] in self.eos and len(self.tokens) > len(self.result.prompt_tokens)
        return at_eos or self.room <= 0

    def next_draw(self) -> int:
        """A number for the coins of one pass, never used again."""
        self.num_draws += 1
        return self.num_draws - 1

    def keep(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, emitted in this order, exist: none after an end of sequence or past the limit."""
        for count, token in enumerate(tokens[: self.room]):
            if token in self.eos:
                return count + 1
        return min(len(tokens), self.room)

    def recall_pending(self, pool: SlotPool) -> list[Proposed]:
        """Take the pending tokens back, with every slot that a slim pass may have written."""
        pending, self.pending = self.pending, []
        del self.tokens[self.num_verified :]
        self.trim(pool)
        return pending

    def trim(self, pool: SlotPool) -> None:
        """Give back the slots of the newest token and of what is no longer there."""
        pool.give(self.slots[len(self.tokens) - 1 :])
        del self.slots[len(self.tokens) - 1 :]

    def commit(self, tokens: Sequence[int], tiers: Sequence[Tier]) -> None:
        """Append verified tokens."""
        self.tokens.extend(tokens)
        self.num_verified = len(self.tokens)
        self.result.tokens.extend(tokens)
        self.result.tiers.extend(tiers)
        self.result.stats.num_tokens += len(tokens)
        if self.ended:
            self.result.finish_reason = "eos" if self.tokens[-1] in self.eos else "length"
