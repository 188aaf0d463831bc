"""accept_chain: every stated behaviour, and a plain-Python oracle. Its law is tested in test_acceptance_law.py."""

import math
from functools import partial
from math import inf, nan

import pytest
import torch

from viasd_kernels import Status, acceptance, uniforms
from viasd_kernels.acceptance import accept_chain

LARGEST_COIN = 1 - 2.0**-53
COINS = (0.0, 2.0**-53, 0.1, 0.3, 0.5, 0.7, 0.9, LARGEST_COIN)


@pytest.fixture(params=["reference", "native"], autouse=True)
def _implementation(request, monkeypatch):
    """Every test of this file holds for each implementation."""
    monkeypatch.setitem(globals(), "accept_chain", partial(acceptance.accept_chain, impl=request.param))


def verify(blocks, target, coins, *, temperature=1.0, draft=None, check=False):
    """accept_chain on nested lists: ``blocks`` holds each sequence's tokens, root first; returns three lists."""
    row_tokens = torch.tensor([token for block in blocks for token in block], dtype=torch.int64)
    row_start = torch.tensor([0, *(len(block) for block in blocks)]).cumsum(0)
    temperatures = temperature if isinstance(temperature, list) else [temperature] * len(blocks)
    verdict = accept_chain(
        row_tokens,
        torch.as_tensor(target),
        torch.as_tensor(coins, dtype=torch.float64).expand(len(row_tokens)).contiguous(),
        row_start,
        temperature=torch.tensor(temperatures, dtype=torch.float32),
        draft_logits=None if draft is None else torch.as_tensor(draft),
        check=check,
    )
    assert all(field.dtype == torch.int32 for field in verdict)
    return tuple(field.tolist() for field in verdict)


def logs(*probabilities):
    return [math.log(p) if p else -inf for p in probabilities]


