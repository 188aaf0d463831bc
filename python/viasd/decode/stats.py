"""What a request's decoding did, counted."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from viasd.decode.gate import REGIONS


@dataclass
class Stats:
    """Counts and times of one request. A pass that served several requests counts, whole, for each of them.

    ``num_checked`` counts drafted tokens that a verifier looked at, ``num_changed`` those it changed (at either tier),
    ``num_discarded`` those that stood after a change and were never judged or no longer mattered. ``num_paused`` counts
    cycles in which the adaptive length was 0 although there was something to draft. ``num_pending_*``
    count tokens that passed the slim tier and then met the full one. ``overshoot`` holds, per accepted token that the
    full model judged, proposal probability minus full probability (a deterministic proposal counts as 1).
    """

    num_tokens: int = 0
    num_draft_passes: int = 0
    num_slim_passes: int = 0
    num_full_passes: int = 0
    num_checked: int = 0
    num_changed: int = 0
    num_discarded: int = 0
    num_paused: int = 0
    num_pending_checked: int = 0
    num_pending_accepted: int = 0
    regions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REGIONS.values(), 0))
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    slim_ms: float = 0.0
    full_ms: float = 0.0
    decode_ms: float = 0.0
    _overshoot: list[torch.Tensor] = field(default_factory=list, repr=False)

    def add_overshoot(self, overshoot: torch.Tensor) -> None:
        """Record accepted tokens' overshoot, [n]; it is read from its device when somebody asks for it."""
        self._overshoot.append(overshoot)

    @property
    def overshoot(self) -> list[float]:
        return torch.cat(self._overshoot).tolist() if self._overshoot else []

    def count_chain(self, num_drafted: int, num_accepted: int) -> None:
        """One verdict over a chain of drafted tokens."""
        judged = min(num_drafted, num_accepted + 1)
        self.num_checked += judged
        self.num_changed += judged - num_accepted
        self.num_discarded += num_drafted - judged
        self.drafted_at.extend([0] * (num_drafted - len(self.drafted_at)))
        self.accepted_at.extend([0] * (num_drafted - len(self.accepted_at)))
        for position in range(num_drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < num_accepted

    @property
    def tokens_per_full_pass(self) -> float:
        return _ratio(self.num_tokens, self.num_full_passes)

    @property
    def tokens_per_slim_pass(self) -> float:
        return _ratio(self.num_tokens, self.num_slim_passes)

    @property
    def full_passes_per_token(self) -> float:
        return _ratio(self.num_full_passes, self.num_tokens)

    @property
    def rejection_rate(self) -> float:
        return _ratio(self.num_changed, self.num_checked)

    @property
    def pending_acceptance(self) -> float:
        return _ratio(self.num_pending_accepted, self.num_pending_checked)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts with a token at position 1, 2, ... in which it was accepted by its first verifier."""
        return [_ratio(accepted, drafted) for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def mean_draft_length(self) -> float:
        """Tokens per draft; cycles in which nothing was drafted are left out."""
        return _ratio(sum(self.drafted_at), max(self.drafted_at, default=0))

    @property
    def overshoot_quantiles(self) -> dict[str, float]:
        overshoot = self.overshoot
        if len(overshoot) < 2:
            return dict.fromkeys(("p50", "p99", "max"), overshoot[0] if overshoot else 0.0)
        percentiles = statistics.quantiles(overshoot, n=100, method="inclusive")
        return {"p50": percentiles[49], "p99": percentiles[98], "max": max(overshoot)}

    @property
    def tokens_per_second(self) -> float:
        """Decoding alone, without prefill."""
        return _ratio(1e3 * self.num_tokens, self.decode_ms)

    def to_dict(self) -> dict[str, Any]:
        """Counts, times and rates as plain JSON values."""
        counts = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "_overshoot"}
        properties = (name for name, kind in vars(type(self)).items() if isinstance(kind, property))
        rates = {name: getattr(self, name) for name in properties if name != "overshoot"}
        return counts | rates


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
