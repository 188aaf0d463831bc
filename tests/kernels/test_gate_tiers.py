"""gate_tiers: the walk, every region under every criterion, and what ends it."""

from functools import partial
from math import exp, inf, log, nan

import pytest
import torch
from scipy import stats as scipy_stats

from viasd_kernels import Status, acceptance, uniforms
from viasd_kernels.acceptance import Gate, Region, acceptance_stats, gate_tiers

pytestmark = pytest.mark.usefixtures("one_thread")

LARGEST_COIN = 1 - 2.0**-53
COINS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, LARGEST_COIN)
NONE, A, B, C = (int(region) for region in Region)
DEFAULTS = {"ratio": (0.60, 0.30), "tv": (0.2, 0.6), "kl": (0.1, 1.0)}


@pytest.fixture(params=["reference", "native"], autouse=True)
def _implementation(request, monkeypatch):
    """Every test of this file holds for each implementation."""
    for op in (acceptance.gate_tiers, acceptance.acceptance_stats):
        monkeypatch.setitem(globals(), op.__name__, partial(op, impl=request.param))


def logs(*probabilities):
    return [log(p) if p else -inf for p in probabilities]


def walk(blocks, slim, coins, *, criterion="ratio", thresholds=None, temperature=1.0, draft=None, check=False):
    """gate_tiers on nested lists, root first in each block."""
    row_tokens = torch.tensor([token for block in blocks for token in block], dtype=torch.int64)
    accept, escalate = thresholds or DEFAULTS[criterion]
    temperatures = temperature if isinstance(temperature, list) else [temperature] * len(blocks)
    num = len(blocks)
    verdict = gate_tiers(
        row_tokens,
        torch.as_tensor(slim),
        torch.as_tensor(coins, dtype=torch.float64).expand(len(row_tokens)).contiguous(),
        torch.tensor([0, *(len(block) for block in blocks)]).cumsum(0),
        gate=Gate(criterion, torch.full((num,), accept), torch.full((num,), escalate)),
        temperature=torch.tensor(temperatures, dtype=torch.float32),
        draft_logits=None if draft is None else torch.as_tensor(draft),
        check=check,
    )
    assert verdict.tokens.dtype == verdict.num_emitted.dtype == verdict.status.dtype == torch.int32
    assert verdict.regions.dtype == torch.int8
    assert verdict.escalate.dtype == torch.bool
    return verdict


def lists(verdict):
    return tuple(field.tolist() for field in verdict[:5])


SLIM = logs(0.5, 0.25, 0.09, 0.16)  # ratios 1, 0.5, 0.18, 0.32: regions A, B, C, B at the default thresholds


@pytest.mark.parametrize(("token", "region"), [(0, A), (1, B), (2, C), (3, B)])
def test_every_region_is_reached_at_the_default_ratios(token, region):
    # The row's own coin (0.6) draws id 1 from the slim row in region B, the root's (0.8) the bonus, id 2.
    tokens, regions, emitted, escalate, status = lists(walk([[7, token]], [SLIM, SLIM], [0.8, 0.6]))
    assert regions == [NONE, region]
    assert tokens == {0: [0, 2], 1: [1, 2], 2: [-1, -1], 3: [1, -1]}[token]
    assert emitted == [{0: 2, 1: 2, 2: 0, 3: 1}[token]]
    assert escalate == [region == C]
    assert status == [0]


@pytest.mark.parametrize("threshold", ["accept", "escalate"])
def test_a_ratio_at_the_threshold_is_on_the_keeping_side(threshold):
    half = float(walk([[0, 1]], [[0.0, log(0.5)]] * 2, 0.5).stats.ratio[0])
    thresholds = (half, 0.1) if threshold == "accept" else (0.9, half)
    regions = walk([[0, 1]], [[0.0, log(0.5)]] * 2, 0.5, thresholds=thresholds).regions.tolist()
    assert regions == [NONE, A if threshold == "accept" else B]


