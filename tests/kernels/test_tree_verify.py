"""verify_tree: the greedy walk, single steps of the three rules, its arguments. Faults and the law: files beside."""

import math

import pytest
import torch
from tree_cases import DTYPES, INF, LAST_COIN, NAN, RULES, by_impl, by_rule, drafts, outcome, peaked, run

from viasd_kernels import FATAL, Status
from viasd_kernels.tree_verify import build_tree, verify_tree

# Greedy


@by_impl
@pytest.mark.parametrize("given", [False, True], ids=["from logits", "full_argmax"])
def test_greedy_walks_to_the_lowest_numbered_equal_child_and_no_further(impl: str, given: bool) -> None:
    #        0 -> 1 (3), 2 (3), 3 (4); 1 -> 4 (0); 2 -> 5 (1): after the root 3, after row 1 token 1
    parents, tokens = [-1, 0, 0, 0, 1, 2], [2, 3, 3, 4, 0, 1]
    argmax = [3, 1, 1, 0, 0, 2]
    target = {"full_argmax": argmax} if given else {}
    logits = None if given else peaked(*argmax)
    verdict = run(parents, tokens, logits, [0.5] * 6, impl=impl, temperature=0.0, **target)
    # Row 1 is taken, not its duplicate row 2; its child does not fit, and there is no way back to row 2.
    assert outcome(verdict) == ([0, 1, -1, -1, -1, -1], [1], [1], [0])


@by_impl
def test_path_lists_the_root_and_the_accepted_rows_of_each_sequence(impl: str) -> None:
    parents, tokens = [-1, 0, 0, 1, 2, -1, -1, 0, 0], [0, 1, 2, 3, 3, 0, 0, 1, 2]
    argmax = [2, 0, 3, 0, 4, 1, 2, 0, 1]
    verdict = run(
        parents, tokens, None, [0.5] * 9, impl=impl, row_start=[0, 5, 5, 6, 9, 9], temperature=0.0, full_argmax=argmax
    )
    assert verdict.path.tolist() == [0, 2, 4, -1, -1, 0, 0, 2, -1]
    assert verdict.num_accepted.tolist() == [2, 0, 0, 1, 0]
    assert verdict.next_token.tolist() == [4, -1, 1, 1, -1]
    assert verdict.status.tolist() == [0] * 5
    assert {field.dtype for field in verdict} == {torch.int32}


@by_impl
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_ties_go_to_the_lower_id(impl: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -INF], [-0.0, 0.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    verdict = run([-1, 0, 0], [0, 2, 1], logits, [0.5] * 3, impl=impl, temperature=0.0)
    assert outcome(verdict) == ([0, 2, -1], [1], [0], [0])


@by_impl
@by_rule
def test_greedy_rows_of_a_mixed_batch_read_neither_coins_nor_drafts(impl: str, proposal: str) -> None:
    # Field case: temperature 0 beside 1, logits [1, 1, 0]: the greedy sequence gives id 0 whatever the coin.
    logits = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    draft = torch.full((4, 3), NAN)
    draft[2:] = 0.0
    for coin in (0.0, 0.6, LAST_COIN):
        verdict = run(
            [-1, 0, -1, 0],
            [0, 0, 0, 2],
            logits,
            [coin, coin, 0.6, LAST_COIN],
            impl=impl,
            row_start=[0, 2, 4],
            temperature=[0.0, 1.0],
            **drafts(proposal, draft),
        )
        assert verdict.next_token[0] == 0
        assert verdict.num_accepted.tolist() == [1, 0]
        assert verdict.status.tolist() == [0, 0]
        assert verdict.next_token[1] in (0, 1)


@by_impl
def test_temperatures_are_per_sequence_and_divide_the_logits(impl: str) -> None:
    logits = torch.tensor([[0.0, 1.0]]).repeat(4, 1).double()
    temperature = [0.25, 1.0, 4.0, 1e-30]
    masses = [1 / (1 + math.exp(1 / t)) if t > 1e-3 else 0.0 for t in temperature]
    for shift, want in ((1e-6, 1), (-1e-6, 0)):
        coins = [min(max(mass + shift, 0.0), LAST_COIN) for mass in masses]
        verdict = run([-1] * 4, [0] * 4, logits, coins, impl=impl, row_start=[0, 1, 2, 3, 4], temperature=temperature)
        assert verdict.next_token.tolist() == [want, want, want, 1]


@by_impl
def test_given_argmax_outside_the_vocabulary_is_fatal(impl: str) -> None:
    for bad, logits in ((-1, None), (5, peaked(1, 1, 1)), (2**31, peaked(1, 1, 1))):
        argmax = torch.tensor([1, bad, 0])
        verdict = run([-1, 0, 1], [0, 1, 2], logits, [0.5] * 3, impl=impl, temperature=0.0, full_argmax=argmax)
        assert outcome(verdict) == ([0, 1, -1], [1], [-1], [Status.TOKEN_OUT_OF_RANGE])


@by_impl
def test_a_sampled_sequence_without_logits_emits_nothing(impl: str) -> None:
    options = {"impl": impl, "row_start": [0, 1, 2], "temperature": [1.0, 0.0], "full_argmax": [3, 3]}
    verdict = run([-1, -1], [0, 0], None, [0.5] * 2, **options)
    assert outcome(verdict) == ([0, 0], [0, 0], [-1, 3], [Status.TARGET_EMPTY, 0])
    with pytest.raises(ValueError, match="full_logits may be None only at temperature 0"):
        run([-1, -1], [0, 0], None, [0.5] * 2, check=True, **options)


# Single steps of the three rules


@by_impl
@pytest.mark.parametrize("proposal", RULES[1:])
@pytest.mark.parametrize("width", [4, 2], ids=["d = 0 in the row", "id beyond Vd"])
def test_a_child_the_proposal_cannot_draw_is_rejected_and_changes_nothing(impl, proposal, width) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log().repeat(3, 1)
    draft = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).log().repeat(3, 1)[:, :width].contiguous()
    options = {"impl": impl, "proposal": proposal, "draft_logits": draft}
    # Row 1 cannot be drawn. Row 2 (token 1) is judged by r and d as they were: 0.2 / 0.5.
    for coin, accepted in ((0.4 - 1e-9, 1), (0.4 + 1e-9, 0)):
        verdict = run([-1, 0, 0], [0, 2, 1], logits, [0.0, 0.0, coin], **options)
        assert verdict.num_accepted.tolist() == [accepted]
        assert verdict.status.tolist() == [Status.DRAFT_ZERO]
    # Alone, it leaves the target row for the final token.
    for coin, token in ((0.1 - 1e-9, 0), (0.1 + 1e-9, 1), (0.3 - 1e-9, 1), (0.3 + 1e-9, 2), (0.6 + 1e-9, 3)):
        verdict = run([-1, 0, 0], [0, 2, -1], logits, [coin, 0.0, 0.0], **options)
        assert outcome(verdict) == ([0, -1, -1], [0], [token], [Status.DRAFT_ZERO])


