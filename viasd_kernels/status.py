"""What an op found wrong with a sequence: the bits of every ``status [B]`` int32 output."""

from enum import IntFlag

import torch


class Status(IntFlag):
    """Bits of an op's ``status`` output; a sequence without a finding has 0.

    Fatal bits mean that no final token could be drawn: what was accepted before stays, ``next_token`` is -1.
    Informational bits mean that the op went on by a stated rule.
    """

    OK = 0
    TARGET_NOT_FINITE = 1  # fatal: NaN or +inf in a target row
    TARGET_EMPTY = 2  # fatal: a target row is all -inf
    TOKEN_OUT_OF_RANGE = 4  # fatal in chains and gates: an id < -1 or >= V
    DRAFT_INVALID = 8  # a draft row with NaN or +inf, or all -inf: counts as a rejection
    DRAFT_ZERO = 16  # the proposal gives its own token probability 0: rejected, next token from the target row
    RESIDUAL_EMPTY = 32  # nothing left of the target after a rejection: the last row that had mass is used
    TREE_PRUNED = 64  # an orphan, a cycle, a forward reference or an id outside [0, V): never followed


FATAL = Status.TARGET_NOT_FINITE | Status.TARGET_EMPTY | Status.TOKEN_OUT_OF_RANGE


def raise_for_status(op: str, status: torch.Tensor, raising: Status) -> None:
    """Raise ``ValueError`` naming the first sequence whose ``status [B]`` has a bit of ``raising`` (synchronises)."""
    bad = (status & int(raising)).nonzero()
    if bad.numel():
        sequence = int(bad[0])
        found = Status(int(status[sequence])) & raising
        names = ", ".join(bit.name or "" for bit in Status if bit and bit in found)
        raise ValueError(f"{op}: sequence {sequence} of {status.numel()}: {names} ({len(bad)} sequence(s) affected)")
