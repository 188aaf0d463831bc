"""bypass_linear against float64 written from the definition, its epilogues, and the bits of bypassed rows."""

from __future__ import annotations

import math

import pytest
import torch

from viasd_kernels.layer_skip import bypass_linear

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
KEEP = torch.tensor([True, False, True, True, False])
EPILOGUES = ["none", "residual", "silu_mul", "gelu_tanh_mul"]
BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


def random_inputs(dtype: torch.dtype = torch.float32, din: int = 13, dout: int = 14) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(din)
    shapes = {"x": (5, din), "weight": (dout, din), "bias": (dout,), "residual": (5, dout)}
    scale = {"weight": din**-0.5}
    return {
        name: (torch.randn(shape, generator=generator) * scale.get(name, 1.0)).to(dtype)
        for name, shape in shapes.items()
    }


def run(inputs: dict[str, torch.Tensor], epilogue: str, with_bias: bool, keep: torch.Tensor = KEEP) -> torch.Tensor:
    return bypass_linear(
        inputs["x"],
        inputs["weight"],
        keep,
        bias=inputs["bias"] if with_bias else None,
        residual=inputs["residual"] if epilogue == "residual" else None,
        activation=None if epilogue in ("none", "residual") else epilogue,
    )


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def oracle(inputs: dict[str, torch.Tensor], epilogue: str, with_bias: bool) -> torch.Tensor:
    """Row by row in Python's own floats."""
    x, weight, bias, residual = (inputs[name].double().tolist() for name in ("x", "weight", "bias", "residual"))
    outs = []
    for row, keep, extra in zip(x, KEEP.tolist(), residual, strict=True):
        y = [math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in weight]
        if with_bias:
            y = [a + b for a, b in zip(y, bias, strict=True)]
        if epilogue in ("silu_mul", "gelu_tanh_mul"):
            act = silu if epilogue == "silu_mul" else gelu_tanh
            half = len(y) // 2
            y = [act(gate) * up for gate, up in zip(y[:half], y[half:], strict=True)]
        if epilogue == "residual":
            y = [a + b for a, b in zip(y, extra, strict=True)] if keep else extra
        outs.append(y if keep or epilogue == "residual" else [0.0] * len(y))
    return torch.tensor(outs, dtype=torch.float64)


def torch_expression(inputs: dict[str, torch.Tensor], epilogue: str) -> torch.Tensor:
    y = torch.nn.functional.linear(inputs["x"], inputs["weight"], inputs["bias"])
    if epilogue == "residual":
        return torch.where(KEEP.unsqueeze(1), y + inputs["residual"], inputs["residual"])
    if epilogue != "none":
        gate, up = y.chunk(2, -1)
        functional = torch.nn.functional
        y = (functional.silu(gate) if epilogue == "silu_mul" else functional.gelu(gate, approximate="tanh")) * up
    return torch.where(KEEP.unsqueeze(1), y, torch.zeros_like(y))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS.get(x.dtype, torch.int16))


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_equals_the_definition_in_float64(epilogue: str, with_bias: bool) -> None:
    inputs = random_inputs(torch.float64)
    torch.testing.assert_close(
        run(inputs, epilogue, with_bias), oracle(inputs, epilogue, with_bias), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_errs_at_most_twice_as_much_as_torch_plus_an_ulp(epilogue: str, dtype: torch.dtype) -> None:
    inputs = random_inputs(dtype, din=300, dout=40)
    got, expected = run(inputs, epilogue, True), oracle(inputs, epilogue, True)
    assert got.dtype == dtype
    error, allowed = ((x.double() - expected).abs().max() for x in (got, torch_expression(inputs, epilogue)))
    assert error <= 2 * allowed + torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bypassed_row_yields_its_residual_bit_for_bit(dtype: torch.dtype) -> None:
    inputs = random_inputs(dtype)
    inputs["residual"][1, ::2], inputs["residual"][4, 3] = -0.0, math.inf
    inputs["x"][1], inputs["x"][4] = math.nan, math.inf
    out = run(inputs, "residual", True)
    assert torch.equal(bits(out[~KEEP]), bits(inputs["residual"][~KEEP]))
    assert out[KEEP].isfinite().all()


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "gelu_tanh_mul"])
def test_a_bypassed_row_without_residual_yields_positive_zeros(epilogue: str) -> None:
    inputs = random_inputs()
    inputs["x"][1], inputs["x"][4] = math.nan, -math.inf
    out = run(inputs, epilogue, True)
    assert not bits(out[~KEEP]).any()
    assert out[KEEP].isfinite().all()


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_fully_bypassed_tile_shows_nothing_of_the_weights(epilogue: str) -> None:
    inputs = random_inputs()
    inputs["weight"].fill_(math.nan)
    inputs["bias"].fill_(math.nan)
    out = run(inputs, epilogue, True, torch.zeros(5, dtype=torch.bool))
    expected = inputs["residual"] if epilogue == "residual" else torch.zeros_like(out)
    assert torch.equal(bits(out), bits(expected))
    assert out.data_ptr() != inputs["residual"].data_ptr()


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_rows_result_does_not_depend_on_which_others_are_kept(epilogue: str) -> None:
    inputs = random_inputs()
    every = run(inputs, epilogue, True, torch.ones(5, dtype=torch.bool))
    assert torch.equal(run(inputs, epilogue, True)[KEEP], every[KEEP])


