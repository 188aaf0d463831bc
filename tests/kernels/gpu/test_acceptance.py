"""The acceptance ops of GPUs, against the reference."""

import pytest
import torch
from on_device import DEVICE, HALF, by_kernels, generator, on_device, on_gpu_only, poison

import viasd_kernels
from viasd_kernels import Gate

accept_chain = on_device(viasd_kernels.accept_chain)
acceptance_stats = on_device(viasd_kernels.acceptance_stats)
gate_tiers = on_device(viasd_kernels.gate_tiers)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinities that are meant

VOCABULARIES = [1, 7, 8193]


def chains(seed, width, draft_width=None, strided=False):
    """Random chains: lengths 0 to 4, likely tokens, -1 here and there, mixed temperatures; now and then broken rows."""
    g = generator(seed)
    lengths = torch.randint(0, 5, (4,), generator=g)
    lengths[seed % 4] = 3
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_rows = int(lengths.sum())
    target = torch.randn(num_rows, width, generator=g) * 2
    draft = (target + torch.randn(num_rows, width, generator=g))[:, : draft_width or width].contiguous()
    if seed % 5 == 1:
        target[seed % num_rows] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
    if seed % 5 == 2:
        draft[seed % num_rows] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
    if seed % 5 == 3:
        target[:, :: 2 + seed % 2] = -torch.inf  # a mask
        target[:, -1] = 1.0
    if seed % 7 == 4:
        draft = target[:, : draft_width or width].clone()
    if seed % 7 == 5:
        target = target.round()  # ties
    tokens = torch.randint(0, width, (num_rows,), generator=g)
    likely = draft.nan_to_num(-9.0, 9.0, -9.0).argmax(-1)
    tokens[1:] = torch.where(torch.rand(num_rows - 1, generator=g) < 0.7, likely[:-1], tokens[1:])
    if seed % 6 == 1:
        tokens[1] = -1
    if seed % 11 == 3:
        tokens[-1] = width
    temperature = torch.rand(4, generator=g) * 2
    temperature[seed % 4] = 0.0
    uniforms = 0.999 * torch.rand(num_rows, generator=g, dtype=torch.float64)
    uniforms[1 :: 4 + seed % 3] = 0.0
    if strided:
        target, draft = (torch.cat([own, own], 1)[:, : own.shape[1]] for own in (target, draft))
    return tokens, target, draft, uniforms, row_start, temperature


def same(got, expected):
    return all(torch.equal(a.long(), b.long()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("width", VOCABULARIES)
@pytest.mark.parametrize("proposal", ["drawn", "deterministic", "narrow"])
@by_kernels
def test_accept_chain(impl, width, proposal):
    close = 0
    for seed in range(3 if width > 1000 else 8):
        narrow = max(1, width - 2) if proposal == "narrow" else None
        tokens, target, draft, uniforms, row_start, temperature = chains(seed, width, narrow, strided=seed % 2 == 1)
        options = {"temperature": temperature, "draft_logits": None if proposal == "deterministic" else draft}
        options["check"] = False
        poison()
        got = accept_chain(tokens, target, uniforms, row_start, impl=impl, **options)
        expected = accept_chain(tokens, target, uniforms, row_start, impl="reference", **options)
        if not same(got, expected):  # only where a coin lies within rounding of a decision
            nudged = [
                accept_chain(
                    tokens, target, (uniforms + e).clamp(0, 1 - 2.0**-53), row_start, impl="reference", **options
                )
                for e in (-1e-6, 1e-6)
            ]
            assert any(same(got, other) for other in nudged)
            close += 1
    assert close <= 2


@pytest.mark.parametrize("width", VOCABULARIES)
@pytest.mark.parametrize("undershoot", [False, True])
def test_acceptance_stats(width, undershoot):
    for seed in range(2 if width > 1000 else 6):
        tokens, target, draft, _, _, _ = chains(seed, width, max(1, width - 1), strided=seed % 2 == 1)
        tokens = tokens.clamp(-1, width - 1)
        temperature = torch.rand(len(tokens), generator=generator(seed)) * 2
        temperature[0] = 0.0
        options = {"temperature": temperature, "undershoot": undershoot, "alpha": 0.4, "beta": 0.6}
        poison()
        got = acceptance_stats(draft, target, tokens, impl="triton", **options)
        same_dtype = acceptance_stats(draft, target, tokens, impl="reference", **options)
        exact = acceptance_stats(draft.double(), target.double(), tokens, impl="reference", **options)
        assert torch.equal(got.target_argmax, same_dtype.target_argmax)
        for name in got._fields:
            one, allowed, truth = (getattr(own, name).double() for own in (got, same_dtype, exact))
            finite = truth.isfinite() & one.isfinite()
            assert torch.equal(one.isnan(), truth.isnan()), name
            # What is infinite is so in float32, where the smallest probabilities are 0.
            assert torch.equal(one.isinf(), allowed.isinf()), name
            error = (one - truth)[finite].abs()
            limit = 2 * (allowed - truth)[finite].abs().max() if finite.any() else 0.0
            assert (error <= limit + 4e-6 * (1 + truth[finite].abs())).all(), name


@pytest.mark.parametrize("width", VOCABULARIES)
@pytest.mark.parametrize("criterion", ["ratio", "tv", "kl"])
def test_gate_tiers(width, criterion):
    low, high = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.5, 0.6, 0.7, 0.8])
    gate = Gate(criterion, high, low) if criterion == "ratio" else Gate(criterion, low, high)
    seen = set()
    for seed in range(2 if width > 1000 else 10):
        tokens, slim, draft, uniforms, row_start, temperature = chains(seed, width, strided=seed % 2 == 1)
        options = {"gate": gate, "temperature": temperature, "check": False}
        options["draft_logits"] = None if criterion == "ratio" and seed % 2 else draft
        poison()
        got = gate_tiers(tokens, slim, uniforms, row_start, impl="triton", **options)
        expected = gate_tiers(tokens, slim, uniforms, row_start, impl="reference", **options)
        assert same(got[:-1], expected[:-1])
        for name in got.stats._fields:
            one, other = getattr(got.stats, name).double(), getattr(expected.stats, name).double()
            assert torch.allclose(one, other, atol=2e-5, rtol=1e-4, equal_nan=True), name
        seen |= set(got.regions.tolist())
    assert width != 7 or {0, 1, 2} <= seen


