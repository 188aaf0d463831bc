"""What goes into the acceptance ops beside tensors, and what comes out of them."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

CRITERIA = ("ratio", "tv", "kl")


class Region(IntEnum):
    """Where the gate sent a drafted row: the values of ``GateVerdict.regions``."""

    NOT_WALKED = -1  # a root, a row behind the walk's end, an unused row
    ACCEPT = 0  # A: the drafted token is kept
    REGENERATE = 1  # B: the slim tier's own draw replaces it (and may equal it)
    ESCALATE = 2  # C: the full model decides


@dataclass(frozen=True, eq=False)
class Gate:
    """One criterion and its two thresholds per sequence.

    With r = q'(v) / max q' for the drafted token v and s = TV(p, q') or KL(p || q') in nats (p = drafter, q' = slim
    verifier, both at temperature 1):

    - ``"ratio"``: A if r >= accept, C if r < escalate, else B; needs no draft logits. Defaults of the library: 0.60
      and 0.30.
    - ``"tv"``, ``"kl"``: A if s <= accept, C if s > escalate, else B.

    Thresholds are compared in the dtype in which the statistics are computed (float32; float64 for float64 logits).
    Building a gate reads its thresholds, which synchronises on CUDA: build it once per batch, outside a captured
    graph.

    Attributes:
        criterion: "ratio", "tv" or "kl".
        accept: [B] float32 or float64.
        escalate: [B], same dtype and device.

    Raises:
        ValueError: an unknown criterion; shapes that differ; thresholds in the wrong order (or NaN), which would leave
            region B empty and make A and C overlap.
        TypeError: thresholds that are not float32 or float64 tensors of one dtype.
    """

    criterion: str
    accept: torch.Tensor
    escalate: torch.Tensor

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise ValueError(f"Gate: criterion must be 'ratio', 'tv' or 'kl', got {self.criterion!r}")
        for name, threshold in (("accept", self.accept), ("escalate", self.escalate)):
            if not isinstance(threshold, torch.Tensor) or threshold.dtype not in (torch.float32, torch.float64):
                kind = threshold.dtype if isinstance(threshold, torch.Tensor) else type(threshold).__name__
                raise TypeError(f"Gate: {name} must be a float32 or float64 tensor [B], got {kind}")
        if self.accept.dtype != self.escalate.dtype or self.accept.device != self.escalate.device:
            raise TypeError(
                "Gate: accept and escalate must have one dtype and device, got "
                f"{self.accept.dtype} on {self.accept.device}, {self.escalate.dtype} on {self.escalate.device}"
            )
        if self.accept.ndim != 1 or self.accept.shape != self.escalate.shape:
            raise ValueError(
                "Gate: accept and escalate must both be [B], got "
                f"{list(self.accept.shape)} and {list(self.escalate.shape)}"
            )
        self._check_order()

    def _check_order(self) -> None:
        low, high, rule = (
            (self.escalate, self.accept, "escalate <= accept (A if r >= accept, C if r < escalate)")
            if self.criterion == "ratio"
            else (self.accept, self.escalate, "accept <= escalate (A if s <= accept, C if s > escalate)")
        )
        wrong = (~(low <= high)).nonzero()
        if wrong.numel():
            first = int(wrong[0])
            raise ValueError(
                f"Gate: thresholds in the wrong order: {self.criterion!r} needs {rule}, but sequence {first} has "
                f"accept {float(self.accept[first]):g} and escalate {float(self.escalate[first]):g}; "
                f"{len(wrong)} of {self.accept.numel()} sequence(s)"
            )


class Stats(NamedTuple):
    """Statistics of a draft row p and a target row q, and of the token judged under them; all [R].

    Floats are float32 (float64 for float64 logits), in nats where they are logarithmic. NaN where the row that they
    need holds NaN or +inf or is all -inf.
    """

    kl_draft_target: torch.Tensor  # KL(p || q); +inf where p has mass on a token that q masks
    kl_target_draft: torch.Tensor  # KL(q || p); +inf where q has mass on a token that p masks or does not know
    tv: torch.Tensor  # half the sum of |p - q|
    rkl: torch.Tensor  # the paper's cost R(q || p), see acceptance_stats
    ratio: torch.Tensor  # q(token) / max q
    draft_logprob: torch.Tensor  # log p(token)
    target_logprob: torch.Tensor  # log q(token)
    target_argmax: torch.Tensor  # int32, lowest id on ties; -1 where the target row is not a distribution
    draft_entropy: torch.Tensor
    target_entropy: torch.Tensor


class ChainVerdict(NamedTuple):
    """What became of each sequence's chain; all [B] int32."""

    num_accepted: torch.Tensor  # drafted tokens accepted, the final token not counted
    next_token: torch.Tensor  # recovered or bonus token; -1 for a sequence without rows and after a fatal finding
    status: torch.Tensor  # bits of viasd_kernels.Status


class GateVerdict(NamedTuple):
    """What the gate emitted, and why."""

    tokens: torch.Tensor  # [R] int32: the token emitted after row r, -1 for none
    regions: torch.Tensor  # [R] int8: the Region of drafted row r
    num_emitted: torch.Tensor  # [B] int32: tokens >= 0 of the sequence
    escalate: torch.Tensor  # [B] bool: the walk met region C
    status: torch.Tensor  # [B] int32: bits of viasd_kernels.Status
    # Element r is about slim row r (and draft row r), as in acceptance_stats, with row r + 1's token judged under it:
    # regions[r + 1] follows from it. NaN (target_argmax -1) where no drafted row was judged; NaN in what needs a draft
    # row when there are no draft logits.
    stats: Stats
