"""mode="tiered": VIA-SD's own rule, against an oracle that follows it branch by branch."""

import itertools
import warnings

import numpy as np
import pytest
import torch

import tables
from tables import DRAFT, SLIM, TOGETHER, TableModel, chi_square_pvalue, sample_counts, total_variation
from viasd import (
    ApproximateOutput,
    DecodeRun,
    Gate,
    InvalidInput,
    ModelDrafter,
    PromptLookup,
    Request,
    Sampling,
    SelfDrafter,
    Speculation,
)
from viasd.drafters import Draft, Drafter

pytestmark = pytest.mark.filterwarnings("ignore::viasd.ApproximateOutput")

GATES = {"ratio": Gate(), "tv": Gate("tv"), "kl": Gate("kl"), "wide": Gate("ratio", 1.0, 0.0)}


def region(gate, token, slim, draft):
    if slim[token] == 0:
        return "C"
    if gate.criterion == "ratio":
        score = slim[token] / slim.max()
        return "A" if score >= gate.accept else "C" if score < gate.escalate else "B"
    if gate.criterion == "tv":
        score = 0.5 * np.abs(draft - slim).sum()
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            score = np.where(draft > 0, draft * np.log(draft / slim), 0.0).sum()
    return "A" if score <= gate.accept else "C" if score > gate.escalate else "B"


class Oracle:
    """The law of tiered decoding, by following every branch of the rule. Greedy laws have one outcome."""

    def __init__(self, model, speculation, num_new, temperature, propose, eos=()):
        self.model, self.speculation, self.temperature = model, speculation, temperature
        self.num_new, self.propose, self.eos = num_new, propose, eos
        self.regions = set()

    def at(self, probs):
        """A distribution at the request's temperature."""
        if self.temperature == 0:
            return np.eye(len(probs))[probs.argmax()]
        weights = probs ** (1 / self.temperature)
        return weights / weights.sum()

    def law(self, prompt):
        outcomes = {}
        self._cycle(list(prompt), len(prompt), len(prompt) + self.num_new, 1.0, outcomes)
        return {tokens[len(prompt) :]: weight for tokens, weight in outcomes.items()}

    def _cycle(self, tokens, verified, limit, weight, outcomes):
        length = min(self.speculation.gamma, limit - len(tokens) - 1)
        for chance, drafted, proposals in self.propose(self, tokens, length):
            if chance > 0:
                self._walk(tokens, verified, limit, weight * chance, outcomes, drafted, proposals, 0)

    def _walk(self, tokens, verified, limit, weight, outcomes, drafted, proposals, i):
        prefix = (*tokens, *drafted[:i])
        slim = self.model.probs("slim", prefix, verified - 1)
        own = self.at(slim)
        if i == len(drafted):
            for token in np.flatnonzero(own):
                self._emitted([*prefix, int(token)], verified, limit, weight * own[token], outcomes)
            return
        where = region(self.speculation.gate, drafted[i], slim, proposals[i])
        self.regions.add(where)
        go_on = (tokens, verified, limit)
        if where == "A":
            self._kept(*go_on, weight, outcomes, drafted, proposals, i)
        elif where == "B":
            for token in np.flatnonzero(own):
                if token == drafted[i]:
                    self._kept(*go_on, weight * own[token], outcomes, drafted, proposals, i)
                else:
                    self._emitted([*prefix, int(token)], verified, limit, weight * own[token], outcomes)
        else:
            self._full(list(prefix), limit, weight, outcomes, drafted[i:], proposals[i:])

    def _kept(self, tokens, verified, limit, weight, outcomes, drafted, proposals, i):
        if drafted[i] in self.eos:
            self._emitted([*tokens, *drafted[: i + 1]], verified, limit, weight, outcomes)
        else:
            self._walk(tokens, verified, limit, weight, outcomes, drafted, proposals, i + 1)

    def _emitted(self, tokens, verified, limit, weight, outcomes):
        if len(tokens) == limit or tokens[-1] in self.eos:
            outcomes[tuple(tokens)] = outcomes.get(tuple(tokens), 0.0) + weight
        elif len(tokens) - verified >= self.speculation.max_pending:
            self._full(tokens, limit, weight, outcomes, [], [])
        else:
            self._cycle(tokens, verified, limit, weight, outcomes)

    def _full(self, tokens, limit, weight, outcomes, rest, proposals):
        full = self.at(self.model.probs("full", tokens))
        if not rest:
            return self._drawn(tokens, full, limit, weight, outcomes)
        accept = min(1.0, full[rest[0]] / self.at(proposals[0])[rest[0]])
        if accept > 0:
            after, chance = [*tokens, rest[0]], weight * accept
            if rest[0] in self.eos:
                self._emitted(after, len(after), limit, chance, outcomes)
            else:
                self._full(after, limit, chance, outcomes, rest[1:], proposals[1:])
        if accept < 1:
            left = np.maximum(full - self.at(proposals[0]), 0.0)
            self._drawn(tokens, left / left.sum(), limit, weight * (1 - accept), outcomes)

    def _drawn(self, tokens, probs, limit, weight, outcomes):
        for token in np.flatnonzero(probs):
            after = [*tokens, int(token)]
            self._emitted(after, len(after), limit, weight * probs[token], outcomes)


