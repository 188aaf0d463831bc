"""The adaptive draft length: its costs, its rule, and what the loop and ``viasd.load`` make of it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tables
import viasd
from tables import DRAFT, SLIM, TableModel
from viasd import DecodeRun, ModelDrafter, PromptLookup, SelfDrafter, Speculation, language_model
from viasd.decode import Costs, draft_length, measure_costs, slim_cost
from viasd.decode.draft_length import PATIENCE, DraftLength

FREE_ROWS = Costs((1, 16), (1.0, 1.0))
ROW_BY_ROW = Costs((1, 2), (1.0, 1.9))  # a row more costs nearly as much as a pass
CHANGING = Costs((1, 2, 3, 4, 5), (1.0, 1.681, 2.3, 2.8, 3.3))


def decode(model, requests, **options):
    run = DecodeRun(model, requests, **options)
    for _ in run.cycles():
        pass
    return run.results


def play(length, accepts, num_cycles, limit=15):
    """Lengths chosen in so many cycles where ``accepts(cycle, i)`` says what becomes of the i-th drafted token."""
    chosen = []
    for cycle in range(num_cycles):
        num_drafted = length.choose([0] * limit)
        num_accepted = next((i for i in range(num_drafted) if not accepts(cycle, i)), num_drafted)
        length.observe(num_drafted, num_accepted)
        chosen.append(num_drafted)
    return chosen


def never(cycle, i):
    return False


def always(cycle, i):
    return True


@pytest.mark.parametrize(
    ("num_drafted", "expected"),
    [(0, 2.0), (1, 3.0 + 0.5), (2, 4.0 + 1.0), (3, 5.0 + 1.5), (5, 6.0 + 2.5), (7, 7.0 + 3.5), (9, 8.0 + 4.5)],
)
def test_costs_between_and_beyond_what_was_measured(num_drafted, expected):
    assert Costs((1, 2, 4, 8), (2.0, 3.0, 5.0, 7.0), draft_ms=0.5).cycle_ms(num_drafted) == pytest.approx(expected)


def test_costs_of_a_single_size():
    assert Costs((1,), (2.0,), draft_ms=1.0).cycle_ms(3) == 5.0


def test_drafting_stops_where_nothing_is_accepted_and_is_tried_now_and_then():
    chosen = play(DraftLength(Costs((1, 2), (1.0, 1.5)), (0.8,)), never, 400)
    assert chosen[0] > 0
    tried = [cycle for cycle, number in enumerate(chosen) if number]
    assert 2 < len([cycle for cycle in tried if cycle >= 100]) < 40
    assert all(chosen[cycle] == 1 for cycle in tried[3:])


def test_drafting_resumes_where_it_pays_again():
    length = DraftLength(Costs((1, 2, 16), (1.0, 1.5, 2.0)), (0.8,))
    assert play(length, never, 100).count(0) > 80
    resumed = play(length, always, 100)
    assert resumed[-1] == 15
    assert resumed.count(0) < 60


def test_drafting_goes_to_the_bound_where_rows_are_free():
    assert play(DraftLength(FREE_ROWS, (0.8,)), always, 5) == [15] * 5
    assert play(DraftLength(FREE_ROWS, (0.8,)), always, 1, limit=3) == [3]


def test_nothing_is_ever_drafted_where_even_a_perfect_draft_would_not_pay():
    assert set(play(DraftLength(Costs((1, 2), (1.0, 2.1)), (0.8,)), always, 10 * PATIENCE)) == {0}


def test_a_drafter_better_than_expected_is_found_out():
    """Expected acceptance 0.8 does not pay at these costs, 1.0 does."""
    assert play(DraftLength(ROW_BY_ROW, (0.8,)), always, PATIENCE) == [0] * PATIENCE
    assert play(DraftLength(ROW_BY_ROW, (0.8,)), always, 2 * PATIENCE)[-1] == 15
    rarely = play(DraftLength(ROW_BY_ROW, (0.8,)), never, 10 * PATIENCE)
    assert max(rarely) == 1
    assert 8 <= sum(rarely) < 10


def test_tokens_after_the_first_rejected_one_say_nothing():
    length = DraftLength(FREE_ROWS, (0.5, 0.5, 0.5))
    assert length.choose([0, 1, 2]) == 3
    length.observe(3, 1)
    assert length.acceptance[0] > 0.5 > length.acceptance[1]
    assert length.acceptance[2] == 0.5
    length.choose([0, 1, 2])
    before = list(length.acceptance)
    length.observe(0, 0)  # what could not be drafted says nothing either
    assert length.acceptance == before


def test_levels_are_learnt_apart():
    length = DraftLength(Costs((1, 2), (1.0, 1.5)), (0.6, 0.6))
    for _ in range(20):
        length.observe(length.choose([0]), 0)
        length.observe(length.choose([1]), 1)
    assert length.choose([0]) == 0
    assert length.choose([1]) == 1
    assert length.choose([]) == 0


@pytest.mark.parametrize(
    ("tokens", "limit", "levels"),
    [
        ([1, 2, 3, 9, 1, 2], 7, [1, 1, 2, 2, 2, 2, 3]),  # a match of two, three, ... eight tokens
        ([4] * 20, 3, [4, 4, 4]),
        ([4] * 16, 3, [3, 4, 4]),
        ([1, 2, 3, 9, 1, 2], 0, []),
        ([1, 2, 3], 5, []),
        ([1, 2, 3, 1], 5, []),  # too short a match is no draft
    ],
)
def test_prompt_lookups_levels_follow_the_match(tokens, limit, levels):
    assert PromptLookup().levels(tokens, limit) == levels
    assert all(level < len(PromptLookup.expected_acceptance) for level in levels)


def test_prompt_lookups_shortest_level():
    assert PromptLookup(min_match=1).levels([1, 2, 3, 1], 2) == [0, 1]


class Noting(SelfDrafter):
    """Notes how many tokens it was asked for."""

    def __init__(self, model, route):
        super().__init__(model, route)
        self.asked = []

    def propose(self, context):
        self.asked += [(limit, len(tokens)) for limit, tokens in zip(context.max_tokens, context.tokens, strict=True)]
        return super().propose(context)


@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
@pytest.mark.parametrize("new_tokens", [1, 5, 50])
def test_no_more_is_drafted_than_there_is_room(new_tokens, route):
    model = TableModel(3, 1, max_positions=12)
    drafter = Noting(model, DRAFT)
    result = decode(model, [tables.request(0, new_tokens)], drafter=drafter, route=route, costs=FREE_ROWS)[0]
    end = 2 + min(new_tokens, 10)
    assert len(result.tokens) == end - 2
    assert [limit for limit, _ in drafter.asked] == [end - length - 1 for _, length in drafter.asked]


@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
def test_a_length_of_zero_costs_nothing_and_is_counted(route):
    model = TableModel(3, 2)
    drafter = Noting(model, DRAFT)
    costs = Costs((1, 2), (1.0, 9.0))
    stats = decode(model, [tables.request(0, 10)], drafter=drafter, route=route, costs=costs)[0].stats
    assert stats.num_draft_passes == stats.num_checked == 0
    assert stats.mean_draft_length == 0.0
    assert {limit for limit, _ in drafter.asked} == {0}
    assert stats.num_paused == sum(length < 11 for _, length in drafter.asked) > 0  # at 11 there is no room for a draft


def test_mean_draft_length_leaves_pauses_out():
    model = TableModel(3, 3)
    speculation = Speculation(gamma=4)
    drafter = Noting(model, DRAFT)
    options = {"drafter": drafter, "speculation": speculation, "costs": CHANGING}
    stats = decode(model, [tables.request(5, 40)], **options)[0].stats
    drafted = [limit for limit, _ in drafter.asked if limit]
    assert len(set(drafted)) > 1
    assert stats.num_paused > 0
    assert stats.mean_draft_length == pytest.approx(sum(drafted) / len(drafted), rel=0.1)  # the end cuts the last one
    assert stats.to_dict()["num_paused"] == stats.num_paused


def test_the_length_is_fixed_without_costs_and_with_adaptive_off():
    model = TableModel(3, 4)
    for options in ({}, {"costs": CHANGING, "speculation": Speculation(adaptive=False)}):
        drafter = Noting(model, DRAFT)
        result = decode(model, [tables.request(0, 30)], drafter=drafter, **options)[0]
        assert [limit for limit, _ in drafter.asked] == [min(15, 32 - length - 1) for _, length in drafter.asked]
        assert result.stats.num_paused == 0


@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
@pytest.mark.parametrize("kind", ["self", "model", "lookup"])
def test_samples_do_not_depend_on_batch_mates(kind, route):
    model = TableModel(4, 5)
    drafter = {"self": SelfDrafter(model, DRAFT), "model": ModelDrafter(TableModel(4, 6)), "lookup": PromptLookup(1)}
    options = {"drafter": drafter[kind], "route": route, "costs": CHANGING, "speculation": Speculation(gamma=4)}
    requests = [tables.request(seed, 10 + seed, temperature=0.5 * (seed % 4)) for seed in range(12)]
    together = decode(model, requests, **options)
    assert sum(result.stats.num_paused for result in together) > 0
    assert len({result.stats.mean_draft_length for result in together}) > 1
    for request, result in zip(requests, together, strict=True):
        alone = decode(model, [request], **options)[0]
        assert (alone.tokens, alone.tiers) == (result.tokens, result.tiers)
        assert alone.stats.num_paused == result.stats.num_paused


def tiny():
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).eval()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"drafter": "self"}, 1),
        ({}, 1),
        ({"drafter": None}, 0),
        ({"drafter": "self", "speculation": Speculation(adaptive=False)}, 0),
    ],
)
def test_costs_are_measured_once_and_only_where_they_matter(monkeypatch, options, expected):
    calls = []
    monkeypatch.setattr(language_model, "measure_costs", lambda *a: calls.append(a) or measure_costs(*a))
    lm = viasd.load(tiny(), **options)
    assert not calls  # loading is no time for it
    for seed in (0, 1):
        lm.generate([5, 6, 5, 6], max_new_tokens=8, seed=seed)
        list(lm.stream([5, 6], max_new_tokens=4))
    assert len(calls) == expected
    assert (lm.costs is not None) == bool(expected)


def test_the_slim_tiers_passes_are_the_ones_measured():
    model = TableModel(60, 7, max_positions=128)
    routes = []
    forward = model.forward
    model.forward = lambda rows, cache, route=None, **o: routes.append(route) or forward(rows, cache, route=route, **o)
    costs = measure_costs(model, SelfDrafter(model, DRAFT), SLIM)
    assert SLIM in routes
    assert costs.rows == (1, 2, 4, 8, 16)
    assert all(0 < one <= other for one, other in zip(costs.verify_ms, costs.verify_ms[1:], strict=False))
    assert costs.draft_ms > 0


@pytest.mark.parametrize("max_positions", [2, 3, 20])
def test_costs_of_a_short_context(max_positions):
    model = TableModel(4, 8, max_positions=max_positions)
    for drafter in (SelfDrafter(model, DRAFT), ModelDrafter(model), PromptLookup()):
        costs = measure_costs(model, drafter)
        assert max(costs.rows) + max_positions // 2 <= max_positions


def test_a_seed_gives_the_same_output_twice():
    lm = viasd.load(tiny(), drafter="self", route="default")
    settings = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
    once, again = (lm.generate([5, 6], **settings) for _ in range(2))
    assert (once.tokens, once.tiers) == (again.tokens, again.tiers)
    assert [token.id for token in lm.stream([5, 6], **settings)] == once.tokens


def test_given_costs_are_kept():
    model = TableModel(4, 9)
    lm = viasd.LanguageModel(model, drafter=SelfDrafter(model, DRAFT), costs=ROW_BY_ROW)
    assert lm.generate([0, 1], max_new_tokens=20).stats.num_draft_passes == 0
    assert lm.costs is ROW_BY_ROW


def test_a_slim_pass_is_timed_beside_a_full_pass_of_as_many_rows(monkeypatch):
    """A clock that only passes move: one on the route takes 3 per row, a full one 4 per row."""
    model, now = TableModel(3, 7), [0.0]

    def forward(rows, cache, *, route=None, original=model.forward, **options):
        now[0] += (3.0 if route else 4.0) * len(rows.tokens)
        return original(rows, cache, route=route, **options)

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(draft_length.time, "perf_counter", lambda: now[0])
    assert slim_cost(model, SLIM) == 0.75
