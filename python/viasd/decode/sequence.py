"""The state of one request while it is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from viasd.decode.draft_length import DraftLength
from viasd.decode.request import Finish, Request, Result, Speculation, Tier, TokenLogprobs
from viasd.models.base import SlotPool

if TYPE_CHECKING:
    from viasd.decode.passes import Pass


@dataclass(frozen=True)
class Proposed:
    """A token that waits for the full model.

    ``tier`` proposed it; ``prob``, a scalar on the model's device, is its probability there. ``row`` [V] is the
    distribution it is a draw from, as it was at that time (None where the request is greedy or the proposal
    deterministic).
    """

    token: int
    tier: Tier
    prob: torch.Tensor
    row: torch.Tensor | None = None


class SequenceState:
    """Tokens, slots and pending tokens of one request.

    ``tokens`` holds the prompt, the verified output, then what is pending. ``slots[i]`` holds the keys of
    ``tokens[i]``: the newest token's are never in the cache, since it is the first row of the next pass. Keys of the
    first ``num_verified - 1`` tokens are the full model's; the rest were written by a slim pass and are never trusted
    by a full one. In tiered mode pending tokens are emitted already and wait only for their keys. ``end`` says why the
    newest token ends the output, if it stands.
    """

    def __init__(self, request: Request, request_id: int, max_positions: int, speculation: Speculation) -> None:
        sampling = request.sampling
        assert sampling.seed is not None
        assert sampling.eos_token_ids is not None
        self.id = request_id
        self.request = request
        self.sampling = sampling
        self.speculation = request.speculation or speculation
        self.seed: int = sampling.seed
        self.eos = frozenset(sampling.eos_token_ids)
        self.tokens = list(request.prompt_tokens)
        self.num_prompt = self.num_verified = len(self.tokens)
        self.limit = min(len(self.tokens) + sampling.max_new_tokens, max_positions)
        self.slots: list[int] = []
        self.pending: list[Proposed] = []
        self.end: Finish | None = None
        self.captured: dict[int, torch.Tensor] = {}
        self.num_draws = 0
        self.draft_length: DraftLength | None = None
        self.result = Result(prompt_tokens=list(request.prompt_tokens))

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def tiered(self) -> bool:
        return self.speculation.mode == "tiered"

    @property
    def finished(self) -> bool:
        return self.result.finish_reason is not None

    @property
    def stats_temperature(self) -> float:
        """Probabilities that are only reported take 1 where the request is greedy."""
        return self.sampling.temperature or 1.0

    @property
    def max_slots(self) -> int:
        """Slots that it may hold at once: its tokens', and those of a pass's drafted rows."""
        return self.limit + self.speculation.gamma

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.tokens)

    def next_draw(self) -> int:
        """A number for the coins of one pass, never used again."""
        self.num_draws += 1
        return self.num_draws - 1

    def keep(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, emitted in this order, exist: what follows the end of the output does not."""
        self.end = None
        for count in range(1, len(tokens) + 1):
            self.end = self._end_at(tokens[:count])
            if self.end:
                return count
        return len(tokens)

    def _end_at(self, new: Sequence[int]) -> Finish | None:
        if new[-1] in self.eos:
            return "eos"
        if self.request.stopping and self.request.stopping([*self.tokens, *new]):
            return "stop"
        return "length" if len(new) >= self.room else None

    def recall_pending(self, pool: SlotPool) -> list[Proposed]:
        """Take the pending tokens back, with every slot that a slim pass may have written."""
        pending, self.pending = self.pending, []
        self.end = None
        del self.tokens[self.num_verified :]
        self.trim(pool)
        return pending

    def trim(self, pool: SlotPool) -> None:
        """Give back the slots of the newest token and of what is no longer there."""
        pool.give(self.slots[len(self.tokens) - 1 :])
        del self.slots[len(self.tokens) - 1 :]

    def emit(self, tokens: Sequence[int], tiers: Sequence[Tier], rows: Pass, judges: Sequence[int]) -> None:
        """Append tokens for good; ``judges`` are the rows of the pass that each was decided by."""
        self.tokens.extend(tokens)
        result = self.result
        result.tokens.extend(tokens)
        result.tiers.extend(tiers)
        result.stats.num_tokens += len(tokens)
        result.finish_reason = self.end
        if self.request.keep_logits:
            result.logits.extend(rows.raw[judges])
            result.scores.extend(rows.logits[judges])
        if self.sampling.logprobs is not None:
            result.logprobs.extend(_logprobs(rows.raw[judges], tokens, self.sampling.logprobs))

    def count_chain(self, num_drafted: int, num_accepted: int, kept: int) -> None:
        """Count a verdict on the draft; where the output ended inside it, the rest of the draft does not exist."""
        if self.end or self.finished:
            num_drafted = min(num_drafted, kept)
        self.result.stats.count_chain(num_drafted, min(num_accepted, num_drafted))

    def count_pending(self, pending: Sequence[Proposed], num_accepted: int) -> None:
        """Count the full model's verdict on tokens that had passed the slim tier."""
        stats = self.result.stats
        stats.num_pending_checked += min(len(pending), num_accepted + 1)
        stats.num_pending_accepted += num_accepted
        rejected = pending[num_accepted:]
        stats.num_changed += bool(rejected) and rejected[0].tier == "draft"
        stats.num_discarded += sum(proposed.tier == "draft" for proposed in rejected[1:])


def _logprobs(raw: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    logprobs = raw.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=raw.device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = logprobs.topk(min(num_top, raw.shape[-1]))
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprobs(*pair) for pair in zip(own, tops, strict=True)]
