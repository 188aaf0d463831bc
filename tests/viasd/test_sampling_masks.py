"""Settings and the masks that follow from them, against Transformers' own warpers."""

import re

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from viasd import InvalidInput, Sampling
from viasd.sampling import mask_logits, mask_rows


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_masks_equal_transformers(temperature, top_k, top_p, min_p):
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(None, logits)
    masked = mask_logits(logits, temperature, top_k, top_p, min_p)
    torch.testing.assert_close(masked / temperature, expected)
    assert (masked.isfinite().sum(-1) >= 1).all()


def test_each_sequence_has_its_own_masks_and_greedy_rows_stay():
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    settings = [Sampling(temperature=1.0, top_k=1), Sampling(temperature=0.0, top_k=1), Sampling(temperature=1.0)]
    masked = mask_rows(logits, settings, [0, 2, 4, 6])
    assert masked.isfinite().sum(-1).tolist() == [1, 1, 10, 10, 10, 10]
    assert torch.equal(logits, before)
    assert mask_rows(logits, settings[1:], [0, 2, 6]) is logits


def test_whole_numbers_are_numbers():
    assert Sampling(temperature=1, top_p=1, min_p=0) == Sampling(temperature=1.0)
    assert isinstance(Sampling(temperature=1).temperature, float)


def test_the_most_likely_token_stays_at_any_temperature():
    masked = mask_logits(torch.tensor([[-5.0, -6.0, -7.0]]), 1e-38, 2, 0.5, 0.1)
    assert masked.tolist() == [[-5.0, -torch.inf, -torch.inf]]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "warm"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", 1.5),
        ("eos_token_ids", ("a",)),
        ("eos_token_ids", [3]),
    ],
)
def test_values_out_of_range_are_named(setting, value):
    with pytest.raises(InvalidInput, match=f"^{setting} must be .*got {re.escape(repr(value))}"):
        Sampling(**{setting: value})
