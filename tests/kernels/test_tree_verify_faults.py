"""verify_tree on trees, tokens and rows of logits that are not as they should be."""

import pytest
import torch
from tree_cases import DTYPES, INF, LAST_COIN, NAN, RULES, by_impl, by_rule, drafts, outcome, peaked, run

from viasd_kernels import Status
from viasd_kernels.tree_verify import build_tree, verify_tree

# Rows that are not followed


@by_impl
@by_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unused_rows_and_what_descends_from_them_are_not_followed(impl: str, proposal: str, temperature: float) -> None:
    parents, tokens = [-1, 0, 1, 0, -1], [0, -1, 2, 2, -1]
    verdict = run(
        parents, tokens, peaked(2, 2, 2, 3, 3), [0.5, 0, 0, 0, 0], impl=impl, temperature=temperature,
        **drafts(proposal, torch.zeros(5, 5)),
    )  # fmt: skip
    assert outcome(verdict) == ([0, 3, -1, -1, -1], [1], [3], [0])


@by_impl
@by_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("parents", "tokens"),
    [
        ([-1, -1, 0, 0], [0, 2, 2, 1]),
        ([-1, 3, 0, 1], [0, 2, 2, 2]),
        ([-1, 1, 0, 1], [0, 2, 2, 2]),
        ([-1, 0, 0, 0], [0, 5, 2, 1]),
        ([-1, 0, 0, 0], [0, -2, 2, 1]),
        ([-1, 0, 0, 0], [0, 2**31, 2, 1]),
        ([-1, 0, 0, 0], [0, -(2**40), 2, 1]),
    ],
    ids=["orphan", "forward", "cycle", "id = V", "id < -1", "id = 2^31", "id = -2^40"],
)
def test_pruned_rows_are_reported_and_not_followed(impl, proposal, temperature, parents, tokens) -> None:
    options = {"impl": impl, "temperature": temperature, **drafts(proposal, torch.zeros(4, 5))}
    verdict = run(parents, torch.tensor(tokens), peaked(2, 0, 3, 0), [0.5, 0, 0, 0], **options)
    assert outcome(verdict) == ([0, 2, -1, -1], [1], [3], [Status.TREE_PRUNED])
    with pytest.raises(ValueError, match="verify_tree: sequence 0 of 1: TREE_PRUNED"):
        run(parents, torch.tensor(tokens), peaked(2, 0, 3, 0), [0.5, 0, 0, 0], check=True, **options)


@by_impl
def test_an_unused_row_without_a_place_in_the_tree_and_any_root_token_are_fine(impl: str) -> None:
    verdict = run([-1, 0, -1], [10**6, 1, -1], peaked(1, 2, 0), [0.5] * 3, impl=impl, temperature=0.0)
    assert outcome(verdict) == ([0, 1, -1], [1], [2], [0])


@by_impl
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_links_that_lead_nowhere_end_the_walk(impl: str, temperature: float) -> None:
    good = build_tree(torch.tensor([-1, 0, 0, 1]), torch.tensor([0, 4]), max_rows=4)
    for name, row, link in [
        ("first_child", 1, 1),
        ("first_child", 1, 0),
        ("first_child", 1, 4),
        ("first_child", 1, 2**31 - 1),
        ("first_child", 1, -2),
        ("next_sibling", 3, 3),
        ("next_sibling", 3, 1),
        ("next_sibling", 3, -(2**31)),
    ]:
        links = getattr(good, name).clone()
        links[row] = link
        verdict = verify_tree(
            good._replace(**{name: links}),
            torch.tensor([0, 1, 2, 4]),
            torch.tensor(peaked(1, 3, 3, 3)),
            torch.tensor([0.5, 0.0, 0.0, LAST_COIN], dtype=torch.float64),
            torch.tensor([0, 4]),
            temperature=torch.tensor([temperature]),
            impl=impl,
            check=False,
        )
        assert outcome(verdict) == ([0, 1, -1, -1], [1], [3], [Status.TREE_PRUNED])


@by_impl
def test_no_sequences(impl: str) -> None:
    assert outcome(run([], torch.empty(0, dtype=torch.int32), torch.empty(0, 5), [], impl=impl, row_start=[0])) == (
        [], [], [], [],
    )  # fmt: skip


