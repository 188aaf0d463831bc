"""The gate: which of three regions the slim distribution sends a drafted token to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from viasd.errors import InvalidInput
from viasd_kernels import Region, acceptance_stats

REGIONS = {Region.ACCEPT: "A", Region.REGENERATE: "B", Region.ESCALATE: "C"}

# Of a proposal without logits all three say the same where the slim tier's best token has nearly all the mass.
DEFAULTS = {"ratio": (0.60, 0.30), "tv": (0.40, 0.70), "kl": (0.51, 1.20)}


@dataclass(frozen=True)
class Gate:
    """A criterion and its two thresholds (VIA-SD, arXiv:2606.12243, as reported in public notes).

    "ratio": r = q'(v) / max q' of the drafted token v; A if r >= accept, C if r < escalate, else B. "tv": s = total
    variation of the draft and the slim distribution; "kl": s = KL(draft || slim) in nats; A if s <= accept, C if
    s > escalate, else B. A proposal without logits counts as one-hot. Thresholds that are None take the criterion's
    default: 0.60 and 0.30 for "ratio", 0.40 and 0.70 for "tv", 0.51 and 1.20 nats for "kl".

    In tiered mode the gate decides what is emitted: A keeps the token, B lets the slim tier draw it again, C leaves it
    to the full model. In exact mode it decides only *when* the full model is asked: a sequence escalates when a drafted
    token that the exact rule has already accepted lies in region C. Nothing is cut.

    Raises:
        InvalidInput: an unknown criterion, or thresholds in the wrong order, which would leave region B empty.
    """

    criterion: str = "ratio"
    accept: float = None  # type: ignore[assignment]  # always a number once the gate is made
    escalate: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.criterion not in DEFAULTS:
            raise InvalidInput(f"gate: criterion must be 'ratio', 'tv' or 'kl', got {self.criterion!r}")
        for name, default in zip(("accept", "escalate"), DEFAULTS[self.criterion], strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            if not isinstance(getattr(self, name), (int, float)):
                raise InvalidInput(f"gate: {name} must be a number, got {getattr(self, name)!r}")
        low, high = (self.escalate, self.accept) if self.criterion == "ratio" else (self.accept, self.escalate)
        if not low <= high:
            sign = "<=" if self.criterion == "ratio" else ">="
            raise InvalidInput(
                f"gate: escalate must be {sign} accept for criterion {self.criterion!r}, or region B is empty; "
                f"got escalate={self.escalate}, accept={self.accept}"
            )

    def regions(
        self,
        tokens: torch.Tensor,
        slim_logits: torch.Tensor,
        draft_logits: torch.Tensor | None = None,
        one_hot: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Where the slim tier sends drafted tokens.

        Args:
            tokens: [n] ids.
            slim_logits, draft_logits: [n, V], [n, Vd]: the rows that judge and that proposed them, masked.
            one_hot: [n] bool, proposals that count as one-hot though ``draft_logits`` has a row for them.

        Returns:
            [n] values of ``viasd_kernels.Region``.
        """
        slim = slim_logits.float().log_softmax(-1)
        chosen = slim.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
        if self.criterion == "ratio":
            score = (chosen - slim.amax(-1)).exp()
            accept, escalate = score >= self.accept, score < self.escalate
        else:
            score = 1.0 - chosen.exp() if self.criterion == "tv" else -chosen
            if draft_logits is not None:
                ones = torch.ones_like(chosen)
                stats = acceptance_stats(draft_logits, slim_logits, tokens, temperature=ones, check=False)
                drawn = stats.tv if self.criterion == "tv" else stats.kl_draft_target
                score = drawn if one_hot is None else torch.where(one_hot, score, drawn)
            accept, escalate = score <= self.accept, ~(score <= self.escalate)
        kept = torch.where(accept, Region.ACCEPT, Region.REGENERATE)
        # A token that the slim tier masks is region C, whatever the thresholds.
        return torch.where(escalate | (chosen == -torch.inf), Region.ESCALATE, kept)
