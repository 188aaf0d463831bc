"""The generic path: slot cache, packed rows, bypassed layers, and the probe that guards them."""

import threading

import pytest
import torch

from tiny_models import FAMILIES, chain, tiny
from viasd import InvalidInput, Route, TransformersModel, UnsupportedModel
from viasd.models import Rows


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_ragged_sequences_with_rollback_equal_plain_forwards(family):
    module = tiny(family)
    model = TransformersModel(module)
    sequences = [torch.randint(3, 97, (length,)).tolist() for length in (3, 14, 9)]
    plain = [module(torch.tensor([ids])).logits[0] for ids in sequences]
    cache = model.new_cache()
    contexts = []
    for ids in sequences:
        _, context = chain(model, cache, ids[:-2])
        _, wrong = chain(model, cache, [5, 6, 7, 8], context)
        cache.pool.give(wrong[len(context) :])
        contexts.append(context)
    tokens = [token for ids in sequences for token in ids[-2:]]
    positions = [len(ids) - 2 + i for ids in sequences for i in (0, 1)]
    rows = Rows(tokens, positions, [0, 2, 4, 6], cache.pool.take(6), contexts)
    logits = model.forward(rows, cache).logits.view(3, 2, -1)
    for own, expected in zip(logits, plain, strict=True):
        torch.testing.assert_close(own, expected[-2:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "mistral", "gpt2"])
def test_every_tree_path_equals_its_own_plain_forward(family):
    module = tiny(family)
    model = TransformersModel(module)
    prefix = [11, 12, 13, 14, 15, 16, 17]
    tokens, parents = [20, 21, 22, 23, 24, 25], [-1, 0, 0, 1, 2, 2]
    cache = model.new_cache()
    _, context = chain(model, cache, prefix)
    positions = [7, 8, 8, 9, 9, 9]
    logits = model.forward(Rows(tokens, positions, [0, 6], cache.pool.take(6), [context], parents), cache).logits
    for row in range(6):
        path, node = [], row
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        plain = module(torch.tensor([prefix + path[::-1]])).logits[0, -1]
        torch.testing.assert_close(logits[row], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "falcon"])