@by_impl
@by_rule
def test_more_than_64_rows(impl: str, proposal: str) -> None:
    # A chain of 150 rows whose tokens are the target's: all accepted; token 0 has nearly all mass everywhere.
    rows = 150
    logits, draft = torch.tensor(peaked(0)).repeat(rows, 1), torch.zeros(rows, 5)
    verdict = run(range(-1, rows - 1), [0] * rows, logits, [0.5] * rows, impl=impl, **drafts(proposal, draft))
    assert outcome(verdict) == (list(range(rows)), [rows - 1], [0], [0])


# Bad rows


@by_impl
@by_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("values", "bit"),
    [
        ([NAN] * 5, Status.TARGET_NOT_FINITE),
        ([0, 0, 0, 0, NAN], Status.TARGET_NOT_FINITE),
        ([0, 0, INF, 0, 0], Status.TARGET_NOT_FINITE),
        ([-INF] * 5, Status.TARGET_EMPTY),
    ],
    ids=["NaN row", "one NaN", "+inf", "all -inf"],
)
def test_a_bad_target_row_is_fatal_only_on_the_accepted_path(impl, proposal, dtype, temperature, values, bit) -> None:
    #  0 -> 1 (1) -> 3 (2), 0 -> 2 (2); row 1 is on the path, row 2 is not
    options = {"impl": impl, "temperature": temperature, **drafts(proposal, torch.zeros(4, 5))}
    for row, want in {0: ([0, -1, -1, -1], [0], [-1], [bit]), 1: ([0, 1, -1, -1], [1], [-1], [bit])}.items():
        logits = torch.tensor(peaked(1, 2, 0, 3)).to(dtype)
        logits[row] = torch.tensor(values)
        assert outcome(run([-1, 0, 0, 1], [0, 1, 2, 2], logits, [0.5, 0, 0, 0], **options)) == want
        with pytest.raises(ValueError, match=rf"sequence 0 of 1: {bit.name}"):
            run([-1, 0, 0, 1], [0, 1, 2, 2], logits, [0.5, 0, 0, 0], check=True, **options)
    logits = torch.tensor(peaked(1, 2, 0, 3)).to(dtype)
    logits[2] = torch.tensor(values)
    assert outcome(run([-1, 0, 0, 1], [0, 1, 2, 2], logits, [0.5, 0, 0, 0], **options)) == (
        [0, 1, 3, -1], [2], [3], [0],
    )  # fmt: skip


@by_impl
def test_a_bad_sequence_leaves_its_batch_mates_alone(impl: str) -> None:
    logits = torch.full((2, 20_000), NAN)
    logits[1] = 0.0
    logits[1, 17] = 99.0
    for temperature in ([0.0, 0.0], [1.0, 1.0], [1.0, 0.0]):
        verdict = run([-1, -1], [0, 0], logits, [0.5, 0.5], impl=impl, row_start=[0, 1, 2], temperature=temperature)
        assert outcome(verdict) == ([0, 0], [0, 0], [-1, 17], [Status.TARGET_NOT_FINITE, 0])


@by_impl
@pytest.mark.parametrize("proposal", RULES[1:])
@pytest.mark.parametrize("values", [[NAN] * 3, [0, NAN, 0], [INF, 0, 0], [-INF] * 3], ids=str)
def test_a_bad_draft_row_rejects_its_children_and_the_target_row_decides(impl, proposal, values) -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    draft = torch.zeros(2, 3)
    draft[0] = torch.tensor(values)
    for coin, token in ((0.0, 0), (0.5, 1), (LAST_COIN, 2)):
        verdict = run([-1, 0], [0, 1], logits, [coin, 0.0], impl=impl, proposal=proposal, draft_logits=draft)
        assert outcome(verdict) == ([0, -1], [0], [token], [Status.DRAFT_INVALID])
    # Without a child to judge the draft row is not looked at.
    draft = draft.flip(0)
    assert outcome(run([-1, 0], [0, 0], logits, [0.0, 0.0], impl=impl, proposal=proposal, draft_logits=draft)) == (
        [0, 1], [1], [0], [0],
    )  # fmt: skip
