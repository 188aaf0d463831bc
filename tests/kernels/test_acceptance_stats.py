"""acceptance_stats against plain Python in float64, and its stated edge cases."""

from functools import partial
from math import exp, inf, isnan, log, nan

import pytest
import torch

from viasd_kernels import acceptance
from viasd_kernels.acceptance import Stats, acceptance_stats

FLOATS = [name for name in Stats._fields if name != "target_argmax"]
TOKEN_FLOATS = ("ratio", "draft_logprob", "target_logprob")


@pytest.fixture(params=["reference", "native"], autouse=True)
def _implementation(request, monkeypatch):
    """Every test of this file holds for each implementation."""
    monkeypatch.setitem(globals(), "acceptance_stats", partial(acceptance.acceptance_stats, impl=request.param))


def run(draft, target, tokens, *, temperature=1.0, **options):
    draft, target = torch.as_tensor(draft), torch.as_tensor(target)
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(target)).contiguous()
    return acceptance_stats(draft, target, torch.as_tensor(tokens), temperature=temperatures, **options)


def log_softmax(row, temperature):
    scaled = [value / (temperature or 1.0) for value in row]
    peak = max(scaled)
    normaliser = peak + log(sum(exp(value - peak) for value in scaled))
    return [value - normaliser for value in scaled]


def oracle(draft, target, token, temperature, alpha, beta, undershoot):
    """One row's statistics by their definitions, one vocabulary entry at a time."""
    log_q = log_softmax(target, temperature)
    log_p = log_softmax(draft, temperature) + [-inf] * (len(target) - len(draft))
    found = dict.fromkeys(("kl_draft_target", "kl_target_draft", "tv", "rkl", "draft_entropy", "target_entropy"), 0.0)
    for a, b in zip(log_p, log_q, strict=True):
        p, q = exp(a), exp(b)
        found["tv"] += abs(p - q) / 2
        if p > 0:
            found["kl_draft_target"] += p * (a - b)
            found["rkl"] += p * max(0.0, log(1 - alpha) + a - b)
            found["draft_entropy"] -= p * a
        if q > 0:
            found["kl_target_draft"] += q * (b - a)
            found["rkl"] += q * max(0.0, log(beta) + (b - a if undershoot else a - b))
            found["target_entropy"] -= q * b
    found["ratio"] = exp(log_q[token] - max(log_q)) if token >= 0 else nan
    found["draft_logprob"] = log_p[token] if token >= 0 else nan
    found["target_logprob"] = log_q[token] if token >= 0 else nan
    found["target_argmax"] = target.index(max(target))
    return found


def assert_matches(stats, row, expected, tolerance):
    for name in FLOATS:
        got, want = float(getattr(stats, name)[row]), expected[name]
        assert (isnan(got) and isnan(want)) or got == want or abs(got - want) <= tolerance * max(1.0, abs(want)), name
    assert int(stats.target_argmax[row]) == expected["target_argmax"]


