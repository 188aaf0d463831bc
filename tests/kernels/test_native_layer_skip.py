"""The native bypass_norm and bypass_linear against the reference on random shapes and strides, and their bits."""

from __future__ import annotations

import pytest
import torch
from decoder_configs import STABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import assert_as_good, by_dtype, by_level, cpu_level, same_bits, torch_threads

from viasd_kernels.layer_skip import bypass_linear, bypass_norm

EPILOGUES = ["none", "residual", "silu_mul", "gelu_tanh_mul"]
WIDTHS = [1, 2, 15, 16, 17, 64, 65, 130, 257]
KEEPS = ["all", "none", "some"]


def strided(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """The same rows: one after the other, with NaN between them, or all of them the first row, in one place."""
    if layout == "apart":
        return torch.cat([matrix, torch.full_like(matrix, torch.nan)], 1)[:, : matrix.shape[1]]
    return matrix[:1].expand(matrix.shape) if layout == "one row" else matrix


def keep_of(kind: str, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(num_rows, generator=generator) < {"all": 2.0, "none": 0.0, "some": 0.5}[kind]


class Numbers:
    def __init__(self, dtype: torch.dtype, seed: int, layout: str = "dense") -> None:
        self.dtype, self.layout = dtype, layout
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, width: int, scale: float = 1.0) -> torch.Tensor:
        return strided(self.vector(rows, width, scale=scale), self.layout)

    def vector(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)


def wide(arguments: dict) -> dict:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


@by_level
@by_dtype
@settings(STABLE, max_examples=40)
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 64]),
    width=st.sampled_from(WIDTHS),
    keep=st.sampled_from(KEEPS),
    layout=st.sampled_from(["dense", "apart", "one row"]),
    delta=st.sampled_from(["none", "plain", "normed"]),
    eps=st.sampled_from([1e-6, 0.3]),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_norm_errs_at_most_twice_as_much(level, dtype, num_rows, width, keep, layout, delta, eps, offset, seed) -> None:
    numbers = Numbers(dtype, seed, layout)
    arguments = {
        "hidden": numbers.matrix(num_rows, width),
        "delta": None if delta == "none" else numbers.matrix(num_rows, width),
        "keep": keep_of(keep, num_rows, numbers.generator),
        "weight": numbers.vector(width),
        "delta_weight": numbers.vector(width) if delta == "normed" else None,
    }
    kinds = {"eps": eps, "weight_offset": offset}
    with cpu_level(level):
        got = bypass_norm(**arguments, **kinds, impl="native")
    same_dtype = bypass_norm(**arguments, **kinds, impl="reference")
    for ours, theirs, exact in zip(got, same_dtype, bypass_norm(**wide(arguments), **kinds), strict=True):
        assert_as_good(ours, theirs, exact)
    bypassed = ~arguments["keep"] | (delta == "none")
    assert same_bits(got[0][bypassed], arguments["hidden"][bypassed])


@by_level
@by_dtype
@settings(STABLE, max_examples=40)
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 13, 64]),
    depth=st.sampled_from(WIDTHS),
    width=st.sampled_from(WIDTHS),
    keep=st.sampled_from(KEEPS),
    layout=st.sampled_from(["dense", "apart", "one row"]),
    epilogue=st.sampled_from(EPILOGUES),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_linear_errs_at_most_twice_as_much(
    level, dtype, num_rows, depth, width, keep, layout, epilogue, with_bias, seed
) -> None:
    numbers = Numbers(dtype, seed, layout)
    activation = epilogue if epilogue.endswith("mul") else None
    outputs = 2 * width if activation else width
    arguments = {
        "x": numbers.matrix(num_rows, depth),
        "weight": numbers.matrix(outputs, depth, scale=depth**-0.5),
        "keep": keep_of(keep, num_rows, numbers.generator),
        "bias": numbers.vector(outputs) if with_bias else None,
        "residual": numbers.matrix(num_rows, width) if epilogue == "residual" else None,
        "activation": activation,
    }
    with cpu_level(level):
        got = bypass_linear(**arguments, impl="native")
    assert_as_good(got, bypass_linear(**arguments, impl="reference"), bypass_linear(**wide(arguments)))
    bypassed = ~arguments["keep"]
    stays = arguments["residual"] if epilogue == "residual" else torch.zeros_like(got)
    assert same_bits(got[bypassed], stays[bypassed])


