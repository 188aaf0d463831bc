"""One pass of a decoder: what goes in once arguments are checked, and what comes out."""

from dataclasses import dataclass
from typing import Dict, NamedTuple, Optional, Tuple

import torch

from .kv_pool import KVSlots


class DecoderOutput(NamedTuple):
    """What one pass yields."""

    hidden: torch.Tensor  # [R, D], after the final norm: what the LM head reads
    logits: torch.Tensor  # [rows asked for, V], after the soft cap, before temperature
    captured: Dict[
        int, torch.Tensor
    ]  # layer i: [R, D], the residual stream that enters it (i = L: that leaves the last)


@dataclass(frozen=True, eq=False)
class Step:
    """One pass, its arguments checked and brought to one form."""

    tokens: torch.Tensor  # [R]
    positions: torch.Tensor  # [R]
    row_start: torch.Tensor  # [B+1]
    parents: Optional[torch.Tensor]  # [R]; None: chains
    kv: KVSlots
    kept: Tuple[Tuple[bool, bool], ...]  # [L][2]: whether any row keeps the layer's attention, its MLP
    row_route: Optional[torch.Tensor]  # [R, L, 2] bool; None: every row keeps what ``kept`` says
    logits_rows: Optional[torch.Tensor]  # [rows asked for]; None: all
    capture_layers: Tuple[int, ...]

    def keep_rows(self, layer: int, sub_layer: int) -> torch.Tensor:
        """[R] bool: the rows that keep the layer's attention (sub-layer 0) or MLP (1)."""
        if self.row_route is None:
            return torch.full(self.tokens.shape, self.kept[layer][sub_layer], device=self.tokens.device)
        return self.row_route[:, layer, sub_layer]


class RowPlaces(NamedTuple):
    """Where each row of a pass stands; all [R]. Made without reading anything back from a device."""

    sequence: torch.Tensor  # the row's sequence
    local: torch.Tensor  # its number there
    parents: torch.Tensor  # its parent's number there, -1 for a root
    slots: torch.Tensor  # int64, its slot in the pool
    present: torch.Tensor  # bool: whether it belongs to a sequence; rows past the last one's end only fill a shape

    @classmethod
    def of(cls, num_rows: int, row_start: torch.Tensor, kv: KVSlots, parents: Optional[torch.Tensor]) -> "RowPlaces":
        rows = torch.arange(num_rows, device=row_start.device)
        # The number of sequences that end at or before the row.
        sequence = torch.searchsorted(row_start[1:].long(), rows, right=True)
        present = sequence < row_start.shape[0] - 1
        sequence = sequence * present
        local = rows - row_start[sequence]
        places = (kv.context_len[sequence] + local) * present
        slots = kv.slots[sequence, places].long()
        return cls(sequence, local, local - 1 if parents is None else parents, slots, present)
