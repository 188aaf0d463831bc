"""What a request asks of sampling, and the masks that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from viasd.errors import InvalidInput


@dataclass(frozen=True)
class Sampling:
    """One request's settings.

    Args:
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens (ties with the last kept stay); 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; in (0, 1].
        min_p: drop tokens less likely than this times the most likely one; in [0, 1].
        seed: of the request's own coins; None draws one from torch's global generator.
        eos_token_ids: tokens that end the output; None takes the model's own, () none.

    The masks apply in this order, each on what the one before left, to the draft, the slim and the full distribution
    alike; so the output's law is that of the full model under the same settings.

    Raises:
        InvalidInput: a value outside its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    eos_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, kind, expected, fits in (
            ("max_new_tokens", int, "an integer >= 1", lambda x: x >= 1),
            ("temperature", float, "a finite number >= 0", lambda x: 0.0 <= x < float("inf")),
            ("top_k", int, "an integer >= 0", lambda x: x >= 0),
            ("top_p", float, "a number in (0, 1]", lambda x: 0.0 < x <= 1.0),
            ("min_p", float, "a number in [0, 1]", lambda x: 0.0 <= x <= 1.0),
        ):
            value = getattr(self, name)
            right_kind = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
            if not right_kind or not fits(value):
                raise InvalidInput(f"{name} must be {expected}, got {value!r}")
            object.__setattr__(self, name, kind(value))
        eos = self.eos_token_ids
        if eos is not None and not (isinstance(eos, tuple) and all(type(token) is int for token in eos)):
            raise InvalidInput(f"eos_token_ids must be None or a tuple of integers, got {eos!r}")
        if self.seed is not None and not (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63):
            raise InvalidInput(f"seed must be None or a 64-bit integer, got {self.seed!r}")

    @property
    def masks(self) -> tuple[float, int, float, float] | None:
        """What ``mask_logits`` depends on; None when nothing is masked."""
        if self.temperature == 0 or (self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0):
            return None
        return self.temperature, self.top_k, self.top_p, self.min_p


def mask_logits(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """[n, V] logits before temperature, with what the settings exclude at -inf; the most likely token always stays."""
    # The maximum goes first: a tiny temperature would otherwise overflow.
    scaled = logits.float()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature
    if 0 < top_k < logits.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1.0:
        ascending, order = scaled.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        drop[..., -1] = False
        scaled = scaled.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    if min_p > 0.0:
        probs = scaled.softmax(-1)
        scaled = scaled.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits.masked_fill(scaled == -torch.inf, -torch.inf)


def mask_rows(logits: torch.Tensor, settings: Sequence[Sampling], row_start: Sequence[int]) -> torch.Tensor:
    """Each sequence's rows of ``logits [R, V]`` masked by its settings; rows without masks come back as they are."""
    rows_of: dict[tuple[float, int, float, float], list[int]] = {}
    for b, sampling in enumerate(settings):
        if sampling.masks:
            rows_of.setdefault(sampling.masks, []).extend(range(row_start[b], row_start[b + 1]))
    if not rows_of:
        return logits
    logits = logits.clone()
    for masks, rows in rows_of.items():
        index = torch.tensor(rows, device=logits.device)
        logits[index] = mask_logits(logits[index], *masks)
    return logits
