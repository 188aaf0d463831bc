"""The exact law of the whole loop, by enumeration: it must be the full model's own, to rounding."""

import numpy as np
import pytest
import torch

import tables
from tables import DRAFT, SLIM, TOGETHER, Enumeration, TableModel, target_law, total_variation
from viasd import DecodeRun, Gate, ModelDrafter, PromptLookup, SelfDrafter, Speculation
from viasd.decode import Costs, loop, passes, verification
from viasd.decode.draft_length import DraftLength
from viasd.drafters import Draft
from viasd.models import Rows

# One token is worth drafting at first, two after an accepted one, none in the cycle after a rejected one.
CHANGING = Costs((1, 2, 3), (1.0, 1.681, 2.3))


def exact_law(monkeypatch, model, drafter, route, speculation, make, key=None, costs=None):
    enumeration = Enumeration(key) if key else Enumeration()
    spied = enumeration.spy(verification.accept_chain)
    with monkeypatch.context() as patch:
        patch.setattr(verification, "accept_chain", spied)
        patch.setattr(loop, "accept_chain", spied)
        return enumeration.law(
            lambda requests, coins: DecodeRun(
                model,
                requests,
                drafter=drafter,
                route=route,
                speculation=speculation,
                costs=costs,
                admission=TOGETHER,
                coins=coins,
            ),
            make,
        )


def make_drafter(kind, model):
    return {
        "none": lambda: None,
        "self": lambda: SelfDrafter(model, DRAFT),
        "model": lambda: ModelDrafter(TableModel(model.vocab_size, model.seed + 50)),
        "short": lambda: ModelDrafter(TableModel(model.vocab_size, model.seed + 50, max_positions=4)),
        "lookup": lambda: PromptLookup(min_match=1),
    }[kind]()


CASES = [  # vocabulary, new tokens, gamma, max_pending, drafter, seed, eos, settings
    (2, 4, 1, 2, "self", 1, (), {}),
    (2, 4, 3, 1, "self", 2, (0,), {}),
    (3, 3, 2, 3, "self", 3, (2,), {}),
    (4, 2, 1, 2, "self", 4, (), {}),
    (5, 2, 2, 8, "self", 5, (1,), {}),
    (6, 2, 1, 1, "self", 6, (), {}),
    (3, 3, 2, 2, "model", 7, (0,), {}),
    (2, 3, 3, 3, "model", 8, (), {}),
    (3, 3, 2, 2, "short", 9, (), {}),
    (3, 3, 1, 2, "none", 10, (), {}),
    (2, 5, 1, 3, "none", 11, (1,), {}),
    (3, 4, 2, 2, "lookup", 12, (2,), {}),
    (3, 3, 3, 8, "lookup", 13, (), {}),
    (4, 3, 2, 2, "self", 14, (), {"temperature": 0.6, "top_k": 2}),
    (4, 3, 2, 2, "model", 15, (0,), {"temperature": 1.7, "top_p": 0.8}),
    (5, 2, 2, 2, "self", 16, (), {"min_p": 0.3}),
]


@pytest.mark.parametrize("tiers", ["two", "three"])
@pytest.mark.parametrize("case", CASES, ids=[f"V{c[0]}-{c[4]}-{c[5]}" for c in CASES])
def test_the_law_is_the_full_models(monkeypatch, case, tiers):
    vocab_size, new_tokens, gamma, max_pending, kind, seed, eos, settings = case
    model = TableModel(vocab_size, seed)
    speculation = Speculation(gamma=gamma, max_pending=max_pending)

    def make(world):
        return tables.request(world, new_tokens, eos=eos, **settings)

    route = SLIM if tiers == "three" else None
    law = exact_law(monkeypatch, model, make_drafter(kind, model), route, speculation, make)
    assert abs(sum(law.values()) - 1) < 1e-9
    assert total_variation(law, target_law(model, make(0))) < 1e-7  # temperatures are float32


def alternating(tokens, logits):
    """A grammar: no token twice in a row, and of two prompts' worth of tokens only even ones."""
    mask = torch.arange(len(logits)) == tokens[-1]
    if len(tokens) >= 4:
        mask |= torch.arange(len(logits)) % 2 == 1 - tokens[0] % 2
    return logits.masked_fill(mask & (mask.sum() < len(mask)), -torch.inf)


