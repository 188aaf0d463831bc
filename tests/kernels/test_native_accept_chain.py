"""The compiled accept_chain against the reference on random batches, bad rows included."""

import pytest
import torch
from chain_cases import DTYPES, LAST_COIN, random_chains

from viasd_kernels import ChainVerdict, Status, accept_chain

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


def run(batch: dict, impl: str, stretch: float = 1.0) -> ChainVerdict:
    coins = (batch["uniforms"] * stretch).clamp(max=LAST_COIN)
    return accept_chain(**batch | {"uniforms": coins}, impl=impl, check=False)


def same_sequences(left: ChainVerdict, right: ChainVerdict) -> torch.Tensor:
    return torch.stack([a == b for a, b in zip(left, right, strict=True)]).all(0)


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "no draft"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(dtype: torch.dtype, has_draft: bool) -> None:
    batch = random_chains(3, dtype, 2000, 37)
    if not has_draft:
        batch["draft_logits"] = None
    expected, found = run(batch, "reference"), run(batch, "native")
    # Sequences within 1e-6 of a decision boundary: their outcome changes with coins that much smaller or larger.
    decided = same_sequences(run(batch, "native", 1 - 1e-6), run(batch, "native", 1 + 1e-6))
    assert int((~decided).sum()) <= 2
    assert same_sequences(expected, found)[decided].all()
    seen = {bit for status in expected.status.tolist() for bit in Status if status & bit}
    assert {Status.TARGET_NOT_FINITE, Status.TARGET_EMPTY, Status.TOKEN_OUT_OF_RANGE} <= seen
    assert not has_draft or {Status.DRAFT_INVALID, Status.DRAFT_ZERO} <= seen
    assert (expected.num_accepted > 2).any()


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float64], ids=str)
def test_target_and_draft_of_different_dtypes(target_dtype: torch.dtype) -> None:
    batch = random_chains(4, torch.float32, 500, 11)
    batch["target_logits"] = batch["target_logits"].to(target_dtype)
    batch["draft_logits"] = batch["draft_logits"].to(torch.float16 if target_dtype == torch.float64 else torch.float64)
    assert same_sequences(run(batch, "reference"), run(batch, "native")).all()


def test_equals_the_reference_on_a_large_vocabulary_and_with_strides() -> None:
    batch = random_chains(5, torch.float32, 12, 150_001)
    expected = run(batch, "reference")
    assert same_sequences(expected, run(batch, "native")).all()
    for name in ("target_logits", "draft_logits"):
        batch[name] = torch.stack([batch[name], -batch[name]], 1)[:, 0]
    assert same_sequences(expected, run(batch, "native")).all()


def test_an_empty_residual_falls_back_to_the_target_row() -> None:
    # A coin of 1 is outside the contract; it reaches the branch that rounding reaches once in 10^7 rows.
    one_hot = torch.tensor([[0.0, float("-inf")]]).repeat(2, 1)
    for draft in (one_hot, None):
        for impl in ("reference", "native"):
            verdict = accept_chain(
                torch.tensor([0, 0]),
                one_hot,
                torch.tensor([0.5, 1.0], dtype=torch.float64),
                torch.tensor([0, 2]),
                temperature=torch.ones(1),
                draft_logits=draft,
                impl=impl,
                check=False,
            )
            assert [field.tolist() for field in verdict] == [[0], [0], [Status.RESIDUAL_EMPTY]]


def test_refuses_a_wrong_row_start_even_unchecked() -> None:
    batch = random_chains(6, torch.float32, 2, 5)
    for row_start in ([0, 1, 99], [1, 1, len(batch["row_tokens"])], [0, 9, len(batch["row_tokens"])]):
        with pytest.raises(ValueError, match="row_start"):
            run(batch | {"row_start": torch.tensor(row_start)}, "native")
