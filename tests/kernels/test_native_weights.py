"""Weights in fewer bytes: which coding a matrix gets, and that a pass yields the same bits with it."""

from __future__ import annotations

import math

import pytest
import torch
from native_cases import by_level, cpu_level, same_bits

from viasd_kernels.layer_skip import DecoderConfig, LayerConfig, SkipDecoder, weight_shapes
from viasd_kernels.native import ELEMENT_CODES, load_native

CODINGS = ["float32", "bfloat16", "levels8", "levels4"]
DEPTHS = [32, 96, 100, 33]


def coding_of(weights: torch.Tensor) -> str:
    code = ELEMENT_CODES[weights.dtype]
    matrix = (code, weights.data_ptr(), weights.stride(0), *weights.shape, False)
    return CODINGS[load_native().smallest_coding(matrix, 2)]


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_levels(shape: tuple[int, int], bits: int, seed: int = 0, with_low: bool = True) -> torch.Tensor:
    """Float weights as a quantised file gives them: for blocks of 32 inputs a scale and an offset of few digits."""
    depth = shape[1] + -shape[1] % 32
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (shape[0], depth // 32, 32), generator=generator).float()
    step, low = torch.randint(64, 2048, (2, shape[0], depth // 32, 1), generator=generator).float()
    step, low = step * 2.0**-16, (low - 1000) * 2.0**-13
    centre = low if with_low else -(2 ** (bits - 1)) * step
    return (codes * step + centre).view(shape[0], depth)[:, : shape[1]].contiguous()


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_smallest_coding_that_loses_nothing_is_found(depth: int) -> None:
    assert coding_of(random((40, depth))) == "float32"
    assert coding_of(random((40, depth)).bfloat16().float()) == "bfloat16"
    assert coding_of(on_levels((40, depth), 4)) == "levels4"
    assert coding_of(on_levels((40, depth), 8)) == "levels8"
    assert coding_of(on_levels((40, depth), 8, with_low=False)) == "levels8"
    assert coding_of(random((40, depth)).bfloat16()) == "bfloat16"
    assert coding_of(torch.zeros(40, depth)) == "levels4"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-45, 3e38, 1 + 2**-23])
def test_one_weight_off_the_levels_keeps_the_matrix_in_floats(value: float) -> None:
    weights = on_levels((20, 64), 4)
    weights[17, 40] = value
    assert coding_of(weights) == "float32"


def test_a_ninth_bit_is_too_many() -> None:
    assert coding_of(on_levels((40, 96), 9)) == "float32"


CONFIG = DecoderConfig(
    vocab_size=50,
    hidden_size=72,
    intermediate_size=100,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    layers=(LayerConfig(), LayerConfig(window=3)),
    qkv_bias=True,
    mlp_bias=True,
    tied_head=True,
)


def weights_of(kind: str) -> dict[str, torch.Tensor]:
    weights = {}
    for seed, (name, shape) in enumerate(weight_shapes(CONFIG).items()):
        values = random(shape, seed)
        if len(shape) == 2:
            values = {
                "levels4": lambda shape=shape, seed=seed: on_levels(shape, 4, seed),
                "levels8": lambda shape=shape, seed=seed: on_levels(shape, 8, seed, with_low=False),
                "bfloat16": lambda values=values, shape=shape: (values * shape[1] ** -0.5).bfloat16().float(),
            }[kind]()
        weights[name] = values
    return weights


@by_level
@pytest.mark.parametrize("kind", ["levels4", "levels8", "bfloat16"])
def test_a_pass_yields_the_same_bits_in_fewer_bytes(kind: str, level: str) -> None:
    with cpu_level(level):
        weights = weights_of(kind)
        outputs = []
        for compact in (True, False):
            decoder = SkipDecoder(weights, CONFIG, impl="native", compact=compact)
            pool, results = decoder.new_pool(64), []
            for first, end in ((0, 40), (40, 41), (41, 44), (44, 60)):
                places = pool.place([list(range(first))], list(range(first, end)), [0, end - first])
                ids = torch.arange(first, end) % CONFIG.vocab_size
                output = decoder.forward(ids, torch.arange(first, end), torch.tensor([0, end - first]), places)
                results += [output.hidden, output.logits]
            outputs.append((decoder, results, pool))
        (small, ours, our_pool), (large, theirs, their_pool) = outputs
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
        assert same_bits(our_pool.keys, their_pool.keys)
        assert not torch.isnan(ours[-1]).any()
        limit = {"levels4": 0.25, "levels8": 0.45, "bfloat16": 0.51}[kind]
        assert small.weight_bytes <= limit * large.weight_bytes
