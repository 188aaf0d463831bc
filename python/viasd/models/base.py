"""What the decode loop asks of a model: packed rows in, logits out, keys and values in token slots."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from viasd.routing import Route


@dataclass(frozen=True)
class Rows:
    """The tokens of one pass, of all its sequences, flattened (R rows, B sequences).

    A row sees its sequence's context, its ancestors in the pass, and itself.

    Args:
        tokens: [R] ids.
        positions: [R] absolute positions.
        row_start: [B+1] first row of each sequence, then R.
        slots: [R] the cache slot that takes each row's keys and values.
        context: B lists of slots: what each sequence has in the cache.
        parents: [R] index of each row's parent within its sequence, -1 for the root; None means chains.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    row_start: Sequence[int]
    slots: Sequence[int]
    context: Sequence[Sequence[int]]
    parents: Sequence[int] | None = None


@dataclass(frozen=True)
class DecoderOutput:
    """``logits`` [rows asked for, V]; ``captured[i]`` [R, D], the hidden state that enters layer i."""

    logits: torch.Tensor
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


class SlotPool:
    """Hands out token slots, the lowest free one first, so that what is in use stays together."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._free: list[int] = []

    def take(self, count: int) -> list[int]:
        slots = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        missing = count - len(slots)
        slots.extend(range(self.num_slots, self.num_slots + missing))
        self.num_slots += missing
        return slots

    def give(self, slots: Sequence[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)


def row_starts(lengths: Iterable[int]) -> list[int]:
    """[B+1] first row of each sequence, then the number of rows."""
    return list(itertools.accumulate(lengths, initial=0))


PREFILL_ROWS = 512  # bounds a pass's mask and activations


class KVCache(Protocol):
    """A model's keys and values; the pool says which of its slots are free."""

    pool: SlotPool


class Model(Protocol):
    """A decoder-only language model over token slots. Thread-safe: a run's state is in its cache."""

    name: str
    num_layers: int
    vocab_size: int
    max_positions: int
    implementation: str
    reason: str

    @property
    def device(self) -> torch.device:
        """Where passes run and logits live."""

    def check_route(self, route: Route) -> None:
        """Raise ``RouteMismatch`` or ``UnsupportedModel`` when passes cannot take this route."""

    def new_cache(self) -> Any:
        """An empty cache for one run."""

    def forward(
        self,
        rows: Rows,
        cache: Any,
        *,
        route: Route | None = None,
        logits_rows: Sequence[int] | None = None,
        capture_layers: Sequence[int] = (),
    ) -> DecoderOutput:
        """Run one pass; ``route`` says what to bypass, ``logits_rows`` which rows' logits are wanted (None: all)."""


def prefill(model: Model, cache: Any, sequences: Sequence[tuple[Sequence[int], list[int]]]) -> None:
    """Write the keys of all tokens that have no slot yet, of several sequences together. Waits for the device.

    Args:
        sequences: pairs of a sequence's tokens and the slots of the first of them, which grow by those of the rest.
    """
    waiting = [own for own in sequences if len(own[1]) < len(own[0])]
    while waiting:
        room = PREFILL_ROWS
        chunks: list[tuple[Sequence[int], list[int]]] = []
        for tokens, slots in waiting:
            chunks.append((tokens[len(slots) : len(slots) + room], slots))
            room -= len(chunks[-1][0])
            if not room:
                break
        row_start = row_starts(len(chunk) for chunk, _ in chunks)
        new = cache.pool.take(row_start[-1])
        rows = Rows(
            tokens=[token for chunk, _ in chunks for token in chunk],
            positions=[len(slots) + i for chunk, slots in chunks for i in range(len(chunk))],
            row_start=row_start,
            slots=new,
            context=[list(slots) for _, slots in chunks],
        )
        output = model.forward(rows, cache, logits_rows=[row_start[-1] - 1])
        for b, (_, slots) in enumerate(chunks):
            slots.extend(new[row_start[b] : row_start[b + 1]])
        waiting = [own for own in waiting if len(own[1]) < len(own[0])]
        if not waiting:
            output.logits[0, 0].item()