@pytest.mark.parametrize(
    ("criterion", "distance"),
    [("tv", lambda p: abs(p - 0.5)), ("kl", lambda p: p * log(2 * p) + (1 - p) * log(2 - 2 * p))],
)
def test_every_region_by_distance(criterion, distance):
    thresholds = (distance(0.7), distance(0.9))
    # The proposal moves away from slim's even row; region B's draw (coin 0.7) is id 1, the drafted token.
    for p, region in [(0.5, A), (0.69, A), (0.71, B), (0.89, B), (0.91, C), (0.999, C)]:
        verdict = walk(
            [[0, 1]], [logs(0.5, 0.5)] * 2, 0.7, criterion=criterion, thresholds=thresholds, draft=[logs(p, 1 - p)] * 2
        )
        assert verdict.regions.tolist() == [NONE, region]
        assert verdict.tokens.tolist() == ([-1, -1] if region == C else [1, 1])
        assert verdict.escalate.tolist() == [region == C]


@pytest.mark.parametrize("criterion", ["tv", "kl"])
def test_a_distance_at_the_threshold_is_on_the_keeping_side(criterion):
    rows = {"slim": [logs(0.5, 0.5)] * 2, "draft": [logs(0.8, 0.2)] * 2}
    stats = walk([[0, 0]], coins=0.5, criterion=criterion, **rows).stats
    distance = float((stats.tv if criterion == "tv" else stats.kl_draft_target)[0])
    for thresholds, region in [((distance, 0.9), A), ((0.0, distance), B)]:
        found = walk([[0, 0]], coins=0.5, criterion=criterion, thresholds=thresholds, **rows)
        assert found.regions.tolist() == [NONE, region]


def test_kl_is_of_the_proposal_from_the_slim_row():
    draft, slim = [logs(0.7, 0.3, 0.0)] * 2, [logs(0.4, 0.4, 0.2)] * 2
    verdict = walk([[0, 0]], slim, 0.5, criterion="kl", draft=draft)
    expected = 0.7 * log(0.7 / 0.4) + 0.3 * log(0.3 / 0.4)
    assert float(verdict.stats.kl_draft_target[0]) == pytest.approx(expected, abs=1e-6)
    assert float(verdict.stats.kl_target_draft[0]) == inf
    # Mass on a token that slim masks: +inf, C.
    verdict = walk([[0, 0]], [logs(0.5, 0.5, 0.0)] * 2, 0.5, criterion="kl", draft=[logs(0.5, 0.4, 0.1)] * 2)
    assert verdict.regions.tolist() == [NONE, C]


