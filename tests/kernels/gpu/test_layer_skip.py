"""The two ops of layer skipping and the decoder of GPUs, against the reference."""

import math

import pytest
import torch
from native_cases import MIXED, Driver, assert_as_good, random_weights, same_bits, some_tokens
from on_device import DEVICE, HALF, on_device, on_gpu_only
from random_passes import check_decoder

import viasd
import viasd_kernels
from tiny_models import tiny
from viasd.models import SkipModel
from viasd_kernels import SkipDecoder

bypass_norm, bypass_linear = on_device(viasd_kernels.bypass_norm), on_device(viasd_kernels.bypass_linear)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinities that are meant

DTYPES = [torch.float32, *HALF]
KEEP = torch.tensor([True, False, True, True, False])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs_for(seed, **shapes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def as_good(op, inputs, **options):
    """Compares with the reference of the same dtype, by the errors that both make."""

    def run(impl, dtype):
        converted = {name: None if x is None else x.to(dtype) for name, x in inputs.items()}
        results = op(**converted, **options, impl=impl)
        return results if isinstance(results, tuple) else (results,)

    for dtype in DTYPES:
        ways = run("triton", dtype), run("reference", dtype), run("reference", torch.float64)
        for own, same_dtype, exact in zip(*ways, strict=True):
            assert_as_good(own, same_dtype, exact)


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("given", ["entry", "delta", "post-norm"])
@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_bypass_norm(width, given, weight_offset):
    inputs = inputs_for(width, hidden=(5, width), delta=(5, width), weight=(width,), delta_weight=(width,))
    inputs |= {"entry": {"delta": None, "delta_weight": None}, "delta": {"delta_weight": None}}.get(given, {})
    as_good(bypass_norm, inputs, keep=KEEP, eps=0.01, weight_offset=weight_offset)


@by_dtype
def test_a_bypassed_row_of_the_norm_keeps_its_bits(dtype):
    inputs = inputs_for(1, hidden=(5, 9, 2), delta=(5, 9, 2), weight=(9,))
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs["hidden"], inputs["delta"] = (inputs[name].mT.contiguous()[:, 0] for name in ("hidden", "delta"))
    inputs["hidden"][1, ::2], inputs["delta"][~KEEP] = -0.0, math.nan
    hidden, normed = bypass_norm(**inputs, keep=KEEP, eps=0.01, impl="triton")
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(hidden.view(bits)[~KEEP], inputs["hidden"].view(bits)[~KEEP])
    assert normed.isfinite().all()


@pytest.mark.parametrize("epilogue", ["none", "residual", "silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize(("depth", "outputs"), [(1, 2), (13, 14), (300, 70)], ids=str)
def test_bypass_linear(depth, outputs, epilogue):
    inputs = inputs_for(depth, x=(5, depth), weight=(outputs, depth), bias=(outputs,), residual=(5, outputs))
    activation = None if epilogue in ("none", "residual") else epilogue
    if epilogue != "residual":
        inputs["residual"] = None
    for bias in (inputs["bias"], None):
        as_good(bypass_linear, {**inputs, "bias": bias}, keep=KEEP, activation=activation)


def test_bypass_linear_of_more_rows_than_a_tile_holds():
    inputs = inputs_for(3, x=(150, 20), weight=(33, 20), residual=(150, 33))
    as_good(bypass_linear, inputs, keep=torch.arange(150) % 70 > 3)


def test_a_fully_bypassed_tile_reads_no_weight():
    inputs = inputs_for(4, x=(5, 20), residual=(5, 6))
    keep = torch.zeros(5, dtype=torch.bool)
    out = bypass_linear(**inputs, weight=torch.full((6, 20), math.nan), keep=keep, impl="triton")
    assert same_bits(out, inputs["residual"])


@on_gpu_only  # where hypothesis may not be installed; here test_decoder.py does more
@by_dtype
def test_a_decoder_of_all_kinds_of_layers(dtype):
    check_decoder("triton", MIXED, dtype, seed=5, prompts=(0, 3, 70), device=DEVICE)


@on_gpu_only
def test_what_graphs_replay_is_what_runs_without_them():
    """Rows in and out of step with buckets, routes and mixed rows, a pool that grows; and each pass again."""
    weights = {name: weight.to(DEVICE) for name, weight in random_weights(MIXED, torch.float32).items()}
    drivers = [Driver(SkipDecoder(weights, MIXED, impl="triton", graphs=graphs)) for graphs in (True, False)]
    route = [(layer != 1, layer != 2) for layer in range(MIXED.num_layers)]
    row_route = torch.ones(5, MIXED.num_layers, 2, dtype=torch.bool)
    row_route[2:, 1:3] = False
    for rows, options in ((3, {}), (8, {"route": route}), (5, {"row_route": row_route}), (3, {}), (64, {}), (7, {})):
        for driver in drivers:
            driver.pool.reserve(driver.pool.num_slots + rows)
        for _ in range(2):
            replayed, run = (driver.run([some_tokens(rows)], **options) for driver in drivers)
            for driver in drivers:
                driver.keep([[]])
            for one, other in ((replayed.hidden, run.hidden), (replayed.logits, run.logits)):
                assert (one - other).abs().max() <= 1e-4 * other.abs().max()
        for driver in drivers:
            driver.extend([some_tokens(2)])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loop_on_it_gives_the_tokens_of_the_reference(family):
    module = tiny(family).to(DEVICE)
    prompts = [[3, 14, 15, 92, 65], [3, 14, 3, 14, 3, 14]]
    settings = {"max_new_tokens": 6, "eos_token_ids": []}
    speculation = viasd.Speculation(adaptive=False, gamma=3)
    results = [
        viasd.load(SkipModel(module, impl=impl), drafter="self", route="default", speculation=speculation).generate(
            prompts, **settings
        )
        for impl in ("triton", "reference")
    ]
    assert [result.tokens for result in results[0]] == [result.tokens for result in results[1]]
    assert SkipModel(module, impl="triton").decoder.implementation == "triton"