@pytest.mark.parametrize("coin", [0.0, 1 - 2.0**-53])
def test_masked_tokens_are_never_emitted_at_any_coin(coin):
    for seed in range(6):
        tokens, target, draft, uniforms, row_start, temperature = chains(5 * seed + 3, 40)
        assert (target == -torch.inf).any()
        options = {"temperature": temperature + 0.1, "draft_logits": draft, "check": False}
        got = accept_chain(tokens, target, torch.full_like(uniforms, coin), row_start, impl="triton", **options)
        for b, (accepted, token) in enumerate(zip(got.num_accepted.tolist(), got.next_token.tolist(), strict=True)):
            row = int(row_start[b]) + accepted
            assert token == -1 or target[row, token] > -torch.inf
            assert (token == -1) == (row_start[b] == row_start[b + 1] or bool(got.status[b] & 7))


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45])
@by_kernels
def test_temperatures_whose_inverse_is_no_number(impl, temperature):
    for seed in range(4):
        tokens, target, draft, uniforms, row_start, _ = chains(seed, 7)
        options = {"temperature": torch.full((4,), temperature), "check": False}
        for own in (None, draft):
            got, expected = (
                accept_chain(tokens, target, uniforms, row_start, impl=way, draft_logits=own, **options)
                for way in (impl, "reference")
            )
            assert same(got, expected)
        if impl == "triton":
            options["gate"] = Gate("ratio", torch.full((4,), 0.6), torch.full((4,), 0.3))
            got, expected = (
                gate_tiers(tokens, target, uniforms, row_start, impl=way, **options) for way in (impl, "reference")
            )
            assert same(got[:-1], expected[:-1])


def test_one_row_each_and_no_rows():
    target = torch.randn(3, 50, generator=generator(0))
    row_start = torch.arange(4)
    options = {"temperature": torch.tensor([0.0, 1.0, 2.0]), "check": False}
    uniforms = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    for impl in ("triton", "reference"):
        got = accept_chain(torch.tensor([1, 2, 3]), target, uniforms, row_start, impl=impl, **options)
        assert got.num_accepted.tolist() == [0, 0, 0]
        if impl == "triton":
            first = got
    assert same(first, got)
    empty = accept_chain(
        torch.empty(0, dtype=torch.int64),
        target[:0],
        uniforms[:0],
        torch.zeros(4, dtype=torch.int64),
        impl="triton",
        **options,
    )
    assert [own.tolist() for own in empty] == [[0] * 3, [-1] * 3, [0] * 3]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@by_kernels
def test_half_precision_is_converted_right_after_the_load(impl, dtype):
    tokens, target, draft, uniforms, row_start, temperature = chains(8, 300)
    target, draft = target.to(dtype), draft.to(dtype)
    options = {"temperature": temperature, "draft_logits": draft, "check": False}
    got = accept_chain(tokens, target, uniforms, row_start, impl=impl, **options)
    assert same(got, accept_chain(tokens, target, uniforms, row_start, impl="reference", **options))


def test_float64_is_left_to_the_reference():
    tokens, target, _, uniforms, row_start, temperature = chains(9, 7)
    message = f"no 'triton' implementation for {DEVICE.type} tensors; available: reference"
    with pytest.raises(NotImplementedError, match=message):
        accept_chain(tokens, target.double(), uniforms, row_start, temperature=temperature, impl="triton")


@on_gpu_only
@by_kernels
def test_rows_that_32_bits_cannot_address(impl):
    """15,408 rows of 151,936 logits are more than 2^31; the last ones are those of a small batch."""
    rows, width = 15_408, 151_936
    target = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
    target[-4:] = (2 * torch.randn(4, width, generator=generator(0))).to(DEVICE)
    tokens = torch.zeros(rows, dtype=torch.int64)
    tokens[-3:] = target[-4:-1].argmax(-1).cpu()
    coins = torch.full((rows,), 0.01, dtype=torch.float64)
    row_start = torch.tensor([0, rows - 4, rows])
    options = {"temperature": torch.tensor([1.0, 0.7]), "check": False}
    got = accept_chain(tokens, target, coins, row_start, impl=impl, **options)
    alone = {**options, "temperature": options["temperature"][1:]}
    small = (tokens[-4:], target[-4:].cpu(), coins[-4:], torch.tensor([0, 4]))
    assert same([own[1:] for own in got], accept_chain(*small, impl="reference", **alone))
    if impl == "triton":
        stats = acceptance_stats(target, target, tokens, temperature=torch.ones(rows), impl=impl)
        assert torch.equal(stats.target_argmax[-4:], target[-4:].argmax(-1).int().cpu())
        assert stats.kl_draft_target.abs().max() < 1e-5