@pytest.mark.parametrize("criterion", ["ratio", "tv", "kl"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_token_is_never_emitted_whatever_the_criterion(criterion, temperature):
    slim, draft = [[0.0, 0.0, -inf]] * 3, [[0.0, 0.0, 0.0]] * 3
    generous = {"ratio": (0.0, 0.0), "tv": (2.0, 2.0), "kl": (inf, inf)}[criterion]
    for coin in COINS:
        verdict = walk(
            [[0, 2, 1]],
            slim,
            coin,
            criterion=criterion,
            thresholds=generous,
            temperature=temperature,
            draft=draft,
        )
        assert lists(verdict) == ([-1, -1, -1], [NONE, C, NONE], [0], [True], [0])
        # Region B everywhere, and the bonus: the slim row's own draws stay off the mask.
        fussy = {"ratio": (2.0, 0.0), "tv": (-1.0, 2.0), "kl": (-1.0, inf)}[criterion]
        verdict = walk(
            [[0, 1]], slim[:2], coin, criterion=criterion, thresholds=fussy, temperature=temperature, draft=draft[:2]
        )
        assert 2 not in verdict.tokens.tolist()


def test_the_walk_goes_on_after_an_equal_draw_and_ends_after_another():
    blocks, slim = [[9, 1, 0, 1, 0]], [SLIM] * 5
    # Coins: 0.6 draws id 1, equal to the drafted one; 0.8 draws id 2.
    found = lists(walk(blocks, slim, [0.95, 0.6, 0.0, 0.6, 0.0]))
    assert found == ([1, 0, 1, 0, 3], [NONE, B, A, B, A], [5], [False], [0])
    found = lists(walk(blocks, slim, [0.95, 0.6, 0.0, 0.8, 0.0]))
    assert found == ([1, 0, 2, -1, -1], [NONE, B, A, B, NONE], [3], [False], [0])
    found = lists(walk([[9, 0, 2, 0]], slim[:4], 0.0))
    assert found == ([0, -1, -1, -1], [NONE, A, C, NONE], [1], [True], [0])


def test_region_b_takes_the_argmax_at_temperature_zero():
    tied = [0.0, 1.0, 1.0, 0.9]  # all ratios above 0.9 but id 0's
    for coin in COINS:
        verdict = walk([[0, 3, 1]], [tied] * 3, coin, temperature=0.0, thresholds=(0.95, 0.3))
        assert lists(verdict)[:2] == ([1, -1, -1], [NONE, B, NONE])
        verdict = walk([[0, 1]], [tied] * 2, coin, temperature=0.0)
        assert lists(verdict)[:2] == ([1, 1], [NONE, A])


def test_the_gate_judges_at_temperature_one_and_draws_at_the_sequence_temperature():
    # At temperature 1 id 1's ratio is 0.5 (B); at 0.1 its probability is 0.001, at 100 nearly a half.
    slim = [[0.0, log(0.5)]] * 2
    cold = walk([[0, 1]], slim, [0.5, 0.99], temperature=0.1)
    hot = walk([[0, 1]], slim, [0.5, 0.51], temperature=100.0)
    assert lists(cold)[:2] == ([0, -1], [NONE, B])
    assert lists(hot)[:2] == ([1, 0], [NONE, B])
    assert float(cold.stats.ratio[0]) == float(hot.stats.ratio[0])


def test_the_bonus_is_ungated_and_takes_the_root_coin():
    # Id 2 has ratio 0.18: C if it were gated.
    assert lists(walk([[5]], [SLIM], 0.8)) == ([2], [NONE], [1], [False], [0])
    assert lists(walk([[5, 0, -1, 77]], [SLIM] * 4, [0.8, nan, nan, nan])) == (
        [0, 2, -1, -1],
        [NONE, A, NONE, NONE],
        [2],
        [False],
        [0],
    )
    assert lists(walk([[5, 0]], [SLIM] * 2, 0.8, temperature=0.0))[0] == [0, 0]


def test_ragged_batches_and_empty_sequences():
    verdict = walk([[], [5, 0, 0], [], [5], [5, 2]], [SLIM] * 6, 0.0)
    assert lists(verdict) == (
        [0, 0, 0, 0, -1, -1],
        [NONE, A, A, NONE, NONE, C],
        [0, 3, 0, 1, 0],
        [False, False, False, False, True],
        [0] * 5,
    )
    assert lists(walk([[], []], torch.zeros(0, 4), [])) == ([], [], [0, 0], [False, False], [0, 0])
    assert lists(walk([], torch.zeros(0, 4), [])) == ([], [], [], [], [])


@pytest.mark.parametrize("bad", [4, 5, 2**31 - 1, -2, -(2**31)])
def test_an_id_out_of_range_is_fatal(bad):
    verdict = walk([[0, 0, bad]], [SLIM] * 3, 0.0)
    assert lists(verdict) == ([0, -1, -1], [NONE, A, C], [1], [True], [Status.TOKEN_OUT_OF_RANGE])
    with pytest.raises(ValueError, match=r"gate_tiers: sequence 0 of 1: TOKEN_OUT_OF_RANGE"):
        walk([[0, 0, bad]], [SLIM] * 3, 0.0, check=True)
    assert walk([[0, 2, bad]], [SLIM] * 3, 0.0, check=True).regions.tolist() == [NONE, C, NONE]


@pytest.mark.parametrize(
    ("row", "bit"),
    [
        ([nan, 0.0, 0.0, 0.0], Status.TARGET_NOT_FINITE),
        ([0.0, inf, 0.0, 0.0], Status.TARGET_NOT_FINITE),
        ([-inf] * 4, Status.TARGET_EMPTY),
    ],
)
@pytest.mark.parametrize("criterion", ["ratio", "tv", "kl"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fatal_slim_row_is_c(row, bit, criterion, temperature):
    draft = [SLIM] * 3

    def outcome(rows, tokens=(0, 0), **options):
        return lists(
            walk([[9, *tokens]], rows, 0.0, criterion=criterion, temperature=temperature, draft=draft, **options)
        )

    assert outcome([row, SLIM, SLIM]) == ([-1, -1, -1], [NONE, C, NONE], [0], [True], [bit])
    assert outcome([SLIM, row, SLIM]) == ([0, -1, -1], [NONE, A, C], [1], [True], [bit])
    assert outcome([SLIM, SLIM, row]) == ([0, 0, -1], [NONE, A, A], [2], [True], [bit])
    # Unreached: behind the block's end.
    assert outcome([SLIM, SLIM, row], (0, -1), check=True) == ([0, 0, -1], [NONE, A, NONE], [2], [False], [0])
    with pytest.raises(ValueError, match=bit.name):
        outcome([SLIM, SLIM, row], check=True)


@pytest.mark.parametrize("row", [[nan] * 4, [0.0, inf, 0.0, 0.0], [-inf] * 4])
def test_a_bad_draft_row_is_c_only_where_the_criterion_needs_it(row):
    for criterion in ("tv", "kl"):
        verdict = walk([[9, 0, 0]], [SLIM] * 3, 0.0, criterion=criterion, draft=[SLIM, row, row], check=True)
        assert lists(verdict) == ([0, -1, -1], [NONE, A, C], [1], [True], [Status.DRAFT_INVALID])
    verdict = walk([[9, 0, 0]], [SLIM] * 3, 0.0, draft=[SLIM, row, row], check=True)
    assert lists(verdict) == ([0, 0, 0], [NONE, A, A], [3], [False], [0])
    # The bonus row proposes nothing: it is not looked at.
    verdict = walk([[9, 0, 0]], [SLIM] * 3, 0.0, criterion="tv", draft=[SLIM, SLIM, row], check=True)
    assert verdict.status.tolist() == [0]


def test_stats_are_those_of_the_judged_slim_rows():
    generator = torch.Generator().manual_seed(0)
    slim, draft = torch.randn(12, 6, generator=generator), torch.randn(12, 5, generator=generator)
    tokens = torch.tensor([0, 1, 4, 0, -1, 2, 0, 0, 5, 3, 0, 1])
    lengths, coins = [3, 3, 1, 5], torch.rand(12, generator=generator, dtype=torch.float64)
    row_start = torch.tensor([0, *lengths]).cumsum(0)
    gate = Gate("tv", torch.full((4,), 2.0), torch.full((4,), 2.0))
    verdict = gate_tiers(
        tokens, slim, coins, row_start, gate=gate, temperature=torch.tensor([0.0, 1.0, 0.5, 0.5]), draft_logits=draft
    )
    judged = torch.tensor([0, 1, 7, 8, 9, 10])
    assert (verdict.regions >= 0).nonzero().squeeze(1).tolist() == (judged + 1).tolist()
    expected = acceptance_stats(draft, slim, tokens.roll(-1), temperature=torch.ones(12))
    others = torch.ones(12, dtype=torch.bool).index_fill(0, judged, False)
    for name, found, want in zip(expected._fields, verdict.stats, expected, strict=True):
        assert torch.equal(found[judged], want[judged]), name
        assert bool((found[others] == -1).all() if name == "target_argmax" else found[others].isnan().all()), name


def test_without_draft_logits_only_the_slim_statistics_are_there():
    stats = walk([[9, 1]], [SLIM] * 2, 0.0).stats
    assert float(stats.ratio[0]) == pytest.approx(0.5)
    assert float(stats.target_logprob[0]) == pytest.approx(log(0.25))
    assert int(stats.target_argmax[0]) == 0
    assert float(stats.target_entropy[0]) == pytest.approx(-sum(x * exp(x) for x in SLIM))
    for name in ("kl_draft_target", "kl_target_draft", "tv", "rkl", "draft_logprob", "draft_entropy"):
        assert bool(getattr(stats, name).isnan().all()), name


def test_thresholds_and_temperatures_are_per_sequence():
    verdict = gate_tiers(
        torch.tensor([9, 1, 9, 1, 9, 1]),
        torch.tensor([SLIM] * 6),
        torch.full((6,), 0.8, dtype=torch.float64),
        torch.tensor([0, 2, 4, 6]),
        gate=Gate("ratio", torch.tensor([0.4, 0.6, 0.9]), torch.tensor([0.3, 0.3, 0.8])),
        temperature=torch.tensor([1.0, 0.0, 1.0]),
    )
    assert lists(verdict)[:2] == ([1, 2, 0, -1, -1, -1], [NONE, A, NONE, B, NONE, C])


def test_what_region_b_and_the_bonus_draw_follows_slim():
    num = 200_000
    slim = torch.tensor(logs(0.4, 0.3, 0.2, 0.1))
    coins = uniforms(torch.arange(num), torch.zeros(num, dtype=torch.int64), 2)
    verdict = gate_tiers(
        torch.tensor([0, 1]).repeat(num),
        slim.expand(2 * num, -1),
        coins.flatten(),
        torch.arange(0, 2 * num + 1, 2),
        gate=Gate("ratio", torch.full((num,), 0.8), torch.full((num,), 0.3)),
        temperature=torch.full((num,), 0.7),
    )
    law = (slim / 0.7).double().softmax(0)
    tokens = verdict.tokens.reshape(num, 2)
    first = torch.bincount(tokens[:, 0], minlength=4)
    assert scipy_stats.chisquare(first.numpy(), (law * num).numpy()).pvalue > 1e-9
    bonus = torch.bincount(tokens[tokens[:, 1] >= 0, 1], minlength=4)
    assert int(bonus.sum()) == int(first[1])
    assert scipy_stats.chisquare(bonus.numpy(), (law * first[1]).numpy()).pvalue > 1e-9
    # The test would notice draws at the gate's temperature instead of the sequence's.
    wrong = slim.double().softmax(0)
    assert scipy_stats.chisquare(first.numpy(), (wrong * num).numpy()).pvalue < 1e-9


def test_a_sequence_does_not_depend_on_its_batch_mates():
    generator = torch.Generator().manual_seed(5)
    num, length, vocabulary = 60, 4, 5
    slim, draft = torch.randn(2, num, length, vocabulary, generator=generator)
    tokens = torch.randint(0, vocabulary, (num, length), generator=generator)
    coins = uniforms(torch.arange(num), torch.arange(num) % 3, length)
    temperature = torch.tensor([0.0, 1.0, 0.5])[torch.arange(num) % 3]

    def run(order):
        flat = [x[order].flatten(0, 1) for x in (tokens, slim, coins, draft)]
        gate = Gate("tv", torch.full((len(order),), 0.3), torch.full((len(order),), 0.5))
        row_start = torch.arange(0, len(order) * length + 1, length)
        found = gate_tiers(
            *flat[:3], row_start, gate=gate, temperature=temperature[order], draft_logits=flat[3], check=False
        )
        return torch.cat([found.tokens.reshape(-1, length), found.regions.reshape(-1, length)], 1)

    together = run(torch.arange(num))
    assert together[:, length:].unique().tolist() == [NONE, A, B, C]
    order = torch.randperm(num, generator=generator)
    assert torch.equal(run(order), together[order])
    assert torch.equal(run(torch.tensor([17])), together[17:18])