SETTINGS = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -2.0, "presence_penalty": 0.5},
    "bias": {"logit_bias": {0: 1.5, 1: -torch.inf}},
    "bad words": {"bad_words": [(1, 2), (0, 0), (2,)]},
    "minimum": {"eos": (0, 2), "min_new_tokens": 2},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 1.0, "logit_bias": {2: 1.0}, "top_k": 2, "eos": (1,)},
    "grammar": {"hooks": {"logits_processor": alternating}},
    "stopping": {"hooks": {"stopping": lambda tokens: sum(tokens) > 3}},
    "both": {"presence_penalty": 2.0, "hooks": {"logits_processor": alternating, "stopping": lambda t: t[-1] == 2}},
}


@pytest.mark.parametrize("kind", ["self", "lookup"])
@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_depend_on_earlier_tokens_keep_the_law(monkeypatch, name, route, kind):
    model = TableModel(3, 17)
    speculation = Speculation(gamma=1 if route and kind == "self" else 2, max_pending=2)  # fewer worlds

    def make(world):
        return tables.request(world, 3, **SETTINGS[name])

    law = exact_law(monkeypatch, model, make_drafter(kind, model), route, speculation, make)
    expected = target_law(model, make(0))
    assert abs(sum(law.values()) - 1) < 1e-9
    assert total_variation(law, expected) < 1e-6  # edited logits are float32
    plain = {"hooks": {}, "eos": SETTINGS[name].get("eos", ())}
    if name != "minimum":
        assert total_variation(expected, target_law(model, tables.request(0, 3, **plain))) > 0.05


def test_stale_counts_are_caught(monkeypatch):
    """The negative control: penalties that know no drafted token."""
    model = TableModel(3, 17)

    def stale(logits, sampling, tokens, num_prompt, original=passes.edit_row):
        return original(logits, sampling, tokens[: num_prompt + 1], num_prompt)

    monkeypatch.setattr(passes, "edit_row", stale)

    def make(world):
        return tables.request(world, 3, **SETTINGS["frequency"])

    law = exact_law(monkeypatch, model, make_drafter("self", model), None, Speculation(gamma=2), make)
    assert total_variation(law, target_law(model, make(0))) > 0.05


@pytest.mark.parametrize(
    "gate",
    [Gate("ratio", 0.9, 0.8), Gate("ratio", 0.0, 0.0), Gate("tv", 0.1, 0.3), Gate("kl", 0.05, 0.4)],
    ids=["eager", "never", "tv", "kl"],
)
@pytest.mark.parametrize(
    ("vocab_size", "new_tokens"), [(2, 3), pytest.param(3, 3, marks=pytest.mark.full)], ids=["V2", "V3"]
)
def test_no_gate_changes_the_law(monkeypatch, vocab_size, new_tokens, gate):
    model = TableModel(vocab_size, 21)
    speculation = Speculation(gamma=2, max_pending=3, gate=gate)

    def make(world):
        return tables.request(world, new_tokens)

    law = exact_law(monkeypatch, model, SelfDrafter(model, DRAFT), SLIM, speculation, make)
    assert total_variation(law, target_law(model, make(0))) < 1e-9


@pytest.mark.parametrize("kind", ["self", "model"])
@pytest.mark.parametrize(
    ("vocab_size", "new_tokens", "route"),
    [(2, 6, None), (3, 5, None), (2, 4, SLIM)],
    ids=["V2-two", "V3-two", "V2-three"],
)
def test_a_changing_draft_length_keeps_the_law(monkeypatch, vocab_size, new_tokens, route, kind):
    model = TableModel(vocab_size, 22)
    chosen = set()

    def choose(self, levels, original=DraftLength.choose):
        length = original(self, levels)
        if len(levels) == 2:  # where there is room for any length
            chosen.add(length)
        return length

    monkeypatch.setattr(DraftLength, "choose", choose)
    speculation = Speculation(gamma=2, max_pending=2)

    def make(world):
        return tables.request(world, new_tokens)

    law = exact_law(monkeypatch, model, make_drafter(kind, model), route, speculation, make, costs=CHANGING)
    assert chosen == {0, 1, 2}
    assert abs(sum(law.values()) - 1) < 1e-9
    assert total_variation(law, target_law(model, make(0))) < 1e-9


class Censoring(SelfDrafter):
    """Stops at an unlikely token and drops it: what is kept was not drawn from what is reported."""

    threshold = 0.5

    def propose(self, context):
        draft = super().propose(context)
        if draft.logits is None:
            return draft
        row_tokens, logits, first = [], [], 0
        for tokens in draft.row_tokens:
            rows = draft.logits[first : first + len(tokens)]
            first += len(tokens)
            probs = rows.softmax(-1)
            kept = 0
            while kept + 1 < len(tokens) and self.keeps(probs[kept], tokens[kept + 1]):
                kept += 1
            row_tokens.append(tokens[: kept + 1])
            logits.append(rows[: kept + 1])
        return Draft(row_tokens, torch.cat(logits))

    def keeps(self, probs, token):
        return probs[token] >= self.threshold


