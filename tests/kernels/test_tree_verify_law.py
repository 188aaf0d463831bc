"""The law of what verify_tree emits: the target's where that is promised, far from it where a rule does not fit."""

import pytest
import torch
from scipy import stats
from tree_law import (
    TOLERANCE,
    Laws,
    Op,
    distances,
    draw_all,
    independent,
    measure,
    order_lost,
    pruned_by_probability,
    random_laws,
    replay,
    top_k,
    without_replacement,
)

from viasd_kernels import uniforms
from viasd_kernels.tree_verify import build_tree, verify_tree

FALSE_ALARM = 1e-9

pytestmark = pytest.mark.usefixtures("one_thread")

# Seed of the laws, vocabulary, children of the root and of each of those.
SMALL = [(0, 2, (2, 0)), (1, 3, (2, 0)), (2, 3, (1, 0)), (3, 2, (2, 1)), (4, 3, (2, 0))]
LARGE = [(seed, 2 + seed % 5, (1 + seed % 3, 0)) for seed in range(10)]
DEEP = [(seed, 2 + seed % 2, (2, 1 + (seed + 1) % 2)) for seed in range(5)]
SIZES = [pytest.param("reference", SMALL, id="reference"), pytest.param("native", SMALL + LARGE + DEEP, id="native")]

EXACT = [
    ("deterministic", top_k),
    ("deterministic", independent),
    ("deterministic", pruned_by_probability),
    ("deterministic", order_lost),
    ("without_replacement", without_replacement),
    ("without_replacement", independent),
    ("with_replacement", independent),
]
WRONG = [
    ("with_replacement", without_replacement),
    ("without_replacement", top_k),
    ("with_replacement", top_k),
    ("without_replacement", pruned_by_probability),
    ("without_replacement", order_lost),
]


def name(value: object) -> str:
    return value.__name__ if callable(value) else str(value)


@pytest.mark.parametrize(("impl", "sizes"), SIZES)
@pytest.mark.parametrize(("proposal", "drafter"), EXACT, ids=name)
def test_the_emitted_law_is_the_targets(proposal, drafter, impl, sizes) -> None:
    for seed, vocab, width in sizes:
        trees = draw_all(random_laws(seed, vocab), width, drafter)
        assert abs(float(trees.weight.sum()) - 1) < 1e-12
        assert max(distances(trees, Op(proposal, impl))) < TOLERANCE * 10, (seed, vocab, width)


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize(("proposal", "drafter"), WRONG, ids=name)
def test_a_rule_that_does_not_fit_the_draws_is_far_from_the_target(proposal, drafter, impl) -> None:
    full = torch.tensor([0.6, 0.35, 0.05], dtype=torch.float64)
    draft = torch.tensor([0.05, 0.2, 0.75], dtype=torch.float64)
    first, _ = distances(draw_all(Laws(full.repeat(3, 1), draft.repeat(3, 1)), (2, 0), drafter), Op(proposal, impl))
    assert first >= 0.05


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize("proposal", ["deterministic", "without_replacement", "with_replacement"])
def test_coins_act_independently_as_the_law_assumes(proposal, impl) -> None:
    compared = 0
    for seed, vocab, width in [(3, 2, (2, 1)), (5, 3, (2, 1) if impl == "native" else (2, 0))]:
        trees, op = draw_all(random_laws(seed, vocab), width, independent), Op(proposal, impl)
        thresholds = measure(trees, op)
        which = torch.arange(len(trees.tokens)).repeat_interleave(8)
        generator = torch.Generator().manual_seed(seed)
        coins = torch.rand(len(which), len(trees.parents), generator=generator, dtype=torch.float64)
        verdict = op(trees, which, coins)
        for case, tree in enumerate(which.tolist()):
            foretold = replay(trees, thresholds, tree, coins[case].tolist())
            if foretold is not None:
                path = verdict.path[case, : int(verdict.num_accepted[case]) + 1].tolist()
                assert path == foretold[0]
                assert foretold[1] in (None, int(verdict.next_token[case]))
                compared += 1
    assert compared >= 50


def chi_square_tail(proposal: str, drafter: str, trials: int = 200_000) -> float:
    """Tail probability of chi-square over first tokens, and second ones after an accepted child, of drawn trees."""
    vocab, count = 6, 3
    generator = torch.Generator().manual_seed(11)
    full, draft = (torch.randn(vocab, vocab, generator=generator) for _ in range(2))
    noise = -(-torch.rand(trials, count + 1, vocab, generator=generator).log()).log()  # Gumbel
    if drafter == "top_k":
        children = draft[0].topk(count).indices.repeat(trials, 1)
    elif drafter == "without_replacement":
        children = (draft[0] + noise[:, 0]).topk(count).indices  # in the order of drawing
    else:
        children = (draft[0] + noise[:, :count]).argmax(-1)
    grandchild = (draft[children[:, 0]] + noise[:, count]).argmax(-1, keepdim=True)
    tokens = torch.cat([torch.zeros(trials, 1, dtype=torch.int64), children, grandchild], 1)
    coins = uniforms(torch.arange(trials), torch.full((trials,), 7), count + 2)
    row_start = torch.arange(trials + 1) * (count + 2)
    verdict = verify_tree(
        build_tree(torch.tensor([-1, 0, 0, 0, 1]).repeat(trials), row_start, max_rows=count + 2),
        tokens.flatten(),
        full[tokens.flatten()],
        coins.flatten(),
        row_start,
        temperature=torch.ones(trials),
        draft_logits=None if proposal == "deterministic" else draft[tokens.flatten()],
        proposal=proposal,
        impl="native",
    )
    emitted = tokens.gather(1, verdict.path.reshape(trials, -1).long().clamp(min=0))[:, 1:]
    emitted = emitted.scatter(1, verdict.num_accepted.long().unsqueeze(1), verdict.next_token.long().unsqueeze(1))
    counts = [(emitted[:, 0].bincount(minlength=vocab), full[0])]
    for token in range(vocab):
        after = emitted[(verdict.num_accepted > 0) & (emitted[:, 0] == token), 1]
        counts.append((after.bincount(minlength=vocab), full[token]))
    statistic = 0.0
    for observed, logits in counts:
        expected = logits.double().softmax(0) * observed.sum()
        statistic += float(((observed - expected) ** 2 / expected.clamp(min=1e-300)).sum()) if observed.sum() else 0.0
    return float(stats.chi2.sf(statistic, (vocab - 1) * sum(bool(observed.sum()) for observed, _ in counts)))


@pytest.mark.parametrize(
    ("proposal", "drafter"),
    [
        ("deterministic", "top_k"),
        ("without_replacement", "without_replacement"),
        ("without_replacement", "independent"),
        ("with_replacement", "independent"),
    ],
)
def test_chi_square_of_200_000_trees(proposal: str, drafter: str) -> None:
    assert chi_square_tail(proposal, drafter) > FALSE_ALARM


@pytest.mark.parametrize(
    ("proposal", "drafter"),
    [("with_replacement", "without_replacement"), ("without_replacement", "top_k")],
)
def test_chi_square_notices_a_rule_that_does_not_fit(proposal: str, drafter: str) -> None:
    assert chi_square_tail(proposal, drafter) < FALSE_ALARM
