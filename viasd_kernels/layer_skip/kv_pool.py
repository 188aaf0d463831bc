"""Keys and values in token slots, shared by all tiers and sequences."""

from dataclasses import dataclass
from typing import Sequence, Union

import torch

from .config import DecoderConfig

BLOCK_SLOTS = 128  # slots that a pool grows by at a time
GPU_SLOTS = 4096  # that a pool on a GPU has at least: captured passes know its address, and die when it grows


class KVPool:
    """The storage: ``keys`` and ``values``, [L, num_slots, H_kv, Dh] each. Which slots are free, the caller knows.

    A sequence is a list of slots. Tree rows take fresh slots; accepting a path keeps its slots and frees the others,
    so nothing is ever copied, and a freed slot needs no clearing: a pass writes its rows' slots before it reads them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: Union[torch.device, str] = "cpu",
    ) -> None:
        if num_slots < 0:
            raise ValueError(f"KVPool: num_slots must be >= 0, got {num_slots}")
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        # Zeros, not garbage: what a row may not see still enters its weighted sum, as 0 times what the slot holds.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    def reserve(self, num_slots: int) -> None:
        """Make room for at least ``num_slots`` slots; what is stored stays.

        Grows by a quarter at least, in blocks; on a GPU to the double at least, so that it seldom moves.
        """
        if num_slots <= self.num_slots:
            return
        old = self.num_slots
        least = old + old // 4 if self.keys.device.type == "cpu" else max(2 * old, GPU_SLOTS)
        capacity = -(-max(num_slots, least) // BLOCK_SLOTS) * BLOCK_SLOTS
        for name in ("keys", "values"):
            before = getattr(self, name)
            grown = before.new_zeros(before.shape[0], capacity, *before.shape[2:])
            grown[:, :old] = before
            setattr(self, name, grown)

    def place(self, context: Sequence[Sequence[int]], row_slots: Sequence[int], row_start: Sequence[int]) -> "KVSlots":
        """Say in which slots a pass finds its sequences and puts its rows.

        Args:
            context: B lists of slots, in order of position: what each sequence has in the pool.
            row_slots: [R] the slot that takes each row's keys and values.
            row_start: [B+1] first row of each sequence, then R.
        """
        used = [[*known, *row_slots[first:end]] for known, first, end in zip(context, row_start[:-1], row_start[1:])]
        longest = max(map(len, used), default=0)
        padded = [own + [-1] * (longest - len(own)) for own in used]
        device = self.keys.device
        return KVSlots(
            self,
            torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(used), longest),
            torch.tensor([len(known) for known in context], dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, eq=False)
class KVSlots:
    """Where in a pool the sequences of one pass lie, as ``tree_attention`` wants it.

    Attributes:
        pool: the storage.
        slots: [B, max_len] int32 or int64: first the sequence's context in order of position, then its rows in row
            order; entries past both are not read.
        context_len: [B] int32 or int64, how many of them are context.
    """

    pool: KVPool
    slots: torch.Tensor
    context_len: torch.Tensor