class StoppingWhereUnsure(Censoring):
    """Stops by the distribution alone, before the token is looked at: allowed."""

    def keeps(self, probs, token):
        return probs.max() >= self.threshold


@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
@pytest.mark.parametrize("costs", [None, CHANGING], ids=["fixed", "adaptive"])
@pytest.mark.parametrize(("drafter", "exact"), [(Censoring, False), (StoppingWhereUnsure, True)])
def test_a_draft_length_that_peeks_at_the_drawn_token_is_caught(monkeypatch, drafter, exact, costs, route):
    model = TableModel(3, 31, spread=0.5)
    speculation = Speculation(gamma=2, max_pending=2)
    num_tokens = 3 if exact else 2  # enough to be caught

    def make(world):
        return tables.request(world, num_tokens)

    law = exact_law(monkeypatch, model, drafter(model, DRAFT), route, speculation, make, costs=costs)
    distance = total_variation(law, target_law(model, make(0)))
    assert distance < 1e-9 if exact else distance >= 0.05


@pytest.mark.parametrize(
    "key",
    [lambda draw, slot: slot, lambda draw, slot: (draw // 2, slot), lambda draw, slot: draw],
    ids=["all passes", "draft and slim", "rows of a pass"],
)
def test_coins_used_twice_are_caught(monkeypatch, key):
    model = TableModel(3, 30, spread=0.5)
    speculation = Speculation(gamma=1, max_pending=2)
    law = exact_law(
        monkeypatch, model, SelfDrafter(model, DRAFT), SLIM, speculation, lambda w: tables.request(w, 3), key
    )
    assert abs(sum(law.values()) - 1) < 1e-9
    assert total_variation(law, target_law(model, tables.request(0, 3))) >= 0.05


# Probability of token 0 as the first one and later.
SECOND_THOUGHTS = {"draft": (0.9, 0.9), "slim": (0.1, 0.5), "full": (0.9, 0.5)}


class SecondThoughts(TableModel):
    """The full model mostly undoes the slim tier's first token; about the others the two agree, and not the draft."""

    def _row(self, tier, prefix, num_full):
        index = super()._row(tier, prefix, num_full)
        of_first, of_others = SECOND_THOUGHTS[tier]
        prob = of_first if len(prefix) == 2 else of_others
        self._rows[index] = np.array([prob, 1 - prob])
        return index


@pytest.mark.parametrize(("costs", "exact"), [(None, True), (Costs((1, 2), (1.0, 1.67)), False)])
def test_old_coins_for_a_discarded_position_are_caught_once_the_draft_length_adapts(monkeypatch, costs, exact):
    """Drafting and checking a position again with its own old coins is harmless until the length depends on them."""

    def by_position(sequences, coins, kind):
        return lambda seeds, draws, n: coins(seeds, torch.tensor([-2 * len(s.tokens) - kind for s in sequences]), n)

    def coins_for(sequences, row_start, coins, device, original=loop.coins_for):
        return original(sequences, row_start, by_position(sequences, coins, 0), device)

    def judge(sequences, rows, coins, *trusted, original=loop.judge, **gate):
        slim = not trusted  # the full pass says how much it trusts
        return original(sequences, rows, by_position(sequences, coins, 1) if slim else coins, *trusted, **gate)

    monkeypatch.setattr(loop, "coins_for", coins_for)
    monkeypatch.setattr(loop, "judge", judge)
    model = SecondThoughts(2, 40)
    speculation = Speculation(gamma=1, max_pending=2, gate=Gate("ratio", 0.0, 0.0))
    drafter = SelfDrafter(model, DRAFT)
    law = exact_law(monkeypatch, model, drafter, SLIM, speculation, lambda w: tables.request(w, 3), costs=costs)
    assert abs(sum(law.values()) - 1) < 1e-9
    distance = total_variation(law, target_law(model, tables.request(0, 3)))
    assert distance < 1e-9 if exact else distance >= 0.05


def test_a_stale_slim_key_would_show():
    model = TableModel(3, 51)
    cache = model.new_cache()
    slots = cache.pool.take(3)
    model.forward(Rows([0, 1], [0, 1], [0, 2], slots[:2], [[]]), cache, route=SLIM)
    stale = model.forward(Rows([2], [2], [0, 1], slots[2:], [slots[:2]]), cache).logits
    assert not torch.allclose(stale.exp().double(), torch.from_numpy(model.probs("full", (0, 1, 2))), atol=1e-3)