@pytest.mark.parametrize(
    ("alpha", "beta", "undershoot"), [(0.5, 0.3, False), (0.5, 0.3, True), (0.0, 1.0, False), (0.9, 2.0, True)]
)
@pytest.mark.parametrize("width", [11, 8, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_statistic_matches_its_definition(dtype, width, alpha, beta, undershoot):
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = 24, 11
    target = (2 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    draft = (2 * torch.randn(rows, width, generator=generator)).to(dtype)
    # Every kind of row: masked in one, the other, both; equal rows (whose KL is 0).
    target[1::4, 2:5] = -inf
    draft[2::4, 3:7] = -inf
    target[3], draft[3] = target[3].clone(), target[3, :width]
    tokens = torch.randint(-1, vocabulary, (rows,), generator=generator)
    temperature = torch.tensor([0.0, 0.5, 1.0, 3.0]).repeat(rows // 4)
    stats = run(draft, target, tokens, temperature=temperature, alpha=alpha, beta=beta, undershoot=undershoot)
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(getattr(stats, name).dtype == accumulation for name in FLOATS)
    assert stats.target_argmax.dtype == torch.int32
    for row in range(rows):
        expected = oracle(
            draft[row].double().tolist(),
            target[row].double().tolist(),
            int(tokens[row]),
            float(temperature[row]),
            alpha,
            beta,
            undershoot,
        )
        assert_matches(stats, row, expected, 1e-12 if dtype == torch.float64 else 3e-6)


def test_float32_sums_hold_over_a_wide_vocabulary():
    generator = torch.Generator().manual_seed(1)
    draft, target = torch.randn(2, 3, 50_000, generator=generator) * 3
    tokens = torch.tensor([0, 49_999, 17])
    narrow = run(draft, target, tokens)
    wide = run(draft.double(), target.double(), tokens)
    for name in FLOATS:
        got, want = getattr(narrow, name).double(), getattr(wide, name)
        assert float(((got - want).abs() / want.abs().clamp(min=1)).max()) < 1e-6, name


def test_the_published_cost_by_hand():
    # p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2): first term 1/2 * relu(log(1/2 * 2)) twice = 0; second 0.
    draft, target = [[0.0, 0.0, -inf]], [[log(0.25), log(0.25), log(0.5)]]
    assert float(run(draft, target, [0]).rkl[0]) == pytest.approx(0.0, abs=1e-6)
    # alpha = 0: log 2 from the first term. undershoot: p = 0 under q > 0 costs without bound.
    assert float(run(draft, target, [0], alpha=0.0).rkl[0]) == pytest.approx(log(2), abs=1e-6)
    assert float(run(draft, target, [0], undershoot=True).rkl[0]) == inf
    # beta = 1, alpha = 0: the second adds 1/4 * log 2 twice.
    assert float(run(draft, target, [0], alpha=0.0, beta=1.0).rkl[0]) == pytest.approx(1.5 * log(2), abs=1e-6)


def test_mass_where_the_other_row_has_none():
    stats = run([[0.0, 0.0, -inf], [0.0, -inf, -inf]], [[0.0, -inf, 0.0], [0.0, -inf, 0.0]], [1, 2])
    assert stats.kl_draft_target.tolist() == [inf, pytest.approx(log(2))]
    assert stats.kl_target_draft.tolist() == [inf, inf]
    assert stats.rkl.tolist()[0] == inf
    assert stats.tv.tolist() == pytest.approx([0.5, 0.5])
    assert stats.target_logprob.tolist() == pytest.approx([-inf, log(0.5)])
    assert stats.draft_logprob.tolist() == pytest.approx([log(0.5), -inf])
    assert stats.ratio.tolist() == [0.0, 1.0]


def test_no_token_makes_its_statistics_nan_and_leaves_the_rows_alone():
    stats = run([[0.0, 1.0]] * 2, [[1.0, 0.0]] * 2, [-1, 0])
    for name in FLOATS:
        values = getattr(stats, name).tolist()
        assert isnan(values[0]) == (name in TOKEN_FLOATS), name
        assert not isnan(values[1]), name
    assert stats.target_argmax.tolist() == [0, 0]


def test_temperature_zero_counts_as_one():
    draft, target = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(5)
    zero, one = run(draft, target, tokens, temperature=0.0), run(draft, target, tokens, temperature=1.0)
    assert all(torch.equal(a, b) for a, b in zip(zero, one, strict=True))


def test_argmax_ties_go_to_the_lower_id():
    stats = run([[0.0] * 4] * 3, [[1.0, 1.0, 0.0, 1.0], [0.0, 2.0, 2.0, 1.0], [-inf, -inf, 0.0, 0.0]], [0, 0, 0])
    assert stats.target_argmax.tolist() == [0, 1, 2]


@pytest.mark.parametrize("bad", [[nan, 0.0, 0.0], [nan] * 3, [0.0, inf, 0.0], [inf, -inf, -inf], [-inf] * 3])
def test_a_row_that_is_no_distribution_gives_nan_where_it_is_needed(bad):
    good = [0.0, 1.0, 2.0]
    stats = run([good, bad, good], [bad, good, good], [1, 2, 1])
    of_target, of_draft = ("ratio", "target_logprob", "target_entropy"), ("draft_logprob", "draft_entropy")
    for name in FLOATS:
        values = getattr(stats, name).tolist()
        assert isnan(values[0]) == (name not in of_draft), name
        assert isnan(values[1]) == (name not in of_target), name
        assert not isnan(values[2]), name
    assert stats.target_argmax.tolist() == [-1, 2, 2]


def test_a_bad_narrow_draft_row_is_nan_for_ids_beyond_it_too():
    assert isnan(run([[nan, 0.0]], [[0.0, 1.0, 2.0]], [2]).draft_logprob[0])


def test_a_vocabulary_of_one():
    stats = run([[3.0]], [[-2.0]], [0])
    expected = dict.fromkeys(FLOATS, 0.0) | {"ratio": 1.0}
    # log(1 - alpha) and log(beta) are negative: nothing to pay.
    assert {name: float(getattr(stats, name)[0]) for name in FLOATS} == expected


def test_no_rows():
    stats = run(torch.zeros(0, 3), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32))
    assert all(field.shape == (0,) for field in stats)


def test_an_id_out_of_range_raises_or_counts_as_none():
    draft, target = torch.zeros(3, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"acceptance_stats: tokens must be in \[-1, 4\), got 4 in row 1"):
        run(draft, target, [0, 4, -5])
    stats = run(draft, target, [0, 4, -5], check=False)
    for name in TOKEN_FLOATS:
        assert [isnan(value) for value in getattr(stats, name).tolist()] == [False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.0}, r"alpha must be in \[0, 1\), got 1.0"),
        ({"alpha": -0.1}, r"alpha must be in \[0, 1\), got -0.1"),
        ({"alpha": nan}, "alpha must be"),
        ({"beta": 0.0}, "beta must be finite and > 0, got 0.0"),
        ({"beta": inf}, "beta must be finite and > 0, got inf"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0, got -1.0 at 0"),
        ({"temperature": nan}, "temperature must be finite and >= 0, got nan at 0"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=f"acceptance_stats: {message}"):
        run([[0.0, 1.0]], [[0.0, 1.0]], [0], **options)


def test_any_outer_stride():
    base = torch.randn(6, 2, 9, generator=torch.Generator().manual_seed(3))
    draft, target = base[:, 0], base[:, 1]
    assert not draft.is_contiguous()
    strided = run(draft, target, torch.arange(6))
    dense = run(draft.contiguous(), target.contiguous(), torch.arange(6))
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))
