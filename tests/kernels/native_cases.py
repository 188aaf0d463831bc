"""Random weights, passes over a pool, and how far a result may be from the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from random import Random

import pytest
import torch

from viasd_kernels.layer_skip import DecoderConfig, DecoderOutput, LayerConfig, SkipDecoder, weight_shapes
from viasd_kernels.native import load_native

DTYPES = [torch.float32, torch.bfloat16]

LEVELS = ["portable", "avx2", "avx512"]  # "amx" differs from the last one in passes of many bfloat16 rows only
by_level = pytest.mark.parametrize("level", LEVELS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@contextmanager
def cpu_level(name: str) -> Iterator[None]:
    """Within: the compiled variant of this name; the test is skipped where the processor lacks it."""
    native = load_native()
    try:
        native.set_cpu_level(name)
    except ValueError:
        pytest.skip(f"this processor does not support {name}")
    try:
        yield
    finally:
        native.set_cpu_level("auto")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def assert_as_good(got: torch.Tensor, same_dtype: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of the same-dtype reference, and a few units in the last place of the largest value."""
    assert got.dtype == same_dtype.dtype
    assert got.shape == exact.shape
    if not exact.numel():
        return
    error, allowed = ((x.double() - exact).abs().max().item() for x in (got, same_dtype))
    assert error <= 2 * allowed + 8 * torch.finfo(got.dtype).eps * exact.abs().max().item()


def flat(lists: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def random_weights(config: DecoderConfig, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Norms around 1 with their offset, everything else so that activations and logits stay of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 0.2 * values + 1 - config.norm_weight_offset
        elif len(shape) == 2 and (name != "embedding" or config.tied_head):
            values *= shape[1] ** -0.5
        weights[name] = values.to(dtype)
    return weights


# Grouped heads, a head that is no multiple of 16, a near and a far window, every kind of norm.
MIXED = DecoderConfig(
    vocab_size=50,
    hidden_size=70,
    intermediate_size=100,
    num_heads=6,
    num_kv_heads=2,
    head_dim=20,
    layers=(LayerConfig(), LayerConfig(window=5), LayerConfig(window=70), LayerConfig()),
    attention_soft_cap=5.0,
    qk_norm=True,
    post_norms=True,
    qkv_bias=True,
)


def native_decoder(config: DecoderConfig = MIXED, dtype: torch.dtype = torch.float32) -> SkipDecoder:
    return SkipDecoder(random_weights(config, dtype), config, impl="native")


class Driver:
    """Sequences of one decoder in random slots of a pool. With native, what no pass has written is NaN."""

    def __init__(self, decoder: SkipDecoder, count: int = 1, num_slots: int = 400, seed: int = 0) -> None:
        self.decoder = decoder
        self.pool = decoder.new_pool(num_slots)
        # The reference multiplies what a row may not see by 0.
        self.unwritten = torch.nan if decoder.implementation == "native" else 0.0
        self.pool.keys.fill_(self.unwritten)
        self.pool.values.fill_(self.unwritten)
        self.free = list(range(num_slots))
        Random(seed).shuffle(self.free)
        self.context: list[list[int]] = [[] for _ in range(count)]

    def run(self, tokens: list[list[int]], parents: list[list[int]] | None = None, **options) -> DecoderOutput:
        """One pass over a list of tokens per sequence, chains unless ``parents`` says otherwise."""
        self.row_slots = [[self.free.pop() for _ in own] for own in tokens]
        links = parents or [list(range(-1, len(own) - 1)) for own in tokens]
        row_start, positions = [0], []
        for context, own in zip(self.context, links, strict=True):
            depth: list[int] = []
            for link in own:
                depth.append(depth[link] + 1 if link >= 0 else 0)
            positions += [len(context) + value for value in depth]
            row_start.append(len(positions))
        if parents is not None:
            options["parents"] = torch.tensor(flat(parents), dtype=torch.int64)
        device = self.decoder.device
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        return self.decoder.forward(
            torch.tensor(flat(tokens), dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(row_start, device=device),
            self.pool.place(self.context, flat(self.row_slots), row_start),
            **options,
        )

    def keep(self, rows: list[list[int]]) -> None:
        """Append these rows' slots to the contexts; the others go back, cleared."""
        for context, own, kept in zip(self.context, self.row_slots, rows, strict=True):
            context += [own[row] for row in kept]
            for row in set(range(len(own))) - set(kept):
                self.free.append(own[row])
                self.pool.keys[:, own[row]] = self.unwritten
                self.pool.values[:, own[row]] = self.unwritten

    def extend(self, tokens: list[list[int]], **options) -> DecoderOutput:
        output = self.run(tokens, **options)
        self.keep([list(range(len(own))) for own in tokens])
        return output


def some_tokens(count: int, vocab: int = MIXED.vocab_size, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