def drawn(oracle, tokens, length):
    """Every draft of the draft table's own."""
    vocab_size = oracle.model.vocab_size
    for drafted in itertools.product(range(vocab_size), repeat=length):
        rows = [oracle.model.probs("draft", (*tokens, *drafted[:i])) for i in range(length)]
        chance = np.prod([oracle.at(row)[token] for row, token in zip(rows, drafted, strict=True)])
        yield chance, list(drafted), [oracle.at(row) if oracle.temperature == 0 else row for row in rows]


def repeating(oracle, tokens, length):
    """The newest token again and again, for certain."""
    drafted = [tokens[-1]] * length
    yield 1.0, drafted, [np.eye(oracle.model.vocab_size)[token] for token in drafted]


class Repeating(Drafter):
    name = "repeating"

    def propose(self, context):
        pairs = zip(context.tokens, context.max_tokens, strict=True)
        return Draft([[tokens[-1]] * (1 + max(limit, 0)) for tokens, limit in pairs])


PROPOSALS = {
    "self": (lambda model: SelfDrafter(model, DRAFT), drawn),
    "certain": (lambda model: Repeating(), repeating),
}


def tiered(model, requests, drafter, speculation, **options):
    run = DecodeRun(
        model, requests, drafter=drafter, route=SLIM, speculation=speculation, admission=TOGETHER, **options
    )
    for _ in run.cycles():
        pass
    return run.results


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", PROPOSALS)
def test_greedy_output_is_the_rules(kind, gate):
    make, propose = PROPOSALS[kind]
    regions = set()
    for seed in range(25):
        model = TableModel(4, 100 + seed)
        speculation = Speculation("tiered", gamma=1 + seed % 4, max_pending=1 + seed % 5, gate=GATES[gate])
        oracle = Oracle(model, speculation, 12, 0.0, propose, eos=(3,) if seed % 2 else ())
        request = tables.request(0, 12, temperature=0.0, eos=oracle.eos)
        assert tuple(tiered(model, [request], make(model), speculation)[0].tokens) in oracle.law([0, 1])
        regions |= oracle.regions
    assert regions == ({"A", "B"} if gate == "wide" else {"A", "B", "C"})


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", PROPOSALS)
def test_sampled_output_has_the_rules_law(kind, gate):
    make, propose = PROPOSALS[kind]
    model = TableModel(3, 60, spread=0.5)
    speculation = Speculation("tiered", gamma=2, max_pending=2, gate=GATES[gate])
    law = Oracle(model, speculation, 4, 1.3, propose, eos=(2,)).law([0, 1])
    assert abs(sum(law.values()) - 1) < 1e-9

    def run(requests):
        return DecodeRun(model, requests, drafter=make(model), route=SLIM, speculation=speculation, admission=TOGETHER)

    counts = sample_counts(run, lambda seed: tables.request(seed, 4, eos=(2,), temperature=1.3), 8_000)
    assert chi_square_pvalue(counts, law) > 1e-9
    exact = tables.target_law(model, tables.request(0, 4, eos=(2,), temperature=1.3))
    assert total_variation(law, exact) > 0.1
    assert chi_square_pvalue(counts, exact) < 1e-9  # the control: it is not the full model's law


@pytest.mark.parametrize("criterion", ["ratio", "tv", "kl"])
@pytest.mark.parametrize("kind", PROPOSALS)
def test_every_region_is_reached_at_the_defaults(criterion, kind):
    model = TableModel(5, 61)
    speculation = Speculation("tiered", gate=Gate(criterion))
    make = PROPOSALS[kind][0]
    for result in tiered(
        model, [tables.request(0, 60), tables.request(1, 60, temperature=0.0)], make(model), speculation
    ):
        assert all(result.stats.regions[name] > 0 for name in "ABC"), result.stats.regions
        assert set(result.tiers) == {"draft", "slim", "full"}


