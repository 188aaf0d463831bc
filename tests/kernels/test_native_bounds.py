"""What would lead outside the tensors: refused by the compiled code itself, with check=False."""

from __future__ import annotations

import pytest
import torch
from native_cases import MIXED, native_decoder

from viasd_kernels.layer_skip import KVPool, KVSlots, SkipDecoder
from viasd_kernels.tree_verify import tree_attention

NUM_SLOTS = 12
SLOTS = [[4, 5, 6, 7, -1], [0, 1, -1, -1, -1]]  # 2 of context and 2 rows, 1 of context and 1 row
FAR = 2**62

WRONG_PLACES = [
    ({"row_start": [0, 2, 4]}, "row_start must run from 0"),
    ({"row_start": [0, 4, 3]}, "row_start must run from 0"),
    ({"row_start": [-1, 2, 3]}, "row_start must run from 0"),
    ({"row_start": [0, -FAR, 3]}, "row_start must run from 0"),
    ({"context_len": [2, -1]}, "context_len must be >= 0"),
    ({"context_len": [4, 1]}, "at most max_len"),
    ({"context_len": [2, FAR]}, "at most max_len"),
    ({"context_len": [2**63 - 1, 1]}, "at most max_len"),
    ({"slots": [[4, 5, 6, 12, -1], SLOTS[1]]}, "slots must be in"),
    ({"slots": [[4, -1, 6, 7, -1], SLOTS[1]]}, "slots must be in"),
    ({"slots": [SLOTS[0], [0, -(2**31), -1, -1, -1]]}, "slots must be in"),
    ({"context_len": [2, 2]}, "slots must be in"),
]
by_wrong_place = pytest.mark.parametrize(("changes", "message"), WRONG_PLACES, ids=str)


def tensors(changes: dict[str, list]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = {"slots": SLOTS, "context_len": [2, 1], "row_start": [0, 2, 3], **changes}
    slots, context_len, row_start = (torch.tensor(arguments[name]) for name in ("slots", "context_len", "row_start"))
    return slots.int(), context_len, row_start


@pytest.fixture(scope="module")
def decoder() -> SkipDecoder:
    return native_decoder()


def forward(decoder: SkipDecoder, pool: KVPool, changes: dict[str, list], **options) -> torch.Tensor:
    slots, context_len, row_start = tensors(changes)
    tokens = options.pop("tokens", torch.tensor([1, 2, 3]))
    positions = options.pop("positions", torch.tensor([2, 3, 1]))
    kv = KVSlots(pool, slots, context_len)
    return decoder.forward(tokens, positions, row_start, kv, check=False, **options).logits


@by_wrong_place
def test_a_decoder_refuses_wrong_places(decoder: SkipDecoder, changes: dict[str, list], message: str) -> None:
    pool = decoder.new_pool(NUM_SLOTS)
    with pytest.raises(ValueError, match=message):
        forward(decoder, pool, changes)
    assert not pool.keys.any()
    assert forward(decoder, pool, {}).isfinite().all()


@pytest.mark.parametrize("row", [-1, 3, FAR, -FAR])
def test_a_decoder_refuses_logits_of_rows_that_are_not_there(decoder: SkipDecoder, row: int) -> None:
    with pytest.raises(ValueError, match=r"logits_rows must be in \[0, R\)"):
        forward(decoder, decoder.new_pool(NUM_SLOTS), {}, logits_rows=torch.tensor([0, row]))


def test_a_decoder_without_rows_refuses_them_too(decoder: SkipDecoder) -> None:
    nothing = torch.tensor([], dtype=torch.int64)
    rows = {"tokens": nothing, "positions": nothing, "logits_rows": torch.tensor([0])}
    with pytest.raises(ValueError, match=r"logits_rows must be in \[0, R\)"):
        forward(decoder, decoder.new_pool(NUM_SLOTS), {"row_start": [0, 0, 0]}, **rows)


@pytest.mark.parametrize("parents", [[-1, 1, -1], [-1, FAR, 0], [0, -FAR, -1], [5, 5, 5]], ids=str)
def test_wrong_links_lead_nowhere(decoder: SkipDecoder, parents: list[int]) -> None:
    pool = decoder.new_pool(NUM_SLOTS)
    assert forward(decoder, pool, {}, parents=torch.tensor(parents)).isfinite().all()


def test_wild_tokens_and_positions_are_no_indices(decoder: SkipDecoder) -> None:
    pool = decoder.new_pool(NUM_SLOTS)
    wild = {"tokens": torch.tensor([FAR, -FAR, MIXED.vocab_size]), "positions": torch.tensor([FAR, -FAR, -1])}
    assert forward(decoder, pool, {}, **wild).isfinite().all()


def test_a_strided_pool_is_refused(decoder: SkipDecoder) -> None:
    pool = decoder.new_pool(NUM_SLOTS)
    pool.keys = decoder.new_pool(2 * NUM_SLOTS).keys[:, ::2]
    with pytest.raises(ValueError, match=r"kv\.pool must be contiguous"):
        forward(decoder, pool, {})


def attend(changes: dict[str, list], ancestors: list[list[int]], heads: int = 4, dim: int = 6) -> torch.Tensor:
    pool = torch.ones(NUM_SLOTS, 2, dim)
    slots, context_len, row_start = tensors(changes)
    inputs = (torch.ones(3, heads, dim), pool, pool, slots, context_len, row_start, torch.tensor(ancestors))
    return tree_attention(*inputs, scale=1.0, window=2, impl="native", check=False)


@by_wrong_place
def test_attention_refuses_wrong_places(changes: dict[str, list], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(changes, [[0], [1], [0]])


@pytest.mark.parametrize("ancestors", [[[-1]] * 3, [[-1, -1, -1]] * 3, [[0, 1, 0], [2, 0, 4], [8, 0, -1]]], ids=str)
def test_bits_for_rows_that_are_not_there_lead_nowhere(ancestors: list[list[int]]) -> None:
    torch.testing.assert_close(attend({}, ancestors), torch.ones(3, 4, 6))


def test_attention_without_heads_or_dimensions() -> None:
    assert attend({}, [[0], [1], [0]], heads=0).shape == (3, 0, 6)
    assert attend({}, [[0], [1], [0]], dim=0).shape == (3, 4, 0)
