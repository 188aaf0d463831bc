"""Penalties, bias, bad words and minimum length on single rows."""

import math

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from viasd import InvalidInput, Sampling
from viasd.sampling import edit_row

TOKENS = [3, 5, 3, 9, 5, 5, 1]  # of which the first 4 are the prompt
WIDTH = 12


def row(seed=0):
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("settings", "processor"),
    [
        ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
        ({"repetition_penalty": 0.6}, RepetitionPenaltyLogitsProcessor(0.6)),
        (
            {"bad_words": [[2], [5, 1, 7], [5, 4], [9, 5, 5, 1, 0]]},
            NoBadWordsLogitsProcessor([[2], [5, 1, 7], [5, 4], [9, 5, 5, 1, 0]]),
        ),
        ({"logit_bias": {0: 2.5, 11: -1.0}}, SequenceBiasLogitsProcessor([[[0], 2.5], [[11], -1.0]])),
        ({"min_new_tokens": 4, "eos_token_ids": (2, 6)}, MinNewTokensLengthLogitsProcessor(4, 4, [2, 6])),
        ({"min_new_tokens": 3, "eos_token_ids": (2, 6)}, MinNewTokensLengthLogitsProcessor(4, 3, [2, 6])),
    ],
    ids=lambda own: next(iter(own)) if isinstance(own, dict) else "",
)
def test_equals_transformers_processors(settings, processor):
    for seed in range(5):
        expected = processor(torch.tensor([TOKENS]), row(seed)[None].clone())[0]
        assert torch.allclose(edit_row(row(seed), Sampling(**settings), TOKENS, 4), expected)


def test_frequency_and_presence_count_the_output_alone():
    edited = edit_row(row(), Sampling(frequency_penalty=0.5, presence_penalty=2.0), TOKENS, 4)
    expected = row()
    expected[5] -= 2 * 0.5 + 2.0
    expected[1] -= 0.5 + 2.0
    assert torch.allclose(edited, expected)
    assert torch.equal(edit_row(row(), Sampling(presence_penalty=1.0), TOKENS, len(TOKENS)), row())


def test_all_together_in_their_order():
    settings = Sampling(
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias={3: 4.0, 7: -math.inf},
        bad_words=[[9]],
        min_new_tokens=10,
        eos_token_ids=(0,),
    )
    expected = row()
    for token in {1, 3, 5, 9}:
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    expected[5] -= 2
    expected[1] -= 1
    expected[3] += 4
    expected[[7, 9, 0]] = -math.inf
    assert torch.allclose(edit_row(row(), settings, TOKENS, 4), expected)


def test_rows_keep_dtype_masks_and_width_and_are_never_changed():
    settings = Sampling(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={11: 1.0}, bad_words=[[10]])
    given = row().bfloat16()
    given[3] = -math.inf
    before = given.clone()
    edited = edit_row(given, settings, TOKENS, 4)
    assert edited.dtype == torch.bfloat16
    assert edited[3] == -math.inf
    assert torch.equal(given, before)
    narrow = edit_row(row()[:6], settings, TOKENS, 4)  # a smaller drafter's row
    assert torch.allclose(narrow, edit_row(row(), settings, TOKENS, 4)[:6])
    assert edit_row(given, Sampling(), TOKENS, 4) is given


def test_settings_are_values():
    one = Sampling(logit_bias={2: 1, 1: 0.5}, bad_words=[[1, 2]], stop="x")
    other = Sampling(logit_bias=((1, 0.5), (2, 1.0)), bad_words=((1, 2),), stop=["x"])
    assert one == other
    assert hash(one) == hash(other)
    assert one.stop == ("x",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number > 0, got 0.0"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a finite number, got nan"),
        ({"presence_penalty": "1"}, "presence_penalty must be a finite number, got '1'"),
        ({"logit_bias": {1: math.inf}}, "logit_bias must map ids >= 0 to numbers below .inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must map"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must map"),
        ({"logit_bias": [1, 2]}, "logit_bias must map"),
        ({"bad_words": [[]]}, "bad_words must be sequences of ids"),
        ({"bad_words": [1, 2]}, "bad_words must be sequences of ids"),
        ({"bad_words": ["word"]}, "bad_words must be sequences of ids"),
        ({"min_new_tokens": -1}, "min_new_tokens must be an integer >= 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens must be at most max_new_tokens, 8, got 9"),
        ({"stop": [""]}, "stop must be a string or several, none of them empty"),
        ({"stop": 3}, "stop must be a string or several"),
        ({"logprobs": -1}, "logprobs must be None or an integer >= 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        Sampling(**settings)
