"""How many requests are decoded at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from viasd.decode.sequence import SequenceState
from viasd.errors import InvalidInput
from viasd.models.base import Model

MEMORY_SHARE = 0.25  # of what is free: a pool that grows holds its old and its new storage for a moment


@dataclass(frozen=True)
class Admission:
    """Lets requests in, in order, while the cache has room for all that they may write; one is always let in.

    Args:
        max_sequences: most requests at a time, at least 1.
        max_slots: tokens whose keys and values the cache may hold; None takes what fits into a quarter of the free
            memory.

    Raises:
        InvalidInput: a value below 1.
    """

    max_sequences: int = 64
    max_slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_slots"):
            value = getattr(self, name)
            if not (value is None and name == "max_slots") and (type(value) is not int or value < 1):
                raise InvalidInput(f"admission: {name} must be an integer >= 1, got {value!r}")

    def slots(self, model: Model) -> float:
        """Most slots of this model that may be in use."""
        if self.max_slots is not None:
            return self.max_slots
        slot_bytes = getattr(model, "slot_bytes", 0)  # a model of the caller's own may not tell
        return MEMORY_SHARE * free_bytes(model.device) / slot_bytes if slot_bytes else float("inf")

    def admit(
        self, waiting: deque[SequenceState], active: Sequence[SequenceState], max_slots: float
    ) -> list[SequenceState]:
        """Take from the front of ``waiting`` what may start beside ``active``."""
        admitted: list[SequenceState] = []
        reserved = sum(sequence.max_slots for sequence in active)
        while waiting and len(active) + len(admitted) < self.max_sequences:
            reserved += waiting[0].max_slots
            if reserved > max_slots and (active or admitted):
                break
            admitted.append(waiting.popleft())
        return admitted


def free_bytes(device: torch.device) -> float:
    """Free memory of a device; of the main memory, what the system could give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
