"""The coins and the one sampling rule."""

import pytest
import torch
from scipy import stats

from viasd_kernels import draw_from_weights, uniforms

LARGEST_COIN = 1 - 2.0**-53
MASK = 0xFFFFFFFF
implementations = pytest.mark.parametrize("impl", ["reference", "native"])


def philox(counter, key):
    """Philox4x32-10 in plain Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def coin(seed, draw, slot):
    """The coin of (seed, draw, slot) by its definition."""
    words = philox((draw & MASK, (draw >> 32) & MASK, slot // 2, 0), (seed & MASK, (seed >> 32) & MASK))
    high, low = words[:2] if slot % 2 == 0 else words[2:]
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_oracle_gives_the_published_vectors(counter, key, expected):
    assert philox(counter, key) == expected


@implementations
def test_zero_seed_and_draw_give_the_published_vector(impl):
    coins = uniforms(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 2, impl=impl)
    expected = [
        ((0x6627E8D5 >> 5 << 26) | 0xE169C58D >> 6) / 2**53,
        ((0xBC57AC4C >> 5 << 26) | 0x9B00DBD8 >> 6) / 2**53,
    ]
    assert coins[0].tolist() == expected


@implementations
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_uniforms_match_their_definition(n, impl):
    seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63), 0x123456789ABCDEF0]
    draws = [0, 2**32, 7, -1, 2**33 + 5, 3, 2**63 - 1]
    coins = uniforms(torch.tensor(seeds), torch.tensor(draws), n, impl=impl)
    assert coins.dtype == torch.float64
    assert coins.tolist() == [[coin(s, d, i) for i in range(n)] for s, d in zip(seeds, draws, strict=True)]


@implementations
def test_uniforms_do_not_depend_on_batch_mates_or_on_n(impl):
    seeds, draws = torch.arange(50) * 977, torch.arange(50) % 7
    coins = uniforms(seeds, draws, 9, impl=impl)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(uniforms(seeds[order], draws[order], 9, impl=impl), coins[order])
    assert torch.equal(uniforms(seeds[3:4], draws[3:4], 9, impl=impl), coins[3:4])
    assert torch.equal(uniforms(seeds, draws, 4, impl=impl), coins[:, :4])


def test_uniforms_are_uniform_and_all_different():
    seeds = torch.arange(500).repeat_interleave(40)
    draws = torch.arange(40).repeat(500)
    coins = uniforms(seeds, draws, 11)
    assert coins.unique().numel() == coins.numel()
    assert float(coins.min()) >= 0
    assert float(coins.max()) < 1
    counts = torch.bincount((coins.flatten() * 256).long(), minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-9
    for first, second in [(coins[:, 0], coins[:, 1]), (coins[:-1, 0], coins[1:, 0]), (coins[:-40, 3], coins[40:, 3])]:
        pairs = torch.bincount((first * 16).long() * 16 + (second * 16).long(), minlength=256)
        assert stats.chisquare(pairs.numpy()).pvalue > 1e-9


def test_uniforms_have_53_bits():
    integers = (uniforms(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), 3) * 2**53).long().flatten()
    assert torch.equal(integers.double() / 2**53, uniforms(torch.arange(2000), torch.zeros(2000).long(), 3).flatten())
    frequency = torch.stack([(integers >> bit & 1).double().mean() for bit in range(53)])
    assert float((frequency - 0.5).abs().max()) < 6.5 * 0.5 / integers.numel() ** 0.5


@implementations
@pytest.mark.parametrize(("batch", "n"), [(0, 3), (2, 0), (0, 0)])
def test_uniforms_of_nothing(batch, n, impl):
    nothing = torch.zeros(batch, dtype=torch.int64)
    assert uniforms(nothing, nothing, n, impl=impl).shape == (batch, n)


def test_uniforms_refuse_wrong_arguments():
    two, three = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"seeds and draws must both be \[B\], got \[2\], \[3\]"):
        uniforms(two, three, 1)
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        uniforms(two, two, -1)
    with pytest.raises(NotImplementedError, match="no 'triton' implementation for cpu tensors"):
        uniforms(two, two, 1, impl="triton")


@implementations
def test_uniforms_take_any_stride_and_int32(impl):
    seeds, draws = torch.arange(12).reshape(6, 2)[:, 1], torch.arange(6, dtype=torch.int32)
    assert torch.equal(uniforms(seeds, draws, 3, impl=impl), uniforms(seeds.contiguous(), draws.long(), 3))


def draw(weights, *coins):
    table = torch.tensor(weights).expand(len(coins), -1)
    return draw_from_weights(table, torch.tensor(coins, dtype=torch.float64)).tolist()


def test_a_draw_is_the_first_id_whose_running_sum_exceeds_the_coin():
    assert draw([1.0, 2.0, 1.0], 0.0, 0.2499, 0.25, 0.7499, 0.75, LARGEST_COIN) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("weights", [[0.0, 0.0, 3.0, 0.0, 1.0, 0.0], [0.0, 1e-30, 1.0, 0.0], [0.0, 1.0, 1e-30, 0.0]])
def test_an_id_without_mass_is_never_drawn(weights):
    grid = [0.0, 2.0**-53, *(i / 64 for i in range(1, 64)), LARGEST_COIN]
    assert all(weights[i] > 0 for i in draw(weights, *grid))


def test_rounding_that_leaves_no_id_gives_the_highest_with_mass():
    # A total below the smallest normal number: coin * total rounds up to the total itself.
    weights = torch.tensor([[0.0, 5e-324, 0.0]], dtype=torch.float64)
    assert draw_from_weights(weights, torch.tensor([LARGEST_COIN], dtype=torch.float64)).tolist() == [1]


def test_a_row_without_mass_gives_minus_one():
    assert draw([0.0, 0.0], 0.0, 0.5) == [-1, -1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_running_sums_are_float64_whatever_the_weights(dtype):
    # 4,096 ones after 4,096 twos: a 16-bit running sum would stall long before its end.
    weights = torch.cat([torch.full((4096,), 2.0), torch.ones(4096)]).to(dtype).unsqueeze(0)
    coins = torch.tensor([0.0, 1 / 3, 2 / 3, 5 / 6, LARGEST_COIN], dtype=torch.float64)
    assert draw_from_weights(weights.expand(5, -1), coins).tolist() == [0, 2048, 4096, 6144, 8191]


def test_draws_follow_their_weights():
    weights = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
    coins = uniforms(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64), 1).squeeze(1)
    counts = torch.bincount(draw_from_weights(weights.expand(200_000, -1), coins), minlength=5)
    kept = weights > 0
    expected = (weights.double() / weights.double().sum() * 200_000)[kept]
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-9


def test_uniforms_do_not_break_a_compiled_graph():
    seeds, draws = torch.arange(3), torch.tensor([0, 5, 9])
    compiled = torch.compile(lambda s, d: 2 * uniforms(s, d, 4), fullgraph=True, backend="eager")
    assert torch.equal(compiled(seeds, draws), 2 * uniforms(seeds, draws, 4))
