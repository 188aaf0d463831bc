"""bypass_norm against float64 written from the definition, and the bits of bypassed rows."""

from __future__ import annotations

import math

import pytest
import torch

from viasd_kernels.layer_skip import bypass_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
KEEP = torch.tensor([True, False, True, True, False])
BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


def random_inputs(dtype: torch.dtype = torch.float32, width: int = 33) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    shapes = {"hidden": (5, width), "delta": (5, width), "weight": (width,), "delta_weight": (width,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def oracle_norm(row: list[float], weight: list[float], eps: float, offset: float) -> list[float]:
    root = math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
    return [value / root * (w + offset) for value, w in zip(row, weight, strict=True)]


def oracle(
    inputs: dict[str, torch.Tensor], *, eps: float, offset: float = 0.0, post: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row in Python's own floats."""
    hidden, delta, weight, delta_weight = (
        inputs[name].double().tolist() for name in ("hidden", "delta", "weight", "delta_weight")
    )
    outs, normed = [], []
    for row, change, keep in zip(hidden, delta, KEEP.tolist(), strict=True):
        if post:
            change = oracle_norm(change, delta_weight, eps, offset)
        outs.append([a + b for a, b in zip(row, change, strict=True)] if keep else row)
        normed.append(oracle_norm(outs[-1], weight, eps, offset))
    return torch.tensor(outs, dtype=torch.float64), torch.tensor(normed, dtype=torch.float64)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS.get(x.dtype, torch.int16))


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize(("offset", "post"), [(0.0, False), (1.0, False), (1.0, True), (0.0, True)])
def test_equals_the_definition_in_float64(offset: float, post: bool, eps: float) -> None:
    inputs = random_inputs(torch.float64)
    got = bypass_norm(
        inputs["hidden"],
        inputs["delta"],
        KEEP,
        inputs["weight"],
        eps=eps,
        weight_offset=offset,
        delta_weight=inputs["delta_weight"] if post else None,
    )
    for out, expected in zip(got, oracle(inputs, eps=eps, offset=offset, post=post), strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("post", [False, True], ids=["", "post-norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errs_at_most_twice_as_much_as_torch_plus_an_ulp(dtype: torch.dtype, post: bool) -> None:
    inputs = random_inputs(dtype, width=257)
    hidden, delta, weight, delta_weight = inputs.values()
    got = bypass_norm(
        hidden, delta, KEEP, weight, eps=1e-5, weight_offset=1.0, delta_weight=delta_weight if post else None
    )
    change = torch.nn.functional.rms_norm(delta, (257,), delta_weight + 1, 1e-5) if post else delta
    plain_hidden = torch.where(KEEP.unsqueeze(1), hidden + change, hidden)
    plain = plain_hidden, torch.nn.functional.rms_norm(plain_hidden, (257,), weight + 1, 1e-5)
    for out, torchs, expected in zip(got, plain, oracle(inputs, eps=1e-5, offset=1.0, post=post), strict=True):
        assert out.dtype == dtype
        ulp = torch.finfo(dtype).eps * expected.abs().max()
        error, allowed = ((x.double() - expected).abs().max() for x in (out, torchs))
        assert error <= 2 * allowed + ulp


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bypassed_rows_are_bit_identical(dtype: torch.dtype) -> None:
    inputs = random_inputs(dtype)
    hidden, delta, weight, delta_weight = inputs.values()
    hidden[1, ::2], hidden[4, 3] = -0.0, math.inf
    delta[1], delta[4] = math.nan, -math.inf
    for post in (None, delta_weight):
        hidden_out, normed = bypass_norm(hidden, delta, KEEP, weight, eps=1e-6, delta_weight=post)
        assert torch.equal(bits(hidden_out[[1, 4]]), bits(hidden[[1, 4]]))
        assert normed[1].isfinite().all()
        assert hidden_out[KEEP].isfinite().all()


def test_the_norm_of_a_bypassed_row_is_that_of_the_row() -> None:
    hidden, delta, weight, _ = random_inputs().values()
    _, normed = bypass_norm(hidden, delta, KEEP, weight, eps=1e-6)
    _, entry = bypass_norm(hidden, None, KEEP, weight, eps=1e-6)
    assert torch.equal(normed[~KEEP], entry[~KEEP])
    assert not torch.isclose(normed[KEEP], entry[KEEP]).all(1).any()


@pytest.mark.parametrize("keep", [torch.ones(5, dtype=torch.bool), torch.zeros(5, dtype=torch.bool)], ids=["all", "no"])
def test_the_entry_norm_copies_the_stream_whatever_is_kept(keep: torch.Tensor) -> None:
    hidden, _, weight, _ = random_inputs().values()
    hidden[0, 0] = -0.0
    hidden_out, normed = bypass_norm(hidden, None, keep, weight, eps=1e-6)
    assert torch.equal(bits(hidden_out), bits(hidden))
    assert hidden_out.data_ptr() != hidden.data_ptr()
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(hidden, (33,), weight, 1e-6))


def test_large_values_do_not_overflow_in_half_precision() -> None:
    hidden = torch.full((1, 64), 3e4, dtype=torch.float16)
    keep, weight = torch.tensor([True]), torch.ones(64, dtype=torch.float16)
    _, normed = bypass_norm(hidden, torch.zeros_like(hidden), keep, weight, eps=1e-6)
    assert torch.equal(normed, torch.ones_like(normed))


def test_a_row_of_zeros_gives_zeros() -> None:
    _, normed = bypass_norm(torch.zeros(2, 8), None, KEEP[:2], torch.ones(8), eps=1e-6)
    assert torch.equal(normed, torch.zeros(2, 8))


def test_strided_rows_and_no_rows() -> None:
    hidden, delta, weight, _ = random_inputs().values()
    expected = bypass_norm(hidden, delta, KEEP, weight, eps=1e-6)
    apart = torch.stack([hidden, delta], 1)
    got = bypass_norm(apart[:, 0], apart[:, 1], KEEP, weight, eps=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for out in bypass_norm(hidden[:0], delta[:0], KEEP[:0], weight, eps=1e-6):
        assert out.shape == (0, 33)


def test_inputs_stay_as_they_are() -> None:
    inputs = random_inputs()
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    hidden, delta, weight, delta_weight = inputs.values()
    bypass_norm(hidden, delta, KEEP, weight, eps=1e-6, delta_weight=delta_weight)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in inputs.items())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden": torch.zeros(5, 33, dtype=torch.int32)}, TypeError, "hidden must be torch.float32 or"),
        ({"hidden": torch.zeros(5)}, ValueError, r"hidden must have shape \[any, any\], got \[5\]"),
        ({"hidden": torch.zeros(5, 0)}, ValueError, r"hidden must have at least one column, got \[5, 0\]"),
        ({"hidden": torch.zeros(33, 5).t()}, ValueError, "hidden must be contiguous in its last dimension"),
        ({"delta": torch.zeros(4, 33)}, ValueError, r"delta must have shape \[5, 33\], got \[4, 33\]"),
        ({"delta": torch.zeros(5, 33).half()}, TypeError, "delta must be torch.float32, got torch.float16"),
        ({"keep": torch.ones(5)}, TypeError, "keep must be torch.bool, got torch.float32"),
        ({"keep": torch.ones(3, dtype=torch.bool)}, ValueError, r"keep must have shape \[5\], got \[3\]"),
        ({"weight": torch.zeros(32)}, ValueError, r"weight must have shape \[33\], got \[32\]"),
        ({"weight": [1.0] * 33}, TypeError, "weight must be a tensor, got list"),
        ({"delta_weight": torch.zeros(32)}, ValueError, r"delta_weight must have shape \[33\], got \[32\]"),
        ({"delta": None}, ValueError, "delta_weight must be None where delta is None"),
        ({"eps": -1e-6}, ValueError, "eps must be finite and >= 0, got -1e-06"),
        ({"weight_offset": math.nan}, ValueError, "weight_offset must be finite, got nan"),
        ({"impl": "triton"}, NotImplementedError, "no 'triton' implementation for cpu tensors"),
        ({"impl": "fast"}, ValueError, "impl must be 'auto', 'reference', 'triton' or 'native', got 'fast'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {**random_inputs(), "keep": KEEP, "eps": 1e-6, **changes}
    with pytest.raises(error, match=message):
        bypass_norm(**arguments)
