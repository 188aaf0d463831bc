"""Sequences in a pool: a SkipDecoder driven pass by pass, as a decode loop would."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from hf_mapping import VOCAB

from viasd_kernels.layer_skip import DecoderOutput, KVPool, SkipDecoder

LIMIT = 2e-4  # largest absolute difference of float32 logits of the order of 1


def flat(lists: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def some_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


class Sequences:
    """B sequences in one pool. Slots are handed out from the highest down, so none is where its position would be."""

    def __init__(self, decoder: SkipDecoder, count: int = 1, num_slots: int = 120) -> None:
        self.decoder = decoder
        self.pool: KVPool = decoder.new_pool(num_slots)
        self.free = list(range(num_slots))
        self.context: list[list[int]] = [[] for _ in range(count)]
        self.row_slots: list[list[int]] = []

    def run(self, tokens: list[list[int]], parents: list[list[int]] | None = None, **options) -> DecoderOutput:
        """One pass over a list of tokens per sequence."""
        self.row_slots = [[self.free.pop() for _ in own] for own in tokens]
        row_start = [0, *torch.tensor([len(own) for own in tokens]).cumsum(0).tolist()]
        depths = []
        for number, own in enumerate(tokens):
            links = range(-1, len(own) - 1) if parents is None else parents[number]
            depth: list[int] = []
            for link in links:
                depth.append(0 if link < 0 else depth[link] + 1)
            depths += [len(self.context[number]) + value for value in depth]
        if parents is not None:
            options["parents"] = torch.tensor(flat(parents), dtype=torch.int32)
        return self.decoder.forward(
            torch.tensor(flat(tokens), dtype=torch.int64),
            torch.tensor(depths, dtype=torch.int64),
            torch.tensor(row_start),
            self.pool.place(self.context, flat(self.row_slots), row_start),
            **options,
        )

    def keep(self, rows: list[list[int]] | None = None) -> None:
        """Append the slots of these rows of the last pass (None: of all) to the contexts; free the others."""
        for number, own in enumerate(self.row_slots):
            kept = range(len(own)) if rows is None else rows[number]
            self.context[number] += [own[row] for row in kept]
            self.free += [slot for row, slot in enumerate(own) if row not in kept]

    def extend(self, tokens: list[list[int]], **options) -> DecoderOutput:
        output = self.run(tokens, **options)
        self.keep()
        return output


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    assert expected.std() > 0.3, "the model is too tame for an absolute limit to mean anything"
    return (got - expected).abs().max().item()
