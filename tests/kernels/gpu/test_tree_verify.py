"""The tree ops of GPUs, against the reference."""

import pytest
import torch
from on_device import HALF, INTERPRETED, by_kernels, generator, on_device, poison

import viasd_kernels
from viasd_kernels.tree_verify import triton_attention

build_tree = on_device(viasd_kernels.build_tree)
compact_kv = on_device(viasd_kernels.compact_kv, num_written=2)
tree_attention = on_device(viasd_kernels.tree_attention)
verify_tree = on_device(viasd_kernels.verify_tree)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinities that are meant


def random_parents(g, lengths, reach=9):
    return torch.tensor(
        [
            int(torch.randint(max(0, row - reach), row, (), generator=g)) if row else -1
            for length in lengths
            for row in range(length)
        ],
        dtype=torch.int64,
    )


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def same(got, expected):
    return all(torch.equal(a.long(), b.long()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [0, 0], [66, 0, 1, 5, 0], [0, 9, 20]], ids=str)
@by_kernels
def test_build_tree(impl, lengths):
    dtype = torch.int32 if len(lengths) % 2 else torch.int64
    g = generator(len(lengths))
    parents = random_parents(g, lengths)
    anything = torch.randint(-3, 140, parents.shape, generator=g)
    for given in (parents, torch.where(torch.rand(parents.shape, generator=g) < 0.1, anything, parents)):
        for max_rows in (max([*lengths, 1]), 7):
            poison()
            options = {"max_rows": max_rows, "check": False}
            got = build_tree(given.to(dtype), starts_of(lengths).to(dtype), impl=impl, **options)
            assert same(got, build_tree(given, starts_of(lengths), impl="reference", **options))


@by_kernels
def test_build_tree_leaves_out_rows_of_no_sequence_and_parents_of_more_than_32_bits(impl):
    parents = torch.tensor([-1, 0, 2**32, 1, 5, 5])
    got = build_tree(parents, torch.tensor([0, 4, 4]), max_rows=6, impl=impl, check=False)
    expected = build_tree(parents[:4], torch.tensor([0, 4, 4]), max_rows=6, impl="reference", check=False)
    assert same([own[:4] for own in got], expected)


class Attention:
    """Random trees over random contexts; NaN in every slot that no sequence uses, and between the strides."""

    def __init__(self, lengths, contexts, heads, head_dim, dtype, reach=9):
        g, (num_heads, num_kv_heads) = generator(head_dim), heads
        used = [length + context for length, context in zip(lengths, contexts, strict=True)]
        order = torch.randperm(sum(used) + 3, generator=g)[: sum(used)]
        pools = torch.full((2, num_kv_heads, sum(used) + 3, 2 * head_dim), torch.nan).to(dtype)
        pools[:, :, order, head_dim:] = torch.randn(2, num_kv_heads, sum(used), head_dim, generator=g).to(dtype)
        self.pools = [pool[..., head_dim:].transpose(0, 1) for pool in pools]
        self.slots = torch.full((len(lengths), max(used) + 2), -5, dtype=torch.int32)
        for own, slots in zip(self.slots, order.split(used), strict=True):
            own[: len(slots)] = slots
        queries = torch.randn(sum(lengths), 2, num_heads, head_dim, generator=g).to(dtype)
        self.q, self.row_start, self.context_len = queries[:, 1], starts_of(lengths), torch.tensor(contexts)
        parents = random_parents(g, lengths, reach)
        self.ancestors = build_tree(parents, self.row_start, max_rows=max(lengths), impl="reference").ancestors

    def run(self, impl, dtype=None, **options):
        q, k_pool, v_pool = (x.to(dtype or x.dtype) for x in (self.q, *self.pools))
        places = (self.slots, self.context_len, self.row_start, self.ancestors)
        return tree_attention(q, k_pool, v_pool, *places, scale=q.shape[2] ** -0.5, impl=impl, **options)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 0.7}, {"window": 4}, {"window": 1, "soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize(
    ("lengths", "contexts", "heads", "head_dim"),
    [
        ([5, 0, 1, 3], [7, 3, 70, 0], (4, 2), 16),
        ([1], [0], (1, 1), 8),
        ([1, 1, 1], [40, 5, 129], (3, 1), 20),
        ([0, 66], [3, 150], (2, 2), 16),
        ([9], [300], (7, 1), 5),
    ],
    ids=["ragged", "one row alone", "one row each", "two words", "seven heads to a key"],
)
def test_tree_attention(lengths, contexts, heads, head_dim, options):
    dtype = torch.float16 if head_dim == 20 else torch.float32
    case = Attention(lengths, contexts, heads, head_dim, dtype)
    poison()
    got = case.run("triton", **options).double()
    exact = case.run("reference", torch.float64, **options)
    error = (case.run("reference", **options).double() - exact).abs().max()
    assert (got - exact).abs().max() <= 2 * error + 4 * torch.finfo(dtype).eps * (1 + exact.abs().max())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_tree_attention_in_the_shape_of_a_large_model(dtype):
    contexts = [40, 3] if INTERPRETED else [3000, 70]
    case = Attention([9, 64], contexts, (32, 8), 128, dtype)
    got, exact = case.run("triton").double(), case.run("reference", torch.float64)
    error = (case.run("reference").double() - exact).abs().max()
    assert (got - exact).abs().max() <= 2 * error + 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("programs", [1, 4, 10**6])