def test_each_request_follows_its_own_rule():
    model = TableModel(5, 62)
    speculations = [
        Speculation(),
        Speculation("tiered"),
        Speculation("tiered", gamma=2, gate=Gate("tv")),
        Speculation("tiered", max_pending=2, gate=Gate("kl", 0.1, 0.5)),
        Speculation(gate=Gate("kl"), gamma=3),
        Speculation("tiered", gate=Gate("ratio", 0.9, 0.1), co_escalate=False),
    ]
    requests = [
        Request([seed % 5], Sampling(20, float(seed % 3), seed=seed, eos_token_ids=()), own)
        for seed, own in enumerate(speculations * 2)
    ]
    together = tiered(model, requests, SelfDrafter(model, DRAFT), None)
    for request, result in zip(requests, together, strict=True):
        alone = tiered(model, [request], SelfDrafter(model, DRAFT), None)[0]
        assert (alone.tokens, alone.tiers) == (result.tokens, result.tiers)
        assert alone.stats.regions == result.stats.regions
        assert alone.stats.num_full_passes == result.stats.num_full_passes


def test_counts_and_overshoot_agree_with_the_output():
    model = TableModel(4, 63)
    speculation = Speculation("tiered", gamma=3, max_pending=4)
    requests = [tables.request(seed, 30, eos=(3,)) for seed in range(200)]
    some_full = 0
    for result in tiered(model, requests, SelfDrafter(model, DRAFT), speculation):
        stats = result.stats
        assert stats.num_tokens == len(result.tokens) == len(result.tiers)
        assert 3 not in result.tokens[:-1]
        assert result.tiers.count("draft") <= sum(stats.accepted_at)
        assert sum(stats.regions.values()) <= sum(stats.drafted_at)
        assert result.tiers.count("full") <= stats.num_full_passes
        assert len(stats.overshoot) <= len(result.tokens)
        assert all(-1 <= overshoot <= 1 for overshoot in stats.overshoot)
        some_full += bool(stats.overshoot)
    assert some_full > 100


def test_a_refresh_costs_one_pass_and_records_overshoot():
    """Where everything is kept, the full model is asked once for each ``max_pending`` tokens, and never at the end."""
    model = TableModel(4, 64)
    model._row = lambda tier, prefix, num_full, row=model._row: row("full", prefix, 0)
    speculation = Speculation("tiered", gamma=3, max_pending=8, gate=Gate("ratio", 0.0, 0.0))
    result = tiered(model, [tables.request(0, 26)], SelfDrafter(model, DRAFT), speculation)[0]
    assert (result.stats.num_full_passes, result.stats.num_slim_passes) == (2, 6)
    assert result.tiers[:9] == ["draft"] * 3 + ["slim"] + ["draft"] * 3 + ["slim", "full"]
    assert len(result.stats.overshoot) == 16
    assert result.stats.overshoot == pytest.approx([0.0] * 16, abs=1e-6)


def test_it_warns_needs_a_route_and_takes_chains():
    model = TableModel(4, 65)
    requests = [tables.request(0, 9)]
    with pytest.warns(ApproximateOutput, match="approximates the full model"):
        DecodeRun(model, requests, route=SLIM, speculation=Speculation("tiered"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DecodeRun(model, requests, route=SLIM)
    with pytest.raises(InvalidInput, match="mode='tiered' needs a slim tier"):
        DecodeRun(model, requests, speculation=Speculation("tiered"))

    class Tree(Drafter):
        def propose(self, context):
            return Draft([[1, 0, 2]], None, [[-1, 0, 0]])

    with pytest.raises(InvalidInput, match="takes chains"):
        tiered(model, requests, Tree(), Speculation("tiered"))


@pytest.mark.parametrize("drafter", [None, "lookup", "model"])
def test_other_drafters_run_to_the_end(drafter):
    model = TableModel(4, 66)
    drafter = {
        None: lambda: None,
        "lookup": lambda: PromptLookup(min_match=1),
        "model": lambda: ModelDrafter(TableModel(4, 67)),
    }[drafter]()
    for gate in GATES.values():
        for result in tiered(
            model, [tables.request(s, 20) for s in range(5)], drafter, Speculation("tiered", gate=gate)
        ):
            assert len(result.tokens) == 20


def test_broken_slim_logits_go_to_the_full_model():
    model = TableModel(4, 68)
    forward = model.forward

    def breaking(rows, cache, *, route=None, **options):
        output = forward(rows, cache, route=route, **options)
        if route == SLIM:
            output.logits[[position >= 5 for position in rows.positions]] = torch.nan
        return output

    model.forward = breaking
    result = tiered(model, [tables.request(0, 12, temperature=0.0)], None, Speculation("tiered"))[0]
    assert len(result.tokens) == 12
    assert set(result.tiers[4:]) == {"full"}
