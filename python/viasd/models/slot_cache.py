"""Keys and values in token slots, in the form that Transformers models accept as their cache."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicLayer

from viasd.models.base import Rows, SlotPool

INITIAL_SLOTS = 256


class SlotLayer(DynamicLayer):
    """One layer's pool ``[1, H_kv, slots, D_head]``; an update writes the pass's rows to their slots."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (self._grown(None, states) for states in (key_states, value_states))
        if self.keys.shape[2] < self.owner.capacity:
            self.keys, self.values = self._grown(self.keys, key_states), self._grown(self.values, value_states)
        for pool, states in ((self.keys, key_states), (self.values, value_states)):
            finite = states.isfinite()
            self.owner.broken[self.owner.slots] |= ~finite.all(dim=3).all(dim=1)[0]
            pool.index_copy_(2, self.owner.slots, states.where(finite, 0.0))
        return self.keys[:, :, : self.owner.extent], self.values[:, :, : self.owner.extent]

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a masked slot still enters the weighted sum, as 0 times what it holds.
        new = like.new_zeros(1, like.shape[1], self.owner.capacity, like.shape[3])
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def get_seq_length(self) -> int:
        return 0  # positions and masks are explicit; nothing may be derived from a length


class SlotCache:
    """The cache of one decode run: a slot pool and, per layer, what the slots hold.

    ``extent`` is the number of slots in use at most, and so the width of a pass's mask; ``positions [extent]`` tells
    each slot's absolute position, ``broken [extent]`` whether what it should hold is not finite. The pools have
    zeros there: attention weighs what a row may not see with 0, and 0 times NaN would break every row of the pass.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.pool = SlotPool()
        self.device = device
        self.capacity = INITIAL_SLOTS
        self.layers = Cache(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self._positions = torch.zeros(self.capacity, dtype=torch.int64, device=device)
        self._broken = torch.zeros(self.capacity, dtype=torch.bool, device=device)

    @property
    def extent(self) -> int:
        return self.pool.num_slots

    @property
    def positions(self) -> torch.Tensor:
        return self._positions[: self.extent]

    @property
    def broken(self) -> torch.Tensor:
        return self._broken[: self.extent]

    @property
    def num_bytes(self) -> int:
        """Of the keys and values of all layers."""
        layers = self.layers.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if isinstance(layer, SlotLayer))

    def begin(self, rows: Rows) -> None:
        """Point the layers at the slots of the coming pass."""
        if self.extent > self.capacity:
            self.capacity = max(self.extent, 2 * self.capacity)
            added = self.capacity - len(self._positions)
            self._positions = torch.nn.functional.pad(self._positions, (0, added))
            self._broken = torch.nn.functional.pad(self._broken, (0, added))
        self.slots = torch.tensor(rows.slots, dtype=torch.int64, device=self.device)
        self._broken[self.slots] = False
        self._positions[self.slots] = torch.tensor(rows.positions, dtype=torch.int64, device=self.device)


def visible_slots(rows: Rows, cache: SlotCache) -> torch.Tensor:
    """[R, extent] bool: the slots each row sees, which are its context, its ancestors and itself."""
    visible = torch.zeros(len(rows.tokens), cache.extent, dtype=torch.bool)
    for b, context in enumerate(rows.context):
        first, end = rows.row_start[b], rows.row_start[b + 1]
        visible[first:end, torch.tensor(context, dtype=torch.int64)] = True
        own = torch.tensor(rows.slots[first:end], dtype=torch.int64)
        if rows.parents is None:
            visible[first:end, own] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
            continue
        for row in range(first, end):
            parent = rows.parents[row]
            if parent >= 0:
                visible[row, own] = visible[first + parent, own]
            visible[row, rows.slots[row]] = True
    return visible.to(cache.device)