def test_tree_attention_in_any_number_of_splits(programs, monkeypatch):
    monkeypatch.setattr(triton_attention, "PROGRAMS", programs)
    case = Attention([2, 9, 0], [200, 0, 70], (4, 2), 16, torch.float32)
    for window in (None, 3):
        poison()
        assert torch.allclose(case.run("triton", window=window), case.run("reference", window=window), atol=1e-6)


def test_tree_attention_writes_rows_of_sequences_only_and_takes_no_float64():
    case = Attention([2, 4], [9, 0], (2, 1), 16, torch.float32)
    expected = case.run("triton")
    case.q = torch.cat([case.q, torch.full_like(case.q[:2], torch.nan)])
    case.ancestors = torch.cat([case.ancestors, case.ancestors[:2]])
    assert torch.equal(case.run("triton", check=False)[:6], expected)
    with pytest.raises(NotImplementedError, match="available: reference"):
        case.run("triton", torch.float64)


def moves(seed, ascending):
    """Sequences of up to 5 rows in caches of 12 positions; the rows of a path ascend, or are any."""
    g, lengths = generator(seed), [5, 1, 0, 4]
    paths = [torch.randint(max(length, 1), (length,), generator=g) for length in lengths]
    if ascending:
        paths = [path.sort().values.maximum(torch.arange(len(path))) for path in paths]
    num_accepted = torch.tensor([int(torch.randint(max(length, 1), (), generator=g)) for length in lengths])
    return torch.cat(paths), num_accepted, starts_of(lengths), torch.tensor([7, 11, 3, 0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("ascending", [True, False])
@by_kernels
def test_compact_kv(impl, dtype, ascending):
    for seed in range(3):
        cache = torch.randint(-99, 99, (2, 4, 5, 12, 2 * 130), generator=generator(seed)).to(dtype)
        k, v = cache[..., 130:].transpose(2, 3)
        want_k, want_v = k.clone(), v.clone()
        version = k._version
        compact_kv(want_k, want_v, *moves(seed, ascending), impl="reference")
        compact_kv(k, v, *moves(seed, ascending), impl=impl)
        assert torch.equal(k, want_k)
        assert torch.equal(v, want_v)
        assert k._version > version


@by_kernels
def test_compact_kv_leaves_sequences_as_they_are_whose_moves_lead_astray(impl):
    path, num_accepted, row_start, start = moves(1, True)
    cache = torch.randn(4, 12, 2, 3, generator=generator(0))
    for wrong in (
        (path, num_accepted, row_start, start + 20),
        (path, num_accepted, row_start, start - 20),
        (path, num_accepted + 5, row_start, start),
        (path, num_accepted - 5, row_start, start),
        (path + 5, num_accepted, row_start, start),
        (path - 5, num_accepted, row_start, start),
    ):
        k, v = cache.clone(), cache.clone()
        compact_kv(k, v, *wrong, impl=impl, check=False)
        assert torch.equal(k, cache)
        assert torch.equal(v, cache)


RULES = ["deterministic", "without_replacement", "with_replacement"]
LAST_COIN = 1 - 2.0**-53


def trees(seed, width, proposal, strided=False):
    """Ragged trees of likely tokens, duplicates among them; now and then unused and pruned rows, masks, broken rows."""
    g = generator(seed)
    lengths = torch.randint(0, 10, (5,), generator=g).tolist()
    lengths[seed % 5], lengths[-1] = 9, lengths[-1] + 1
    row_start, num_rows = starts_of(lengths), sum(lengths)
    parents = random_parents(g, lengths, reach=4)
    if seed % 4 == 1:
        parents[torch.rand(num_rows, generator=g) < 0.1] = -1
    tree = build_tree(parents, row_start, max_rows=max(lengths), impl="reference", check=False)
    full = torch.randn(num_rows, width, generator=g) * 2
    if seed % 3 == 1:
        full[torch.rand(full.shape, generator=g) < 0.4] = -torch.inf
        full[:, 0] = 1.0
    if seed % 7 == 5:
        full = full.round()  # ties
    draft = full.clamp(min=-3) + torch.randn(full.shape, generator=g)
    if seed % 4 == 2:
        draft = full.clone()  # p == q
    if seed % 5 == 3:
        draft[:] = -torch.inf  # one-hot
        draft[torch.arange(num_rows), full.argmax(-1)] = 3.0
    draft = draft[:, : max(1, width - seed % 3)].contiguous()
    firsts = torch.repeat_interleave(row_start[:-1], torch.tensor(lengths))
    likely = draft.topk(min(3, draft.shape[1])).indices[firsts + parents.clamp(min=0)]
    tokens = likely.gather(1, torch.randint(0, likely.shape[1], (num_rows, 1), generator=g)).squeeze(1)
    if seed % 4 == 3:
        tokens[torch.rand(num_rows, generator=g) < 0.1] = -1
        tokens[torch.rand(num_rows, generator=g) < 0.05] = width
    for logits in (full, draft):
        if seed % 6 == 4:
            broken = torch.rand(num_rows, generator=g) < 0.2
            logits[broken] = (torch.nan, torch.inf, -torch.inf)[seed // 6 % 3]
    if strided:
        full, draft = (torch.cat([own, own], 1)[:, : own.shape[1]] for own in (full, draft))
    coins = torch.rand(num_rows, generator=g, dtype=torch.float64) ** 0.5
    temperature = torch.tensor([0.0, 0.7, 1.3])[torch.randint(3, (5,), generator=g)]
    temperature[seed % 5] = 1.0
    options = {"temperature": temperature, "proposal": proposal, "check": False}
    if proposal != "deterministic":
        options["draft_logits"] = draft
    return (tree, tokens, full, coins, row_start), options


@pytest.mark.parametrize("width", [1, 7, 1025, 8193])
@pytest.mark.parametrize("proposal", RULES)
@by_kernels
def test_verify_tree(impl, width, proposal):
    close, accepted, seen = 0, 0, 0
    for seed in range(4 if width > 1000 else 20 if width > 1 else 4):
        (tree, tokens, full, coins, row_start), options = trees(seed, width, proposal, strided=seed % 2 == 1)

        def verify(impl, coins, inputs=(tree, tokens, full), row_start=row_start, options=options):
            return verify_tree(*inputs, coins, row_start, impl=impl, **options)

        poison()
        got, expected = verify(impl, coins), verify("reference", coins)
        if not same(got, expected):  # only where a coin lies within rounding of a decision
            nudged = [verify("reference", (coins * (1 + e)).clamp(max=LAST_COIN)) for e in (-1e-6, 1e-6)]
            assert any(same(got, other) for other in nudged)
            close += 1
        accepted += int(expected.num_accepted.sum())
        for status in expected.status.tolist():
            seen |= status
    assert close <= 1
    assert accepted
    assert width != 7 or seen == 64 | 3 | (0 if proposal == "deterministic" else 8 | 16)


@by_kernels
def test_verify_tree_from_given_argmax(impl):
    for seed in range(8):
        (tree, tokens, full, coins, row_start), options = trees(seed, 7, "deterministic")
        argmax = full.nan_to_num(0).argmax(-1)
        argmax[seed::11] = (-1, 7)[seed % 2]
        for logits in (full, None):
            for temperature in (options["temperature"], torch.zeros(5)):
                options |= {"temperature": temperature, "full_argmax": argmax}
                got, expected = (
                    verify_tree(tree, tokens, logits, coins, row_start, impl=one, **options)
                    for one in (impl, "reference")
                )
                assert same(got, expected)


@pytest.mark.parametrize("coin", [0.0, LAST_COIN])
@pytest.mark.parametrize("proposal", RULES)
@by_kernels
def test_masked_tokens_are_never_emitted_at_any_coin(impl, coin, proposal):
    for seed in (1, 4, 7):
        (tree, tokens, full, coins, row_start), options = trees(seed, 20, proposal)
        verdict = verify_tree(tree, tokens, full, torch.full_like(coins, coin), row_start, impl=impl, **options)
        for b, (accepted, token) in enumerate(zip(verdict.num_accepted, verdict.next_token.tolist(), strict=True)):
            if token >= 0:
                assert full[row_start[b] + verdict.path[row_start[b] + accepted], token] > -torch.inf
            else:
                assert row_start[b] == row_start[b + 1] or verdict.status[b] & 7


@pytest.mark.parametrize("proposal", RULES)
@by_kernels
def test_verify_tree_at_temperatures_whose_inverse_is_no_number(impl, proposal):
    for seed in range(3):
        (tree, tokens, full, coins, row_start), options = trees(seed, 7, proposal)
        options["temperature"] = torch.full_like(options["temperature"], 1e-39)
        got, expected = (
            verify_tree(tree, tokens, full, coins, row_start, impl=way, **options) for way in (impl, "reference")
        )
        assert same(got, expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@by_kernels
def test_verify_tree_of_half_precision(impl, dtype):
    (tree, tokens, full, coins, row_start), options = trees(2, 40, "without_replacement")
    options["draft_logits"] = options["draft_logits"].to(dtype)
    got, expected = (
        verify_tree(tree, tokens, full.to(dtype), coins, row_start, impl=one, **options) for one in (impl, "reference")
    )
    assert same(got, expected)


@by_kernels
def test_verify_tree_of_no_rows_and_one_row_each(impl):
    (_, tokens, full, coins, _), _ = trees(2, 40, "without_replacement")
    alone = build_tree(torch.full((3,), -1), torch.arange(4), max_rows=1, impl="reference")
    options = {"temperature": torch.tensor([0.0, 1.0, 2.0])}
    got, expected = (
        verify_tree(alone, tokens[:3], full[:3], coins[:3], torch.arange(4), impl=one, **options)
        for one in (impl, "reference")
    )
    assert same(got, expected)
    empty = [own[:0] for own in (tokens, full, coins)]
    none = verify_tree(
        type(alone)(*(own[:0] for own in alone)), *empty, torch.zeros(4, dtype=torch.int64), impl=impl, **options
    )
    assert [own.tolist() for own in none] == [[], [0] * 3, [-1] * 3, [0] * 3]


def test_verify_tree_leaves_float64_to_the_reference():
    (tree, tokens, full, coins, row_start), options = trees(2, 40, "deterministic")
    with pytest.raises(NotImplementedError, match="no 'triton' implementation"):
        verify_tree(tree, tokens, full.double(), coins, row_start, impl="triton", **options)