@by_level
@by_dtype
@pytest.mark.parametrize("num_rows", [1, 5])
def test_long_sums_keep_their_digits(level: str, dtype: torch.dtype, num_rows: int) -> None:
    """One sum of so many terms of one sign, in their order, would err several times as much as torch's."""
    numbers, keep = Numbers(dtype, seed=0), torch.ones(num_rows, dtype=torch.bool)
    x, weight = numbers.matrix(num_rows, 30_000).abs(), numbers.matrix(40, 30_000).abs()
    exact = bypass_linear(x.double(), weight.double(), keep, impl="reference")
    with cpu_level(level):
        got = bypass_linear(x, weight, keep, impl="native")
    assert_as_good(got, bypass_linear(x, weight, keep, impl="reference"), exact)


@by_level
@by_dtype
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_neither_rows_nor_threads_change_a_rows_bits(level: str, dtype: torch.dtype, epilogue: str) -> None:
    """Large enough for threads to be used; every number of rows up to 64."""
    numbers = Numbers(dtype, seed=0)
    x, weight, residual = numbers.matrix(64, 200), numbers.matrix(170, 200, 0.07), numbers.matrix(64, 170)

    def run(count: int) -> torch.Tensor:
        return bypass_linear(
            x[:count],
            weight,
            torch.ones(count, dtype=torch.bool),
            residual=residual[:count] if epilogue == "residual" else None,
            activation=epilogue if epilogue.endswith("mul") else None,
            impl="native",
        )

    with cpu_level(level):
        with torch_threads(1):
            every = run(64)
            assert all(same_bits(run(count), every[:count]) for count in range(1, 64))
        for threads in (2, 3, 5):
            with torch_threads(threads):
                assert same_bits(run(64), every)


@by_level
@by_dtype
def test_threads_change_no_bit_of_a_norm(level: str, dtype: torch.dtype) -> None:
    numbers, keep = Numbers(dtype, seed=0), torch.arange(64) % 3 > 0
    hidden, delta, weight = numbers.matrix(64, 700), numbers.matrix(64, 700), numbers.vector(700)
    with cpu_level(level):
        outs = []
        for threads in (1, 2, 3, 5):
            with torch_threads(threads):
                outs.append(bypass_norm(hidden, delta, keep, weight, eps=1e-6, delta_weight=weight, impl="native"))
        assert all(same_bits(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


@by_level
@by_dtype
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_broken_row_stays_alone(level: str, dtype: torch.dtype, broken: float) -> None:
    """Row 1 is bypassed and full of it, row 3 is kept and has it in one place."""
    numbers, keep = Numbers(dtype, seed=1), torch.tensor([True, False, True, True, True])
    x, delta, weight = numbers.matrix(5, 33), numbers.matrix(5, 33), numbers.matrix(30, 33)
    healthy = x.clone()
    others = torch.tensor([0, 2, 4])
    with cpu_level(level):
        expected = (
            bypass_linear(x, weight, keep, impl="native"),
            *bypass_norm(x, delta, keep, weight[0], eps=1e-6, impl="native"),
        )
        x[1], delta[1], x[3, 5] = broken, broken, broken
        linear = bypass_linear(x, weight, keep, impl="native")
        hidden, normed = bypass_norm(healthy, delta, keep, weight[0], eps=1e-6, impl="native")
        spoilt, spoilt_norm = bypass_norm(x, delta, keep, weight[0], eps=1e-6, impl="native")
    assert same_bits(linear[others], expected[0][others])
    assert not linear[1].any()
    assert not linear[3].isfinite().any()
    assert same_bits(hidden, expected[1])
    assert same_bits(normed, expected[2])
    assert same_bits(spoilt[1], x[1])
    assert same_bits(spoilt_norm[others], expected[2][others])
    assert spoilt_norm[[1, 3]].isnan().any(1).all()