@by_impl
def test_duplicate_siblings_are_judged_by_what_is_left(impl: str) -> None:
    logits = torch.tensor([[0.3, 0.7]], dtype=torch.float64).log().repeat(3, 1)
    draft = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log().repeat(3, 1)
    coins = [0.5, LAST_COIN, 0.0]
    # r(0) is 0 after the first rejection: coin 0 does not revive it. A repeat is no sign of a wrong proposal.
    for proposal in RULES:
        verdict = run([-1, 0, 0], [0, 0, 0], logits, coins, impl=impl, **drafts(proposal, draft))
        assert outcome(verdict) == ([0, -1, -1], [0], [1], [0])


@by_impl
@by_rule
def test_an_empty_residual_keeps_the_last_row_that_had_mass(impl: str, proposal: str) -> None:
    # A coin of 1 is outside the contract; it reaches the branch that rounding reaches once in 10^7 rows.
    logits = torch.tensor([[0.0, -INF, -INF]]).repeat(2, 1)
    verdict = run([-1, 0], [0, 0], logits, [0.5, 1.0], impl=impl, **drafts(proposal, logits))
    assert outcome(verdict) == ([0, -1], [0], [0], [Status.RESIDUAL_EMPTY])


@by_impl
@by_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_tokens_are_never_emitted_at_the_extreme_coins(impl: str, proposal: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    sequences, width, rows = 120, 7, 4
    logits = torch.randn(sequences * rows, width, generator=generator)
    masked = torch.rand(logits.shape, generator=generator) < 0.5
    masked[torch.arange(len(masked)), torch.randint(width, (len(masked),), generator=generator)] = False
    masked[:, 0] |= ~masked[:, 1:].all(1)
    masked[:, -1] |= ~masked[:, :-1].all(1)
    logits = logits.masked_fill(masked, -INF).to(dtype)
    tokens = torch.randint(width, (sequences * rows,), generator=generator)
    draft = torch.randn(logits.shape, generator=generator).to(dtype)
    coins = torch.tensor([0.0, LAST_COIN], dtype=torch.float64)[torch.randint(2, tokens.shape, generator=generator)]
    row_start = (torch.arange(sequences + 1) * rows).tolist()
    verdict = run(
        [-1, 0, 0, 1] * sequences, tokens, logits, coins, impl=impl, row_start=row_start, check=True,
        **drafts(proposal, draft),
    )  # fmt: skip
    assert (verdict.num_accepted > 0).any()
    for b in range(sequences):
        path = verdict.path[b * rows : b * rows + int(verdict.num_accepted[b]) + 1].tolist()
        emitted = [*tokens[[b * rows + row for row in path[1:]]].tolist(), int(verdict.next_token[b])]
        for node, token in zip(path, emitted, strict=True):
            assert 0 <= token < width
            assert not masked[b * rows + node, token]


@by_impl
def test_the_final_token_is_the_first_whose_running_sum_exceeds_the_coin(impl: str) -> None:
    logits = torch.tensor([[0.0, -INF, 0.0, 0.0, 0.0, -INF]])
    # 1.0 is outside the contract: no running sum exceeds it, and the highest id with mass is taken.
    for coin, token in {0.0: 0, 0.25: 2, 0.5: 3, 0.75: 4, LAST_COIN: 4, 1.0: 4}.items():
        assert outcome(run([-1], [0], logits, [coin], impl=impl)) == ([0], [0], [token], [0])


# Inputs as they come


@by_impl
@by_rule
def test_strides_and_integer_dtypes_do_not_matter(impl: str, proposal: str) -> None:
    generator = torch.Generator().manual_seed(3)
    wide, draft = torch.randn(8, 2, 11, generator=generator), torch.randn(8, 30, generator=generator)
    parents, row_start = torch.tensor([-1, 0, 0, 1, 2, -1, 0, 0]), torch.tensor([0, 5, 8])
    tokens, coins = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]), torch.rand(8, generator=generator, dtype=torch.float64) / 4
    results = []
    for dtype in (torch.int32, torch.int64):
        for logits, draft_logits in (
            (wide[:, 1], draft[:, 3:12]),
            (wide[:, 1].contiguous(), draft[:, 3:12].contiguous()),
        ):
            starts = row_start.to(dtype)
            results.append(
                verify_tree(
                    build_tree(parents.to(dtype), starts, max_rows=5),
                    tokens.to(dtype),
                    logits,
                    coins,
                    starts,
                    temperature=torch.tensor([1.0, 0.7]),
                    impl=impl,
                    **drafts(proposal, draft_logits),
                )
            )
    assert all(outcome(result) == outcome(results[0]) for result in results)


