"""Drafters alone, with tables instead of models."""

import pytest
import torch

import tables
from tables import DRAFT, TableModel
from viasd import DecodeRun, InvalidInput, ModelDrafter, PromptLookup, Route, RouteMismatch, Sampling, SelfDrafter
from viasd.drafters import DraftContext


def context(tokens, limits, *, cache=None, slots=None, temperature=1.0, draw=None):
    return DraftContext(
        request_ids=list(range(len(tokens))),
        tokens=tokens,
        max_tokens=limits,
        sampling=[Sampling(temperature=temperature, seed=0)] * len(tokens),
        cache=cache,
        slots=slots or [[] for _ in tokens],
        captured=[{} for _ in tokens],
        draw=draw or (lambda indices, logits, drafted: (logits.argmax(-1).tolist(), logits)),
    )


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 2, [3, 9]),
        ([1, 2, 3, 9, 1, 2], 0, []),
        ([1, 2, 3, 9, 1, 2], 6, [3, 9, 1, 2, 3, 9]),  # the copy runs on into itself
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, [7]),  # the longer match wins over the later one
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # of equally long ones the later
        ([4, 4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 3, 4], 3, []),
        ([1, 2, 3, 1], 3, []),  # one token is not a match worth a draft
        ([7], 3, []),
    ],
)
def test_prompt_lookup_takes_the_longest_match(tokens, limit, expected):
    draft = PromptLookup().propose(context([tokens], [limit]))
    assert draft.row_tokens == [[tokens[-1], *expected]]
    assert draft.logits is None
    assert draft.parents is None


def test_prompt_lookup_settings():
    assert PromptLookup(min_match=1).propose(context([[1, 2, 3, 1]], [2])).row_tokens == [[1, 2, 3]]
    with pytest.raises(InvalidInput, match="min_match"):
        PromptLookup(min_match=3, max_match=2)


def test_prompt_lookup_equals_a_search_by_definition():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens = torch.randint(0, 3, (20,), generator=generator).tolist()

        def matched(end, tokens=tokens):
            return next((n for n in range(end) if tokens[end - 1 - n] != tokens[-1 - n]), end)

        best = max(range(1, len(tokens)), key=lambda end: (matched(end), end))
        expected = tokens[best] if matched(best) >= 2 else None
        row = PromptLookup().propose(context([tokens], [1])).row_tokens[0]
        assert row[1:] == ([] if expected is None else [expected])


def test_self_drafter_leaves_the_shared_cache_as_it_was():
    model = TableModel(4, 1)
    cache = model.new_cache()
    slots = cache.pool.take(2)
    model.forward(tables.Rows([0, 1], [0, 1], [0, 2], slots, [[]]), cache)
    written = dict(cache.written)
    draft = SelfDrafter(model, DRAFT).propose(context([[0, 1, 2]], [3], cache=cache, slots=[slots]))
    assert len(draft.row_tokens[0]) == 4
    assert cache.pool.take(1) == [2]
    assert {slot: cache.written[slot] for slot in slots} == written


def test_the_reported_distribution_is_the_one_drawn_from():
    model = TableModel(5, 2)
    seen = []

    def draw(indices, logits, drafted):
        masked = logits.masked_fill(logits < logits.median(-1, keepdim=True).values, -torch.inf)
        seen.append(masked)
        return masked.argmax(-1).tolist(), masked

    drafter = ModelDrafter(model).start()
    draft = drafter.propose(context([[0, 1], [2, 3, 4]], [2, 1], draw=draw))
    assert [len(row) for row in draft.row_tokens] == [3, 2]
    assert torch.equal(draft.logits[[0, 3]], seen[0])
    assert torch.equal(draft.logits[[1]], seen[1])


def test_model_drafter_crops_its_cache_to_the_common_prefix():
    model = TableModel(5, 3)
    drafter = ModelDrafter(model).start()
    drafter.propose(context([[0, 1, 2]], [4]))
    fresh = ModelDrafter(model).start()
    for tokens in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 1], [0, 4], [0, 4, 1, 1, 1]):
        again = drafter.propose(context([tokens], [3]))
        expected = fresh.start().propose(context([tokens], [3]))
        assert again.row_tokens == expected.row_tokens
        assert torch.equal(again.logits, expected.logits)
    drafter.close([0])
    assert drafter._cache.pool.take(1) == [0]


def test_model_drafter_stops_at_its_own_context():
    drafter = ModelDrafter(TableModel(5, 4, max_positions=5)).start()
    lengths = [len(drafter.propose(context([[1] * n], [3])).row_tokens[0]) - 1 for n in (1, 2, 3, 4, 5, 9)]
    assert lengths == [3, 3, 2, 1, 0, 0]


def test_a_broken_draft_row_ends_the_draft():
    drafter = ModelDrafter(TableModel(5, 5)).start()
    calls = iter(([2], [-1]))
    draft = drafter.propose(context([[0]], [4], draw=lambda indices, logits, drafted: (next(calls), logits)))
    assert draft.row_tokens == [[0, 2]]


def test_greedy_requests_report_no_distribution():
    drafter = ModelDrafter(TableModel(5, 6)).start()
    assert drafter.propose(context([[0, 1]], [2], temperature=0.0)).logits is None


def test_a_wider_draft_vocabulary_is_cut_to_the_models():
    model, wide = TableModel(3, 7), TableModel(6, 8)
    run = DecodeRun(model, [tables.request(seed, 6) for seed in range(50)], drafter=ModelDrafter(wide))
    for _ in run.cycles():
        pass
    assert {token for result in run.results for token in result.tokens} == {0, 1, 2}


def test_a_drafters_route_must_fit():
    with pytest.raises(RouteMismatch, match="made for 6 layers"):
        SelfDrafter(TableModel(3, 9), Route.spread(6, attention=0.5, mlp=0.5))
