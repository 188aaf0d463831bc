"""accept_chain emits the target's law: exactly, by enumeration, and by chi-square; wrong copies are caught by both.

Tables give p (proposal) and q (target) after every prefix. A rule takes one batch of chains of equal length: tokens
[n, K], p [n, K, Vd] or None, q [n, K + 1, V], coins [n, K + 1] (coins[:, 0] the root's), and returns (num_accepted
[n], next_token [n]).
"""

from functools import cache, partial
from itertools import product

import pytest
import torch
from scipy import stats

from viasd_kernels import acceptance, draw_from_weights, uniforms
from viasd_kernels.acceptance import accept_chain

pytestmark = pytest.mark.usefixtures("one_thread")

EPSILON = 1e-11  # how close to a cell's edge the enumeration probes
FALSE_ALARM = 1e-9


@pytest.fixture(params=["reference", "native"], autouse=True)
def _implementation(request, monkeypatch):
    """Every test of this file holds for each implementation."""
    monkeypatch.setitem(globals(), "accept_chain", partial(acceptance.accept_chain, impl=request.param))


def op(tokens, p, q, coins, *, temperature=1.0, dtype=torch.float64):
    """The op under the rule's signature; logits are temperature * log p, so that temperature cancels."""
    num, length = coins.shape
    row_tokens = torch.cat([torch.zeros(num, 1, dtype=torch.int64), tokens], 1).flatten()
    draft = None
    if p is not None:
        unused = torch.zeros(num, 1, p.shape[-1], dtype=p.dtype)  # the last row proposes nothing
        draft = (torch.cat([p, unused], 1).log() * temperature).flatten(0, 1).to(dtype)
    verdict = accept_chain(
        row_tokens,
        (q.log() * temperature).flatten(0, 1).to(dtype),
        coins.flatten().contiguous(),
        torch.arange(0, num * length + 1, length),
        temperature=torch.full((num,), temperature, dtype=torch.float64),
        draft_logits=draft,
    )
    return verdict.num_accepted.long(), verdict.next_token.long()


def textbook(mistake=None):
    """The rule written straight from the paper, with one deliberate mistake or none."""

    def rule(tokens, p, q, coins):
        num, length = tokens.shape
        if p is None:
            p = torch.nn.functional.one_hot(tokens, q.shape[-1]).to(q.dtype)
        p = torch.nn.functional.pad(p, (0, q.shape[-1] - p.shape[-1]))
        p_token = p.gather(2, tokens.unsqueeze(2)).squeeze(2)
        q_token = q[:, :length].gather(2, tokens.unsqueeze(2)).squeeze(2)
        if mistake == "min(1, p/q)":
            p_token, q_token = q_token, p_token
        accepted = (coins[:, 1:] * p_token < q_token).long().cumprod(1).sum(1)
        each = torch.arange(num)
        judge = accepted.clamp(max=length - 1)
        residual = (q[each, judge] - p[each, judge]).clamp(min=0)
        if mistake == "residual not subtracted":
            residual = q[each, judge]
        bonus = q[:, length - 1] if mistake == "bonus from the row before" else q[:, length]
        weights = torch.where((accepted == length).unsqueeze(1), bonus, residual)
        coin = coins[:, 0]
        if mistake == "one coin for acceptance and residual":
            coin = torch.where(accepted < length, coins[each, judge + 1], coin)
        return accepted, draw_from_weights(weights, coin)

    return rule


MISTAKES = [
    "min(1, p/q)",
    "residual not subtracted",
    "bonus from the row before",
    "one coin for acceptance and residual",
]


def tables(vocabulary, length, seed, *, zeros=0.0, width=None):
    """[(p, q) by depth], each [V ** depth, Vd or V] float64; ``zeros`` is the share of masked tokens."""
    generator = torch.Generator().manual_seed(seed)

    def table(rows, columns):
        weights = torch.rand(rows, columns, generator=generator, dtype=torch.float64) ** 2 + 0.02
        weights *= torch.rand(rows, columns, generator=generator) >= zeros
        weights[weights.sum(1) == 0, 0] = 1.0
        return weights / weights.sum(1, keepdim=True)

    return [
        (table(vocabulary**depth, width or vocabulary), table(vocabulary**depth, vocabulary))
        for depth in range(length + 1)
    ]


def prefix_index(prefix, vocabulary):
    index = 0
    for token in prefix:
        index = index * vocabulary + token
    return index


def target_law(table, length, vocabulary):
    """[V ** (K + 1)]: the target's law of the next K + 1 tokens."""
    law = torch.ones(1, dtype=torch.float64)
    for depth in range(length + 1):
        law = (law.unsqueeze(1) * table[depth][1]).flatten()
    return law