def test_arguments_are_checked() -> None:
    parents, tokens, logits, coins = [-1, 0], [0, 1], torch.zeros(2, 5), [0.5, 0.5]
    good = {"impl": "auto", "check": True}
    draft = torch.zeros(2, 5)
    for message, arguments, options in [
        ("proposal must be one of", (parents, tokens, logits, coins), {"proposal": "nucleus"}),
        ("needs draft_logits", (parents, tokens, logits, coins), {"proposal": "with_replacement"}),
        ("draft_logits must be None", (parents, tokens, logits, coins), {"draft_logits": draft}),
        ("full_logits may be None only if", (parents, tokens, None, coins), {"temperature": 0.0}),
        (r"full_logits must have shape \[2, any\], got \[3, 5\]", (parents, tokens, torch.zeros(3, 5), coins), {}),
        ("full_logits must have 1 to", (parents, tokens, torch.zeros(2, 0), coins), {}),
        (
            "draft_logits must have 1 to V = 4 columns, got 5",
            (parents, tokens, torch.zeros(2, 4), coins),
            {"proposal": "with_replacement", "draft_logits": draft},
        ),
        ("contiguous in its last dimension", (parents, tokens, torch.zeros(5, 2).T, coins), {}),
        (r"uniforms must be in \[0, 1\)", (parents, tokens, logits, [0.5, 1.0]), {}),
        (r"uniforms must be in \[0, 1\)", (parents, tokens, logits, [0.5, NAN]), {}),
        ("temperature must be finite and >= 0", (parents, tokens, logits, coins), {"temperature": -1.0}),
        ("temperature must be finite and >= 0", (parents, tokens, logits, coins), {"temperature": INF}),
        ("row_start must run from 0", (parents, tokens, logits, coins), {"row_start": [0, 1]}),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*arguments, **good | options)
    with pytest.raises(TypeError, match=r"full_logits must be torch\.float32 or"):
        run(parents, tokens, torch.zeros(2, 5, dtype=torch.int32), coins, **good)
    with pytest.raises(TypeError, match=r"row_tokens must be .*, got torch\.float32"):
        run(parents, [0.0, 1.0], logits, coins, **good)
    with pytest.raises(NotImplementedError, match="no 'triton' implementation for cpu"):
        run(parents, tokens, logits, coins, impl="triton")


def test_fatal_bits_are_those_of_the_status_page() -> None:
    assert Status.TARGET_NOT_FINITE | Status.TARGET_EMPTY | Status.TOKEN_OUT_OF_RANGE == FATAL
