"""What a SkipDecoder, its configuration, its weights and its pool refuse, and how the pool grows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from viasd_kernels.layer_skip import (
    DecoderConfig,
    KVPool,
    KVSlots,
    LayerConfig,
    RopeConfig,
    SkipDecoder,
    weight_shapes,
)

CONFIG = DecoderConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    layers=(LayerConfig(), LayerConfig(window=3)),
    qkv_bias=True,
)


def random_weights(config: DecoderConfig = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(config).items()}


@pytest.fixture
def decoder() -> SkipDecoder:
    return SkipDecoder(random_weights(), CONFIG)


def forward(decoder: SkipDecoder, **changes) -> torch.Tensor:
    """A pass of sequences with 2 and 1 rows, 1 and 0 slots of context, after these changes."""
    arguments = {
        "tokens": torch.tensor([3, 4, 5]),
        "positions": torch.tensor([1, 2, 0]),
        "row_start": torch.tensor([0, 2, 3]),
        "kv": decoder.new_pool(6).place([[5], []], [0, 3, 1], [0, 2, 3]),
        **changes,
    }
    return decoder.forward(**arguments).logits


def placed(decoder: SkipDecoder, context: list[list[int]], rows: list[int]) -> KVSlots:
    return decoder.new_pool(6).place(context, rows, [0, 2, 3])


def test_index_dtypes_do_not_matter(decoder: SkipDecoder) -> None:
    expected = forward(decoder)
    kv = decoder.new_pool(6).place([[5], []], [0, 3, 1], [0, 2, 3])
    wide = dataclasses.replace(kv, slots=kv.slots.long(), context_len=kv.context_len.long())
    changes = {
        "tokens": torch.tensor([3, 4, 5], dtype=torch.int32),
        "positions": torch.tensor([1, 2, 0], dtype=torch.int32),
        "row_start": torch.tensor([0, 2, 3], dtype=torch.int32),
        "parents": torch.tensor([-1, 0, -1], dtype=torch.int32),
        "kv": wide,
    }
    assert torch.equal(forward(decoder, **changes), expected)
    assert torch.equal(forward(decoder, **changes, check=False), expected)


def test_ids_out_of_range_are_never_used_as_an_index(decoder: SkipDecoder) -> None:
    wild = forward(decoder, tokens=torch.tensor([3, 4, 2**40]), check=False)
    unused = forward(decoder, tokens=torch.tensor([3, 4, -1]))
    assert torch.equal(wild, unused)


def test_no_rows_and_no_sequences(decoder: SkipDecoder) -> None:
    nothing = torch.tensor([], dtype=torch.int64)
    for count in (0, 2):
        row_start = [0] * (count + 1)
        kv = decoder.new_pool(4).place([[1]] * count, [], row_start)
        output = decoder.forward(nothing, nothing, torch.tensor(row_start), kv)
        assert output.logits.shape == (0, 11)
        assert output.hidden.shape == (0, 8)


def test_a_pass_leaves_no_graph_behind(decoder: SkipDecoder) -> None:
    weights = {name: weight.requires_grad_() for name, weight in random_weights().items()}
    assert not forward(SkipDecoder(weights, CONFIG)).requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.tensor([3, 11, 5])}, r"tokens must be in \[-1, 11\), got 11"),
        ({"positions": torch.tensor([1, -2, 0])}, "positions must be >= 0, got -2"),
        ({"positions": torch.tensor([1, 2])}, r"positions must have shape \[3\], got \[2\]"),
        ({"row_start": torch.tensor([0, 2, 2])}, "row_start must run from 0 to the number of rows, 3"),
        ({"row_start": torch.tensor([0, 3])}, r"row_start must have shape \[3\]"),
        ({"parents": torch.tensor([-1, 1, -1])}, "the parent of row 1 of sequence 0 must be in"),
        ({"parents": torch.tensor([-1, 0, 0])}, "the parent of a sequence's first row must be -1"),
        ({"logits_rows": torch.tensor([3])}, r"logits_rows must be in \[0, 3\), got 3"),
        ({"capture_layers": (3,)}, r"capture_layers must be in \[0, 2\], got 3"),
        ({"route": [(True, True)]}, "route must have a pair for each of 2 layers"),
        ({"row_route": torch.ones(3, 1, 2, dtype=torch.bool)}, r"row_route must have shape \[any, 2, 2\]"),
        ({"row_route": torch.ones(2, 2, 2, dtype=torch.bool)}, r"row_route must have shape \[3, 2, 2\]"),
        (
            {"route": [(True, True)] * 2, "row_route": torch.ones(3, 2, 2, dtype=torch.bool)},
            "route must be None where row_route is given",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(decoder: SkipDecoder, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(decoder, **changes)


@pytest.mark.parametrize(
    ("context", "rows", "message"),
    [
        ([[5], []], [0, 6, 1], r"kv.slots must be in \[0, 6\), got 6"),
        ([[-1], []], [0, 3, 1], r"kv.slots must be in \[0, 6\), got -1"),
        ([[5], []], [0, 1, 1], "must give every row a slot of its own"),
        ([[5], [2]], [0, 5, 1], "must not put a row into a slot of some context, got 5"),
        ([[5], [2]], [0, 2, 1], "must not put a row into a slot of some context, got 2"),
    ],
    ids=["past the pool", "negative", "shared by rows", "own context", "another context"],
)
def test_wrong_slots_are_refused(decoder: SkipDecoder, context: list, rows: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(decoder, kv=placed(decoder, context, rows))


def test_a_context_may_be_shared(decoder: SkipDecoder) -> None:
    assert forward(decoder, kv=placed(decoder, [[5], [5]], [0, 3, 1])).isfinite().all()


def test_a_context_that_does_not_fit_is_refused(decoder: SkipDecoder) -> None:
    kv = dataclasses.replace(placed(decoder, [[5], []], [0, 3, 1]), context_len=torch.tensor([2, 0]))
    with pytest.raises(ValueError, match=r"kv.context_len must be >= 0 and, with the sequence's rows, at most max_len"):
        forward(decoder, kv=kv)


def test_a_pool_of_another_shape_or_dtype_is_refused(decoder: SkipDecoder) -> None:
    other = KVPool(dataclasses.replace(CONFIG, num_kv_heads=4), 6)
    with pytest.raises(ValueError, match=r"kv.pool.keys must have shape \[2, any, 2, 4\], got \[2, 6, 4, 4\]"):
        forward(decoder, kv=other.place([[5], []], [0, 3, 1], [0, 2, 3]))
    other = KVPool(CONFIG, 6, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"kv.pool.keys must be torch.float32, got torch.bfloat16"):
        forward(decoder, kv=other.place([[5], []], [0, 3, 1], [0, 2, 3]))


def test_an_implementation_that_is_not_there_is_refused() -> None:
    assert SkipDecoder(random_weights(), CONFIG).implementation in ("reference", "native")
    with pytest.raises(NotImplementedError, match="SkipDecoder: no 'triton' implementation for cpu"):
        SkipDecoder(random_weights(), CONFIG, impl="triton")


def test_wrong_weights_are_refused() -> None:
    weights = random_weights()
    del weights["layers.1.qkv_bias"]
    weights["layers.1.q_bias"] = torch.zeros(16)
    message = r"missing=\['layers.1.qkv_bias'\], unknown=\['layers.1.q_bias'\]"
    with pytest.raises(ValueError, match=message):
        SkipDecoder(weights, CONFIG)
    with pytest.raises(ValueError, match=r"layers.0.mlp_out must have shape \[8, 12\], got \[12, 8\]"):
        SkipDecoder({**random_weights(), "layers.0.mlp_out": torch.zeros(12, 8)}, CONFIG)
    with pytest.raises(TypeError, match=r"final_norm must be torch.float32, got torch.float64"):
        SkipDecoder({**random_weights(), "final_norm": torch.zeros(8, dtype=torch.float64)}, CONFIG)


def test_a_tied_head_is_the_embedding() -> None:
    config = dataclasses.replace(CONFIG, tied_head=True)
    weights = random_weights(config)
    assert "head" not in weights
    tied = SkipDecoder(weights, config)
    untied = SkipDecoder({**weights, "head": weights["embedding"].clone()}, CONFIG)
    assert torch.equal(forward(tied), forward(untied))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
        ({"head_dim": 0}, "head_dim must be finite and > 0, got 0"),
        ({"norm_eps": float("nan")}, "norm_eps must be finite and > 0"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap must be finite and > 0"),
        ({"activation": "relu"}, "activation must be one of 'silu_mul', 'gelu_tanh_mul', got 'relu'"),
        ({"layers": ()}, "layers must hold at least one LayerConfig"),
        ({"head_dim": 5}, "rotary_dim must be even and at most head_dim = 5, got 5"),
        ({"layers": (LayerConfig(rope=RopeConfig(rotary_dim=6)),)}, "at most head_dim = 4, got 6"),
        (
            {"layers": (LayerConfig(rope=RopeConfig(kind="given", frequencies=(1.0, 0.5, 0.1))),)},
            "must have rotary_dim / 2 = 2 frequencies, got 3",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_configuration_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_a_wrong_layer_or_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="window must be >= 1 or None, got 0"):
        LayerConfig(window=0)
    with pytest.raises(ValueError, match="kind must be one of 'default', 'linear', 'llama3', 'given', got 'yarn'"):
        RopeConfig(kind="yarn")
    with pytest.raises(ValueError, match="rotary_dim must be even and >= 2, or None, got 3"):
        RopeConfig(rotary_dim=3)
    with pytest.raises(ValueError, match=r"high_freq_factor must be above low_freq_factor = 4.0, got 4.0"):
        RopeConfig(kind="llama3", low_freq_factor=4.0)
    with pytest.raises(ValueError, match="theta must be finite and > 0"):
        RopeConfig(theta=0.0)


def test_a_pool_grows_and_keeps_what_it_holds() -> None:
    pool = KVPool(CONFIG, 3)
    pool.keys.copy_(torch.randn(pool.keys.shape))
    keys = pool.keys
    pool.reserve(2)
    assert pool.keys is keys
    pool.reserve(4)
    assert pool.keys.shape == pool.values.shape == (2, 128, 2, 4)
    assert torch.equal(pool.keys[:, :3], keys)
    assert not pool.keys[:, 3:].any()
    pool.reserve(300)
    assert pool.num_slots == 384
    pool.reserve(385)
    assert pool.num_slots == 512, "a quarter at least, in blocks of 128"
    with pytest.raises(ValueError, match="num_slots must be >= 0, got -1"):
        KVPool(CONFIG, -1)


def test_placing_lists_context_then_rows() -> None:
    kv = KVPool(CONFIG, 9).place([[8, 2], [], [4]], [1, 0, 7], [0, 2, 2, 3])
    assert kv.slots.tolist() == [[8, 2, 1, 0], [-1] * 4, [4, 7, -1, -1]]
    assert kv.context_len.tolist() == [2, 0, 1]
    assert kv.slots.dtype == kv.context_len.dtype == torch.int32