def softmax(logits, temperature):
    peak = max(logits)
    weights = [math.exp((value - peak) / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def draw(weights, coin):
    running, total = 0.0, sum(weights)
    for token, weight in enumerate(weights):
        running += weight
        if running > coin * total:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def oracle(block, target, draft, coins, temperature):
    """One sequence, one row at a time, float64: (num_accepted, next_token)."""
    width = len(target[0])
    for depth, token in enumerate(block[1:], start=1):
        if token == -1:
            return depth - 1, _oracle_final(target[depth - 1], coins[0], temperature)
        if temperature == 0:
            if token != target[depth - 1].index(max(target[depth - 1])):
                return depth - 1, _oracle_final(target[depth - 1], coins[0], 0)
            continue
        q = softmax(target[depth - 1], temperature)
        p = [float(i == token) for i in range(width)]
        if draft is not None:
            p = softmax(draft[depth - 1], temperature) + [0.0] * (width - len(draft[depth - 1]))
        if p[token] == 0:
            return depth - 1, draw(q, coins[0])
        if not coins[depth] * p[token] < q[token]:
            return depth - 1, draw([max(0.0, b - a) for a, b in zip(p, q, strict=True)], coins[0])
    return len(block) - 1, _oracle_final(target[len(block) - 1], coins[0], temperature)


def _oracle_final(row, coin, temperature):
    return row.index(max(row)) if temperature == 0 else draw(softmax(row, temperature), coin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("draft_width", [None, 4, 5, 7])
def test_ragged_batches_match_the_oracle(dtype, draft_width):
    generator = torch.Generator().manual_seed(7)
    num, vocabulary = 150, 7
    lengths = torch.randint(0, 6, (num,), generator=generator)
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = int(row_start[-1])
    tokens = torch.randint(-1, 5, (rows,), generator=generator)
    target = torch.randn(rows, vocabulary, generator=generator).to(dtype)
    draft = None if draft_width is None else torch.randn(rows, draft_width, generator=generator).to(dtype)
    coins = torch.rand(rows, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5])[torch.arange(num) % 4]
    verdict = accept_chain(tokens, target, coins, row_start, temperature=temperature, draft_logits=draft)
    seen = set()
    for b in range(num):
        part = slice(int(row_start[b]), int(row_start[b + 1]))
        got = (int(verdict.num_accepted[b]), int(verdict.next_token[b]))
        if part.start == part.stop:
            assert got == (0, -1)
            continue
        proposal = None if draft is None else draft[part].double().tolist()
        block = [0, *tokens[part][1:].tolist()]
        expected = oracle(
            block, target[part].double().tolist(), proposal, coins[part].tolist(), temperature[b].double().item()
        )
        assert got == expected
        seen.add(got[0])
    assert {0, 1, 2} <= seen


def test_a_greedy_row_ignores_its_sampled_batch_mate():
    target = torch.tensor([[1.0, 1.0, 0.0]]).repeat(4, 1)
    for coin in COINS:
        accepted, tokens, _ = verify([[0, 0], [0, 1]], target, coin, temperature=[0.0, 1.0])
        assert (accepted[0], tokens[0]) == (1, 0)
        accepted, tokens, _ = verify([[0, 1], [0, 1]], target, coin, temperature=[0.0, 1.0])
        assert (accepted[0], tokens[0]) == (0, 0)


def test_greedy_reads_neither_coins_nor_draft_rows():
    target = [[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 1.0, 1.0]]
    draft = [[nan] * 3, [inf] * 3, [-inf] * 3]
    assert verify([[9, 1, 0]], target, nan, temperature=0.0, draft=draft) == ([2], [1], [0])
    assert verify([[9, 1, 2]], target, nan, temperature=0.0, draft=draft) == ([1], [0], [0])
    # Nor beside a sequence that samples, accepts id 1 and then draws its bonus.
    proposal = [logs(0.1, 0.8, 0.1), logs(0.8, 0.1, 0.1)]
    mixed = verify([[9, 1, 0], [9, 1]], target + target[:2], 0.0, temperature=[0.0, 1.0], draft=draft + proposal)
    assert mixed == ([2, 1], [1, 0], [0, 0])


def test_sequences_of_one_row_or_none():
    target = torch.tensor([logs(0.5, 0.5), logs(0.25, 0.75)])
    assert verify([[], [0], [], [1], []], target, [0.6, 0.2]) == ([0] * 5, [-1, 1, -1, 0, -1], [0] * 5)
    empty = verify([[], []], torch.zeros(0, 5), [])
    assert empty == ([0, 0], [-1, -1], [0, 0])
    assert verify([], torch.zeros(0, 5), []) == ([], [], [])


def test_a_block_ends_at_its_first_minus_one_whatever_follows():
    target = [logs(0.0, 1.0, 0.0), logs(1.0, 0.0, 0.0), logs(0.0, 0.0, 1.0), [nan] * 3, [nan] * 3]
    for garbage in ([-1, -1], [2, 0], [99, -7]):
        assert verify([[0, 1, 0, -1, *garbage]], [*target, [nan] * 3], 0.5) == ([2], [2], [0])
    assert verify([[0, -1, 5, 5, 5]], target, 0.5) == ([0], [1], [0])


@pytest.mark.parametrize("bad", [3, 4, 2**31 - 1, -2, -(2**31)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_id_out_of_range_is_fatal_and_keeps_what_was_accepted(bad, temperature):
    target = [logs(0.0, 1.0, 0.0)] * 3
    expected = ([1], [-1], [Status.TOKEN_OUT_OF_RANGE])
    assert verify([[0, 1, bad]], target, 0.5, temperature=temperature) == expected
    assert verify([[0, 1, bad]], target, 0.5, temperature=temperature, draft=target) == expected
    with pytest.raises(ValueError, match=r"accept_chain: sequence 0 of 1: TOKEN_OUT_OF_RANGE"):
        verify([[0, 1, bad]], target, 0.5, temperature=temperature, check=True)
    # Behind a rejection nobody looks.
    assert verify([[0, 2, bad]], target, 0.5, temperature=temperature, check=True) == ([0], [1], [0])


BAD_TARGETS = [
    ([nan, 0.0, 0.0], Status.TARGET_NOT_FINITE),
    ([nan, nan, nan], Status.TARGET_NOT_FINITE),
    ([0.0, inf, 0.0], Status.TARGET_NOT_FINITE),
    ([inf, nan, -inf], Status.TARGET_NOT_FINITE),
    ([-inf, -inf, -inf], Status.TARGET_EMPTY),
]


@pytest.mark.parametrize(("row", "bit"), BAD_TARGETS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", [True, False], ids=["sampled proposal", "deterministic proposal"])
def test_a_bad_target_row_is_fatal_where_the_walk_reaches_it(row, bit, temperature, drafted):
    good = logs(0.0, 1.0, 0.0)
    draft = [logs(0.1, 0.8, 0.1)] * 3 if drafted else None

    def outcome(block, rows, **options):
        return verify([block], rows, 0.5, temperature=temperature, draft=draft, **options)

    assert outcome([0, 1, 1], [row, good, good]) == ([0], [-1], [bit])
    assert outcome([0, 1, 1], [good, row, good]) == ([1], [-1], [bit])
    assert outcome([0, 1, 1], [good, good, row]) == ([2], [-1], [bit])
    assert outcome([0, 2, 1], [good, row, row]) == ([0], [1], [0])
    assert outcome([0, 1, -1], [good, good, row]) == ([1], [1], [0])
    with pytest.raises(ValueError, match=bit.name):
        outcome([0, 1, 1], [good, row, good], check=True)


def test_a_wide_row_of_nan_never_becomes_an_id():
    for temperature in (0.0, 1.0):
        accepted, tokens, status = verify([[0]], torch.full((1, 20_000), nan), 0.5, temperature=temperature)
        assert (accepted, tokens, status) == ([0], [-1], [Status.TARGET_NOT_FINITE])


def test_one_bad_sequence_leaves_the_others_alone():
    good = logs(0.0, 1.0, 0.0)
    assert verify([[0, 1], [0, 1], [0, 1]], [good, good, [nan] * 3, good, good, good], 0.5) == (
        [1, 0, 1],
        [1, -1, 1],
        [0, Status.TARGET_NOT_FINITE, 0],
    )
    with pytest.raises(ValueError, match=r"sequence 1 of 3: TARGET_NOT_FINITE \(1 sequence"):
        verify([[0, 1], [0, 1], [0, 1]], [good, good, [nan] * 3, good, good, good], 0.5, check=True)


@pytest.mark.parametrize("row", [[nan, 0.0, 0.0], [nan] * 3, [0.0, inf, 0.0], [-inf] * 3])
def test_a_bad_draft_row_rejects_and_the_target_row_decides(row):
    target = [logs(0.2, 0.3, 0.5)] * 3
    same = target[0]
    # Nothing is subtracted: the whole target row is drawn from.
    for coin, token in [(0.0, 0), (0.25, 1), (0.6, 2)]:
        coins = [coin, 0.0, 0.0]
        found = verify([[0, 1, 1]], target, coins, draft=[row, same, same], check=True)
        assert found == ([0], [token], [Status.DRAFT_INVALID])
        found = verify([[0, 1, 1]], target, coins, draft=[same, row, same])
        assert found == ([1], [token], [Status.DRAFT_INVALID])
    # A draft row without a child to judge is not looked at: the bonus row, and all behind a rejection.
    assert verify([[0, 1, 1]], target, [0.6, 0.0, 0.0], draft=[same, same, row]) == ([2], [2], [0])
    surely_rejected = logs(0.0, 0.7, 0.3)
    rejecting = verify([[0, 1, 1]], target, [0.0, 0.9, 0.0], draft=[surely_rejected, row, row])
    assert rejecting == ([0], [0], [0])


def test_a_token_that_the_proposal_cannot_give_is_rejected():
    target = [logs(0.2, 0.3, 0.5)] * 2
    for draft in ([logs(0.5, 0.0, 0.5)] * 2, [logs(0.4, 0.0, 0.6)] * 2):
        for coin, token in [(0.0, 0), (0.25, 1), (0.6, 2)]:
            assert verify([[0, 1]], target, [coin, 0.0], draft=draft) == ([0], [token], [Status.DRAFT_ZERO])


def test_ids_beyond_the_drafter_vocabulary_have_no_draft_probability():
    target = [logs(0.2, 0.3, 0.5)] * 2
    draft = [logs(0.5, 0.5)] * 2
    assert verify([[0, 2]], target, [0.6, 0.0], draft=draft) == ([0], [2], [Status.DRAFT_ZERO])
    # Id 0 rejected (0.2 < 0.9 * 0.5): the residual is max(0, q - p) = (0, 0, 0.5).
    for coin in COINS:
        assert verify([[0, 0]], target, [coin, 0.9], draft=draft) == ([0], [2], [0])
    assert verify([[0, 2]], target, 0.0, draft=[[nan, 0.0]] * 2) == ([0], [0], [Status.DRAFT_INVALID])


def test_an_empty_residual_falls_back_to_the_target_row():
    # Where q <= p everywhere, a rejection can come from a coin outside [0, 1) only.
    row = [logs(0.25, 0.75)] * 2
    assert verify([[0, 1]], row, [0.2, 1.5], draft=row) == ([0], [0], [Status.RESIDUAL_EMPTY])
    assert verify([[0, 1]], row, [0.3, 1.5], draft=row) == ([0], [1], [Status.RESIDUAL_EMPTY])
    # A deterministic proposal of the only token there is.
    assert verify([[0, 0]], [[0.0], [0.0]], [0.3, 1.5]) == ([0], [0], [Status.RESIDUAL_EMPTY])


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.01, 1.0, 100.0])
def test_masked_tokens_are_never_emitted(coin, temperature):
    masked = [-inf, 0.1, -inf, 0.3, -inf]
    flat = [0.0] * 5
    for block in ([0], [0, 0], [0, 4], [0, 1]):
        rows = len(block)
        for draft in (None, [flat] * rows, [masked] * rows):
            for acceptance_coin in COINS:
                coins = [coin, acceptance_coin][:rows]
                accepted, tokens, _ = verify([block], [masked] * rows, coins, temperature=temperature, draft=draft)
                assert tokens[0] in (1, 3)
                assert accepted[0] == 0 or block[1] in (1, 3)


def test_a_vocabulary_of_one():
    for coin in COINS:
        assert verify([[0, 0, 0]], [[0.3]] * 3, coin) == ([2], [0], [0])
        assert verify([[0, 0, 0]], [[0.3]] * 3, coin, draft=[[-1.0]] * 3) == ([2], [0], [0])


def test_a_one_hot_draft_row_says_the_same_as_none():
    generator = torch.Generator().manual_seed(3)
    rows, vocabulary = 3000, 6
    tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
    target = torch.randn(rows, vocabulary, generator=generator)
    one_hot = torch.full((rows, vocabulary), -inf)
    one_hot.scatter_(1, tokens.roll(-1).unsqueeze(1), 1.7)
    coins = torch.rand(rows, generator=generator, dtype=torch.float64)
    row_start, temperature = torch.arange(0, rows + 1, 3), torch.full((rows // 3,), 0.8)
    first = accept_chain(tokens, target, coins, row_start, temperature=temperature)
    second = accept_chain(tokens, target, coins, row_start, temperature=temperature, draft_logits=one_hot)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first.num_accepted.unique().tolist() == [0, 1, 2]


def test_temperature_is_applied_inside_to_both_rows():
    generator = torch.Generator().manual_seed(4)
    target, draft = torch.randn(400, 5, generator=generator), torch.randn(400, 5, generator=generator)
    tokens = torch.randint(0, 5, (400,), generator=generator)
    coins, row_start = torch.rand(400, generator=generator, dtype=torch.float64), torch.arange(0, 401, 2)
    half, one = torch.full((200,), 0.5), torch.ones(200)
    inside = accept_chain(tokens, target, coins, row_start, temperature=half, draft_logits=draft)
    outside = accept_chain(tokens, target * 2, coins, row_start, temperature=one, draft_logits=draft * 2)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_a_tiny_temperature_is_greedy_and_not_an_overflow():
    target = [[3e38, -3e38, 1.0], [0.0, 1e-6, 0.0]]
    for coin in COINS:
        assert verify([[0, 0]], target, coin, temperature=1e-37) == ([1], [1], [0])


def test_a_sequence_does_not_depend_on_its_batch_mates():
    generator = torch.Generator().manual_seed(5)
    num, length, vocabulary = 60, 4, 9
    target = torch.randn(num, length, vocabulary, generator=generator)
    draft = torch.randn(num, length, vocabulary, generator=generator)
    tokens = torch.randint(0, vocabulary, (num, length), generator=generator)
    coins = uniforms(torch.arange(num), torch.arange(num) % 3, length)
    temperature = torch.tensor([0.0, 1.0, 0.5])[torch.arange(num) % 3]

    def run(order):
        flat = [x[order].flatten(0, 1) for x in (tokens, target, coins, draft)]
        row_start = torch.arange(0, len(order) * length + 1, length)
        return torch.stack(
            accept_chain(*flat[:3], row_start, temperature=temperature[order], draft_logits=flat[3]), dim=1
        )

    together = run(torch.arange(num))
    order = torch.randperm(num, generator=generator)
    assert torch.equal(run(order), together[order])
    for alone in (0, 1, 2, 41):
        assert torch.equal(run(torch.tensor([alone])), together[alone : alone + 1])


def test_vectorised_over_many_short_sequences():
    num = 200_000
    tokens, target = torch.zeros(2 * num, dtype=torch.int32), torch.zeros(2 * num, 4)
    coins = uniforms(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 2 * num).squeeze(0)
    verdict = accept_chain(tokens, target, coins, torch.arange(0, 2 * num + 1, 2), temperature=torch.ones(num))
    assert abs(float(verdict.num_accepted.double().mean()) - 0.25) < 0.01
