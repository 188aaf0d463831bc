"""Routes: a bypassed sub-layer is as if it were not there, a bypassed row keeps its bits, and slots keep theirs."""

from __future__ import annotations

import pytest
import torch
from hf_mapping import decoder_of, map_weights, tiny
from skip_sequences import LIMIT, Sequences, difference, plain, some_ids
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from viasd.models.hf_mapping import decoder_config
from viasd_kernels.layer_skip import SkipDecoder

pytestmark = pytest.mark.usefixtures("each_implementation")

FAMILIES = ["llama with biases", "qwen2, two windows", "qwen3", "gemma2", "gemma3"]
FULL = [(True, True)] * 4
SLIM = [(True, True), (False, True), (False, False), (True, True)]
SLIMMER = [(True, True), (False, False), (True, False), (True, True)]
NOTHING = [(False, False)] * 4


class Silence(nn.Module):
    """Takes the place of a norm or a projection that must yield nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def without(name: str, route: list[tuple[bool, bool]]) -> nn.Module:
    """The tiny model, with nothing added to the residual stream by what the route bypasses."""
    model = tiny(name)
    for layer, keeps in zip(model.model.layers, route, strict=True):
        for part, keep in zip((layer.self_attn.o_proj, layer.mlp.down_proj), keeps, strict=True):
            if not keep:
                # Post-norms map zeros to zeros, so this serves Gemma too.
                nn.init.zeros_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
    return model


def rows_of(routes: list[list[tuple[bool, bool]]]) -> torch.Tensor:
    """[R, L, 2]."""
    return torch.tensor(routes)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("route", [SLIM, SLIMMER, NOTHING], ids=["slim", "slimmer", "nothing kept"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_route_equals_the_model_without_those_sub_layers(name: str, route: list[tuple[bool, bool]]) -> None:
    ids = some_ids(14)
    expected = plain(without(name, route), ids)
    sequences = Sequences(decoder_of(tiny(name)))
    first = sequences.extend([ids[:9]], route=route).logits
    logits = torch.cat([first, sequences.run([ids[9:]], route=route).logits])
    assert difference(logits, expected) <= LIMIT
    assert difference(logits, plain(tiny(name), ids)) > 0.1


def test_whole_layers_bypassed_equal_a_model_that_lacks_them() -> None:
    model, ids = tiny("mistral"), some_ids(12)
    route = [(True, True), (False, False), (False, False), (True, True)]
    logits = Sequences(decoder_of(model)).run([ids], route=route).logits
    model.model.layers = nn.ModuleList([model.model.layers[0], model.model.layers[3]])
    model.config.num_hidden_layers = 2
    assert difference(logits, plain(model, ids)) <= LIMIT


class SeenTensors(TorchDispatchMode):
    """Notes the addresses of all tensors that operations take."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.addresses |= {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        return operation(*args, **(kwargs or {}))


def weights_of_bypassed(weights: dict[str, torch.Tensor], route: list[tuple[bool, bool]]) -> list[str]:
    names = (("attention", "qkv", "q_norm", "k_norm"), ("mlp", "gate_up"))
    prefixes = tuple(
        f"layers.{layer}.{name}"
        for layer, keeps in enumerate(route)
        for part, keep in zip(names, keeps, strict=True)
        for name in part
        if not keep
    )
    return [name for name in weights if name.startswith(prefixes)]


@pytest.mark.parametrize("by_row", [False, True], ids=["route", "row_route"])
@pytest.mark.parametrize("name", ["llama with biases", "gemma3"])
def test_a_sub_layer_that_no_row_keeps_is_not_run(name: str, by_row: bool) -> None:
    model, ids = tiny(name), some_ids(6)
    weights = map_weights(model)
    bypassed = weights_of_bypassed(weights, SLIM)
    sequences = Sequences(SkipDecoder(weights, decoder_config(model.config), impl="reference"))
    route = {"row_route": rows_of([SLIM] * 6)} if by_row else {"route": SLIM}
    with SeenTensors() as seen:
        sequences.run([ids], **route)
    for own, weight in weights.items():
        assert (weight.data_ptr() in seen.addresses) == (own not in bypassed), own


@pytest.mark.parametrize("name", ["llama with biases", "gemma3"])
def test_nothing_of_a_bypassed_sub_layers_weights_shows(name: str) -> None:
    model, ids = tiny(name), some_ids(6)
    weights, config = map_weights(model), decoder_config(model.config)
    expected = Sequences(SkipDecoder(weights, config)).run([ids], route=SLIM).logits
    for own in weights_of_bypassed(weights, SLIM):
        weights[own] = torch.full_like(weights[own], float("nan"))
    decoder = SkipDecoder(weights, config)
    assert torch.equal(Sequences(decoder).run([ids], route=SLIM).logits, expected)
    assert torch.equal(Sequences(decoder).run([ids], row_route=rows_of([SLIM] * 6)).logits, expected)
    assert Sequences(decoder).run([ids]).logits.isnan().any()