def cells(breakpoints):
    """Edges of the intervals into which the breakpoints cut [0, 1)."""
    inside = breakpoints[(breakpoints > 4 * EPSILON) & (breakpoints < 1 - 4 * EPSILON)]
    edges = torch.cat([torch.zeros(1), inside.unique(), torch.ones(1)]).double()
    return edges[torch.cat([torch.ones(1, dtype=torch.bool), edges.diff() > 4 * EPSILON])]


def enumerate_law(rule, table, length, vocabulary, *, deterministic=False, reported=None):
    """Integrate a rule over all drafts and all coins: (law [V ** (K + 1)], whether every cell was of one outcome).

    For the right rule the outcome is constant within the cells that the acceptance thresholds q / p and the running
    sums of all possible final rows cut, so probing a cell's middle and both its ends integrates it exactly, but for
    slivers of EPSILON at the edges. ``reported`` replaces the proposal that the rule is told.
    """
    law = torch.zeros(vocabulary ** (length + 1), dtype=torch.float64)
    uniform_cells = True
    for draft in product(range(vocabulary), repeat=length):
        index = [prefix_index(draft[:depth], vocabulary) for depth in range(length + 1)]
        q = torch.stack([table[depth][1][index[depth]] for depth in range(length + 1)])
        sampled = torch.stack([table[depth][0][index[depth]] for depth in range(length)])
        told = sampled if reported is None else torch.stack([reported[d][0][index[d]] for d in range(length)])
        if deterministic:
            told = torch.nn.functional.one_hot(torch.tensor(draft), vocabulary).double()
        told = torch.nn.functional.pad(told, (0, vocabulary - told.shape[-1]))
        weight = 1.0
        for depth, token in enumerate(draft):
            best = int(sampled[depth].argmax())
            weight *= float(token == best) if deterministic else float(sampled[depth, token : token + 1].sum())
        if weight == 0:
            continue
        finals = torch.cat([(q[:length] - told).clamp(min=0), q])
        running = finals.cumsum(1) / finals.sum(1, keepdim=True).clamp(min=1e-300)
        thresholds = [(q[d, t] / told[d, t]).reshape(1) for d, t in enumerate(draft)]
        edges = [cells(running.flatten()), *(cells(threshold) for threshold in thresholds)]
        probes = [torch.stack([e[:-1] + EPSILON, (e[:-1] + e[1:]) / 2, e[1:] - EPSILON], 1).flatten() for e in edges]
        coins = torch.cartesian_prod(*probes)
        volume = torch.cartesian_prod(*(e.diff().repeat_interleave(3) for e in edges)).prod(1)
        num = len(coins)
        shown = None if deterministic else told[:, : sampled.shape[-1]].expand(num, -1, -1)
        accepted, token = rule(torch.tensor(draft).expand(num, -1), shown, q.expand(num, -1, -1), coins)
        outcome = (accepted * vocabulary + token).reshape([n for e in edges for n in (len(e) - 1, 3)])
        middle = (slice(None), 1) * len(edges)
        spread = outcome[middle].reshape([n for e in edges for n in (len(e) - 1, 1)])
        uniform_cells &= bool((outcome == spread).all())
        volume = volume.reshape(outcome.shape)[middle].flatten()
        for value in outcome.unique().tolist():
            count, last = divmod(value, vocabulary)
            mass = weight * float(volume[outcome[middle].flatten() == value].sum())
            law += mass * _extended((*draft[:count], last), table, length, vocabulary)
    return law, uniform_cells


def _extended(emitted, table, length, vocabulary):
    """The law of K + 1 tokens that begin with ``emitted`` and go on by the target."""
    start = prefix_index(emitted, vocabulary)
    law = torch.zeros(vocabulary ** len(emitted), dtype=torch.float64)
    law[start] = 1.0
    for depth in range(len(emitted), length + 1):
        law = (law.unsqueeze(1) * table[depth][1]).flatten()
    return law


CASES = [
    pytest.param(2, 1, {}, id="V2 K1"),
    pytest.param(2, 3, {}, id="V2 K3"),
    pytest.param(3, 2, {}, id="V3 K2"),
    pytest.param(3, 2, {"zeros": 0.4}, id="V3 K2 masked"),
    pytest.param(4, 2, {"width": 3}, id="V4 Vd3 K2"),
    pytest.param(4, 2, {"width": 2, "zeros": 0.3}, id="V4 Vd2 K2 masked"),
    pytest.param(6, 1, {"zeros": 0.2}, id="V6 K1 masked"),
]


