"""The law of the whole loop with its own coins: 200,000 requests a case, at a false-alarm rate of 1e-9."""

import numpy as np
import pytest
import torch

import tables
from tables import DRAFT, SLIM, TOGETHER, TableModel, chi_square_pvalue, sample_counts, target_law, total_variation
from viasd import DecodeRun, ModelDrafter, SelfDrafter, Speculation
from viasd.decode import Costs
from viasd.drafters import Draft, Drafter
from viasd_kernels import uniforms

CONTROL_TRIALS = 20_000
FALSE_ALARM = 1e-9


@pytest.fixture(params=[20_000, pytest.param(200_000, marks=pytest.mark.full)])
def trials(request):
    return request.param


def sampled(model, drafter, route, coins=uniforms, trials=CONTROL_TRIALS, costs=None, **options):
    """How often each output came, and the law it should come from."""
    speculation = Speculation(gamma=2, max_pending=3, **options)

    def run(requests):
        return DecodeRun(
            model,
            requests,
            drafter=drafter,
            route=route,
            speculation=speculation,
            costs=costs,
            admission=TOGETHER,
            coins=coins,
        )

    counts = sample_counts(run, lambda seed: tables.request(seed, 3, eos=(2,)), trials)
    return counts, target_law(model, tables.request(0, 3, eos=(2,)))


def pvalue(*arguments, **options):
    return chi_square_pvalue(*sampled(*arguments, **options))


def assert_caught(counts, law):
    """The test must fail, on tables where the law is off by far more than 20,000 samples can blur (about 0.015)."""
    total = sum(counts.values())
    assert total_variation({output: seen / total for output, seen in counts.items()}, law) >= 0.065
    assert chi_square_pvalue(counts, law) < FALSE_ALARM


class TwoSiblings(Drafter):
    """A tree of two children of the root, drawn from the draft table, and one grandchild under the first."""

    name = "two siblings"

    def __init__(self, model, drawn, reported):
        self.model, self.drawn, self.reported = model, drawn, reported

    def propose(self, context):
        prefixes = [tuple(tokens) for tokens in context.tokens]
        everyone = range(len(prefixes))
        root = self._logits(prefixes)
        nothing = [[]] * len(prefixes)
        first, root = context.draw(everyone, root, nothing)
        again = root
        if self.drawn == "without_replacement":
            again = root.scatter(1, torch.tensor(first)[:, None], -torch.inf)
        second, _ = context.draw(everyone, again, nothing)
        below = self._logits([(*prefix, token) for prefix, token in zip(prefixes, first, strict=True)])
        grandchild, below = context.draw(everyone, below, [[token] for token in first])
        row_tokens, logits, parents = [], [], []
        for b, limit in enumerate(context.max_tokens):
            size = 1 if limit < 1 else 3 if limit < 2 else 4
            row_tokens.append([prefixes[b][-1], first[b], second[b], grandchild[b]][:size])
            parents.append([-1, 0, 0, 1][:size])
            logits.append(torch.stack([root[b], below[b], below[b], below[b]])[:size])
        return Draft(row_tokens, torch.cat(logits), parents, self.reported)

    def _logits(self, prefixes):
        return torch.from_numpy(np.log([self.model.probs("draft", prefix) for prefix in prefixes]))


@pytest.mark.parametrize(
    ("kind", "route"), [("self", None), ("self", SLIM), ("model", SLIM)], ids=["self-two", "self-three", "model-three"]
)
def test_chains(kind, route, trials):
    model = TableModel(3, 61)
    drafter = SelfDrafter(model, DRAFT) if kind == "self" else ModelDrafter(TableModel(3, 62))
    assert pvalue(model, drafter, route, trials=trials) > FALSE_ALARM


def test_a_changing_draft_length(trials):
    """One token is drafted at first, none in the cycle after a rejected one."""
    model = TableModel(3, 65)
    costs = Costs((1, 2, 3), (1.0, 1.681, 2.3))
    assert pvalue(model, SelfDrafter(model, DRAFT), SLIM, costs=costs, trials=trials) > FALSE_ALARM


def test_sequences_that_escalate_together(trials):
    model = TableModel(4, 63)
    assert pvalue(model, SelfDrafter(model, DRAFT), SLIM, co_escalate=True, trials=trials) > FALSE_ALARM


@pytest.mark.parametrize(
    ("kind", "route"), [("with_replacement", None), ("without_replacement", SLIM)], ids=["with-two", "without-three"]
)
def test_trees(kind, route, trials):
    model = TableModel(3, 64)
    assert pvalue(model, TwoSiblings(model, kind, kind), route, trials=trials) > FALSE_ALARM


def test_the_wrong_kind_of_tree_is_caught():
    model = TableModel(3, 64)
    drafter = TwoSiblings(model, "without_replacement", "with_replacement")
    assert_caught(*sampled(model, drafter, None))


def test_coins_that_passes_share_are_caught():
    model = TableModel(3, 67)

    def shared(seeds, draws, n):
        return uniforms(seeds, torch.zeros_like(draws), n)

    assert_caught(*sampled(model, SelfDrafter(model, DRAFT), SLIM, coins=shared))