def test_strided_rows_and_no_rows() -> None:
    inputs = random_inputs()
    expected = run(inputs, "residual", True)
    strided = {**inputs, "x": torch.stack([inputs["x"]] * 2, 1)[:, 1]}
    strided["weight"] = torch.stack([inputs["weight"]] * 2, 1)[:, 0]
    strided["residual"] = torch.cat([inputs["residual"]] * 2, 1)[:, :14]
    assert torch.equal(run(strided, "residual", True), expected)
    none = {**inputs, "x": inputs["x"][:0], "residual": inputs["residual"][:0]}
    assert run(none, "residual", True, KEEP[:0]).shape == (0, 14)
    assert run(none, "silu_mul", True, KEEP[:0]).shape == (0, 7)


def test_inputs_stay_as_they_are() -> None:
    inputs = random_inputs()
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    run(inputs, "residual", True)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in inputs.items())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(5, 13, dtype=torch.int64)}, TypeError, "x must be torch.float32 or"),
        ({"x": torch.zeros(5, 13, 1)}, ValueError, r"x must have shape \[any, any\], got \[5, 13, 1\]"),
        ({"x": torch.zeros(13, 5).t()}, ValueError, "x must be contiguous in its last dimension"),
        ({"weight": torch.zeros(14, 12)}, ValueError, r"weight must have shape \[any, 13\], got \[14, 12\]"),
        ({"weight": torch.zeros(14, 13).double()}, TypeError, "weight must be torch.float32, got torch.float64"),
        ({"keep": torch.ones(5, dtype=torch.uint8)}, TypeError, "keep must be torch.bool, got torch.uint8"),
        ({"keep": torch.ones(4, dtype=torch.bool)}, ValueError, r"keep must have shape \[5\], got \[4\]"),
        ({"bias": torch.zeros(13)}, ValueError, r"bias must have shape \[14\], got \[13\]"),
        ({"residual": torch.zeros(5, 13)}, ValueError, r"residual must have shape \[5, 14\], got \[5, 13\]"),
        ({"activation": "silu_mul"}, ValueError, "residual must be None with an activation"),
        ({"activation": "relu"}, ValueError, "activation must be None, 'silu_mul' or 'gelu_tanh_mul', got 'relu'"),
        (
            {"activation": "silu_mul", "weight": torch.zeros(13, 13), "bias": None, "residual": None},
            ValueError,
            "weight must pack gate and up, an even number of rows, got 13",
        ),
        ({"impl": "triton"}, NotImplementedError, "no 'triton' implementation for cpu tensors"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bypass_linear(**{**random_inputs(), "keep": KEEP, **changes})