@pytest.mark.parametrize("name", FAMILIES)
def test_row_route_gives_every_sequence_its_own_route(name: str) -> None:
    routes = [SLIM, FULL, SLIMMER, NOTHING]
    whole = [some_ids(length, seed=length) for length in (6, 9, 13, 4)]
    decoder = decoder_of(tiny(name))
    sequences = Sequences(decoder, 4)
    rows = rows_of([route for route, ids in zip(routes, whole, strict=True) for _ in ids[:-3]])
    sequences.extend([ids[:-3] for ids in whole], row_route=rows)
    rows = rows_of([route for route in routes for _ in range(3)])
    logits = sequences.run([ids[-3:] for ids in whole], row_route=rows).logits.view(4, 3, -1)
    for own, route, ids in zip(logits, routes, whole, strict=True):
        assert difference(own, plain(without(name, route), ids)[-3:]) <= LIMIT


def test_a_row_may_be_slimmer_than_its_parent() -> None:
    """In one pass as in two: a full root, then slim rows that see the keys it wrote."""
    decoder, prompt, ids = decoder_of(tiny("gemma2")), some_ids(8), some_ids(4, seed=1)
    together = Sequences(decoder)
    together.extend([prompt])
    apart = Sequences(decoder)
    apart.extend([prompt])
    expected = torch.cat([apart.extend([ids[:1]]).logits, apart.run([ids[1:]], route=SLIM).logits])
    logits = together.run([ids], row_route=rows_of([FULL, SLIM, SLIM, SLIM])).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama with biases", "gemma3"])
def test_a_bypassed_row_is_bit_identical(name: str) -> None:
    """Signed zeros included, next to rows that keep the layer, and with NaN in what the layer yields."""
    model = tiny(name)
    with torch.no_grad():
        model.model.embed_tokens.weight[7, ::2] = -0.0
    weights = map_weights(model)
    weights["layers.1.attention_out"][3] = float("nan")
    decoder = SkipDecoder(weights, decoder_config(model.config))
    bypass = [(False, False), (False, False), (True, True), (True, True)]
    rows = rows_of([FULL, FULL, bypass, bypass])
    output = Sequences(decoder, 2).run([[5, 6], [7, 8]], row_route=rows, capture_layers=(0, 1, 2))
    entry, middle, after = (output.captured[layer] for layer in (0, 1, 2))
    assert same_bits(entry[2:], middle[2:])
    assert same_bits(middle[2:], after[2:])
    assert (entry[2, ::2].signbit() & (entry[2, ::2] == 0)).all()
    assert output.logits[2:].isfinite().all()
    assert not torch.equal(entry[:2], middle[:2])
    assert after[:2].isnan().any()


def test_a_slot_changes_only_in_the_layers_that_its_row_keeps() -> None:
    decoder = decoder_of(tiny("llama"))
    sequences = Sequences(decoder, 2)
    for store in (sequences.pool.keys, sequences.pool.values):
        store.fill_(7.5)
    sequences.run([[5, 6], [8]], row_route=rows_of([FULL, SLIM, SLIMMER]))
    slots = [sequences.row_slots[0][0], sequences.row_slots[0][1], sequences.row_slots[1][0]]
    for store in (sequences.pool.keys, sequences.pool.values):
        written = (store != 7.5).flatten(2).any(-1)
        assert [written[:, slot].tolist() for slot in slots] == [
            [attention for attention, _ in route] for route in (FULL, SLIM, SLIMMER)
        ]
        assert written.sum() == 4 + 2 + 3


def test_full_logits_are_right_after_slim_keys_were_rewritten() -> None:
    model, ids = tiny("gemma3"), some_ids(13)
    sequences = Sequences(decoder_of(model))
    sequences.extend([ids[:7]])
    sequences.run([ids[7:]], route=SLIM)
    sequences.keep([[]])
    assert difference(sequences.run([ids[7:]]).logits, plain(model, ids)[7:]) <= LIMIT


def test_a_kept_attention_under_a_parent_that_bypasses_it_is_refused() -> None:
    sequences = Sequences(decoder_of(tiny("llama")))
    with pytest.raises(ValueError, match="must keep layer 1's attention in the parent of row 2 too"):
        sequences.run([[5, 6, 7]], row_route=rows_of([FULL, SLIM, FULL]))
    siblings = rows_of([FULL, SLIM, FULL])
    assert sequences.run([[5, 6, 7]], [[-1, 0, 0]], row_route=siblings).logits.isfinite().all()
    mlp_only = rows_of([[(True, False)] * 4, FULL])
    assert sequences.run([[5, 6]], row_route=mlp_only).logits.isfinite().all()