def test_a_bypassed_layer_equals_a_model_without_it(family):
    module = tiny(family)
    model = TransformersModel(module)
    ids = [3, 14, 15, 92, 65, 35]
    route = Route((True, False, True, True), (True, False, True, True))
    slim = chain(model, model.new_cache(), ids, route=route)[0].logits
    identity = tiny(family)
    path = model._layers_path
    layer = identity.get_submodule(path)[1]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.split(".")[-2] in ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "dense", "dense_4h_to_h"):
                parameter.zero_()
            if name.split(".")[-2].startswith("post_") and family == "gemma2":
                parameter.fill_(-1.0)
    expected = identity(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(slim, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(slim, module(torch.tensor([ids])).logits[0], atol=1e-3)


def test_sub_layers_can_be_bypassed_alone():
    module = tiny("llama")
    model = TransformersModel(module)
    ids = [3, 14, 15, 92]
    for name, projection in (("attention", "self_attn.o_proj"), ("mlp", "mlp.down_proj")):
        masks = {"attention": (True,) * 4, "mlp": (True,) * 4, name: (True, True, False, True)}
        slim = chain(model, model.new_cache(), ids, route=Route(**masks))[0].logits
        expected = tiny("llama")
        with torch.no_grad():
            expected.model.layers[2].get_submodule(projection).weight.zero_()
        torch.testing.assert_close(slim, expected(torch.tensor([ids])).logits[0])


def test_full_logits_are_right_after_slim_keys_were_rewritten():
    module = tiny("llama")
    model = TransformersModel(module)
    route = Route((True, False, False, True), (True, False, False, True))
    ids = [3, 14, 15, 92, 65, 35]
    cache = model.new_cache()
    _, context = chain(model, cache, ids[:3])
    _, slim = chain(model, cache, ids[3:], context, route=route)
    cache.pool.give(slim[3:])
    logits = chain(model, cache, ids[3:], context)[0].logits
    torch.testing.assert_close(logits, module(torch.tensor([ids])).logits[0, 3:], atol=1e-5, rtol=1e-4)


def test_captured_states_are_transformers_hidden_states():
    module = tiny("gemma2")
    model = TransformersModel(module)
    ids = [3, 14, 15, 92, 65]
    captured = chain(model, model.new_cache(), ids, capture_layers=(0, 2, 3))[0].captured
    expected = module(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in (0, 2, 3):
        torch.testing.assert_close(captured[layer], expected[layer][0])


def test_the_cache_grows_and_reuses_slots():
    module = tiny("llama")
    model = TransformersModel(module)
    cache = model.new_cache()
    context = []
    ids = torch.randint(3, 97, (250,)).tolist()
    for first in range(0, 250, 50):
        output, context = chain(model, cache, ids[first : first + 50], context)
    _, other = chain(model, cache, ids[:60])
    torch.testing.assert_close(output.logits[-1], module(torch.tensor([ids])).logits[0, -1], atol=1e-4, rtol=1e-4)
    cache.pool.give(other)
    assert cache.pool.take(3) == [250, 251, 252]


def test_the_users_model_stays_as_it_is():
    module = tiny("gemma2")
    before = {name: id(part) for name, part in module.named_modules()}
    ids = torch.tensor([[3, 14, 15]])
    logits = module(ids).logits
    model = TransformersModel(module)
    chain(model, model.new_cache(), [3, 4, 5], route=Route.spread(4, attention=1.0, mlp=0.5), capture_layers=(1,))
    assert {name: id(part) for name, part in module.named_modules()} == before
    assert torch.equal(module(ids).logits, logits)
    assert not any(part._forward_hooks for part in module.modules())


def test_two_threads_share_a_model():
    module = tiny("llama")
    model = TransformersModel(module)
    route = Route.spread(4, attention=1.0, mlp=1.0)
    ids = [3, 14, 15, 92]
    expected = {r: chain(model, model.new_cache(), ids, route=r)[0].logits for r in (None, route)}
    failures = []

    def work(own):
        for _ in range(20):
            output = chain(model, model.new_cache(), ids, route=own, capture_layers=(2,))[0]
            if not torch.allclose(output.logits, expected[own]) or output.captured.keys() != {2}:
                failures.append(own)

    threads = [threading.Thread(target=work, args=(own,)) for own in (None, route)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("bloom", {"n_layer": 4, "n_head": 4}, "does not run over a slot cache"),
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 4}, "differ from the plain forward's"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv keep state that cannot be rolled back"),
    ],
)
def test_models_that_cannot_work_by_slots_are_refused(family, overrides, message):
    with pytest.raises(UnsupportedModel, match=message):
        TransformersModel(tiny(family, **overrides))


def test_broken_weights_are_refused():
    module = tiny("llama")
    with torch.no_grad():
        module.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedModel, match="logits are not finite"):
        TransformersModel(module)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(UnsupportedModel, match=r"call model.eval\(\)"):
        TransformersModel(tiny("llama").train())


def test_a_route_that_the_layers_cannot_take_is_refused():
    model = TransformersModel(tiny("opt"))
    with pytest.raises(UnsupportedModel, match="only routes that bypass whole layers"):
        chain(model, model.new_cache(), [3, 4], route=Route((True,) * 4, (True, False, True, True)))


def test_a_slot_that_was_broken_serves_again():
    module = tiny("llama")
    model = TransformersModel(module)
    expected = module(torch.tensor([[3, 4, 5]])).logits[0]
    with torch.no_grad():
        module.model.embed_tokens.weight[77] = float("nan")
    cache = model.new_cache()
    _, broken = chain(model, cache, [3, 77, 5])
    cache.pool.give(broken)
    torch.testing.assert_close(chain(model, cache, [3, 4, 5])[0].logits, expected, atol=1e-5, rtol=1e-4)


def test_long_rope_keeps_to_its_original_context():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4}
    overrides = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    assert TransformersModel(tiny("phi3", **overrides)).max_positions == 32


def test_captured_layers_must_exist():
    model = TransformersModel(tiny("llama"))
    with pytest.raises(InvalidInput, match=r"capture_layers must lie in \[0, 4\), got \[9\]"):
        chain(model, model.new_cache(), [3], capture_layers=(9,))


def test_config_hash_tells_architectures_apart():
    hashes = [TransformersModel(tiny("llama", **o)).config_hash for o in ({}, {}, {"intermediate_size": 96})]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_broken_row_leaves_its_neighbours_alone():
    module = tiny("llama")
    model = TransformersModel(module)
    expected = module(torch.tensor([[3, 4, 5]])).logits[0]
    with torch.no_grad():
        module.model.embed_tokens.weight[77] = float("nan")
    cache = model.new_cache()
    _, context = chain(model, cache, [3, 77])
    rows = Rows([5, 3, 4, 5], [2, 0, 1, 2], [0, 1, 4], cache.pool.take(4), [context, []])
    logits = model.forward(rows, cache).logits
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1:], expected, atol=1e-5, rtol=1e-4)