@pytest.mark.parametrize(("vocabulary", "length", "options"), CASES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
def test_the_emitted_law_is_the_target_law_exactly(vocabulary, length, options, deterministic):
    table = tables(vocabulary, length, seed=vocabulary * 10 + length, **options)
    law, uniform_cells = enumerate_law(op, table, length, vocabulary, deterministic=deterministic)
    assert uniform_cells
    assert float((law - target_law(table, length, vocabulary)).abs().max()) < 1e-9


@pytest.mark.parametrize("temperature", [0.3, 4.0])
def test_the_law_holds_at_other_temperatures(temperature):
    def rule(tokens, p, q, coins):
        return op(tokens, p, q, coins, temperature=temperature)

    table = tables(3, 2, seed=5)
    law, uniform_cells = enumerate_law(rule, table, 2, 3)
    assert uniform_cells
    assert float((law - target_law(table, 2, 3)).abs().max()) < 1e-9


def test_a_proposal_equal_to_the_target_is_always_accepted():
    table = [(q, q) for _, q in tables(3, 2, seed=8)]
    law, uniform_cells = enumerate_law(op, table, 2, 3)
    assert uniform_cells
    assert float((law - target_law(table, 2, 3)).abs().max()) < 1e-9


def test_the_enumeration_passes_the_textbook_rule():
    table = tables(3, 2, seed=1)
    law, uniform_cells = enumerate_law(textbook(), table, 2, 3)
    assert uniform_cells
    assert float((law - target_law(table, 2, 3)).abs().max()) < 1e-9


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_enumeration_catches(mistake):
    table = tables(3, 2, seed=1)
    law, _ = enumerate_law(textbook(mistake), table, 2, 3)
    assert float((law - target_law(table, 2, 3)).abs().sum()) / 2 > 0.01


def test_the_enumeration_catches_a_proposal_that_was_not_sampled_from():
    table = tables(3, 2, seed=1)
    law, _ = enumerate_law(op, table, 2, 3, reported=tables(3, 2, seed=2))
    assert float((law - target_law(table, 2, 3)).abs().sum()) / 2 > 0.01


# -------------------------------------------------------------------------------------------------- by chi-square

NUM_TRIALS = 240_000
VOCABULARY, LENGTH = 4, 2


@cache
def _coins(draw, count):
    return uniforms(torch.arange(NUM_TRIALS), torch.full((NUM_TRIALS,), draw), count)


def _sample(table, which, draw, given=None, length=LENGTH):
    """Tokens [n, length] drawn by table; ``given(depth, drawn)`` overrides some of them."""
    coins = _coins(draw, length)
    index, columns = torch.zeros(NUM_TRIALS, dtype=torch.int64), []
    for depth in range(length):
        token = draw_from_weights(table[depth][which][index], coins[:, depth])
        if given is not None:
            token = given(depth, token)
        columns.append(token)
        index = index * VOCABULARY + token
    return torch.stack(columns, 1)


def emitted_pvalue(rule, table, sampled_from=None):
    """p-value of NUM_TRIALS emitted sequences of K + 1 tokens against the target's law."""
    drafts = _sample(sampled_from or table, 0, draw=0)
    index = [torch.zeros(NUM_TRIALS, dtype=torch.int64)]
    for depth in range(LENGTH):
        index.append(index[-1] * VOCABULARY + drafts[:, depth])
    p = torch.stack([table[depth][0][index[depth]] for depth in range(LENGTH)], 1)
    q = torch.stack([table[depth][1][index[depth]] for depth in range(LENGTH + 1)], 1)
    accepted, token = rule(drafts, p, q, _coins(1, LENGTH + 1))

    def emitted(depth, drawn):
        drafted = drafts[:, min(depth, LENGTH - 1)]
        return torch.where(depth < accepted, drafted, torch.where(depth == accepted, token, drawn))

    sequences = _sample(table, 1, draw=2, given=emitted, length=LENGTH + 1)
    flat = (sequences * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(1)
    counts = torch.bincount(flat, minlength=VOCABULARY ** (LENGTH + 1))
    expected = target_law(table, LENGTH, VOCABULARY) * NUM_TRIALS
    assert float(expected.min()) > 5
    return stats.chisquare(counts.numpy(), expected.numpy()).pvalue


def test_emitted_sequences_follow_the_target():
    def rule(*arguments):
        return op(*arguments, temperature=0.8, dtype=torch.float32)

    assert emitted_pvalue(rule, tables(VOCABULARY, LENGTH, seed=11)) > FALSE_ALARM


@pytest.mark.parametrize("mistake", MISTAKES)
def test_chi_square_catches(mistake):
    table = tables(VOCABULARY, LENGTH, seed=11)
    assert emitted_pvalue(textbook(), table) > FALSE_ALARM
    assert emitted_pvalue(textbook(mistake), table) < FALSE_ALARM


def test_chi_square_catches_a_proposal_that_was_not_sampled_from():
    table = tables(VOCABULARY, LENGTH, seed=11)
    sharper = [(p**2 / (p**2).sum(1, keepdim=True), q) for p, q in table]
    assert emitted_pvalue(op, table, sampled_from=sharper) < FALSE_ALARM


def test_chi_square_catches_coins_shared_with_the_drafter():
    table = tables(VOCABULARY, LENGTH, seed=11)

    def rule(tokens, p, q, coins):
        return op(tokens, p, q, torch.cat([coins[:, :1], _coins(0, LENGTH)], 1))

    assert emitted_pvalue(rule, table) < FALSE_ALARM
