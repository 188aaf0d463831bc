"""A kept ``transformers_generate`` after its model was changed: the output is always that of plain ``generate``."""

import copy
import functools
import gc
import pickle
import weakref

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch.nn.utils import prune
from transformers.models.llama import modeling_llama

import viasd
from tiny_models import tiny
from viasd.errors import UnsupportedModel

IDS = torch.tensor([[5, 17, 33, 17, 33, 17, 60, 5, 17]])
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 96, "pad_token_id": 0}
FIXED = viasd.Speculation(gamma=4, adaptive=False)


def sharpened(family="llama", **overrides):
    """Random weights whose argmax is clear."""
    model = tiny(family, **overrides)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12.0)
    return model


def plain(model):
    return model.generate(IDS, **OPTIONS)


def implementation(decode):
    return decode.prepared.model.implementation


def layer(model, i=1):
    return model.model.layers[i]


def added_data(model):
    layer(model).mlp.down_proj.weight.data += 0.3


def copied_data(model):
    weight = model.lm_head.weight
    weight.data.copy_(weight.data.flip(0))


def negated_in_pairs(model):
    """Sums and exclusive-ors of all bits stay as they were."""
    layer(model).self_attn.q_proj.weight.data.neg_()


def swapped_rows(model):
    weight = model.model.embed_tokens.weight.data
    weight[[17, 33]] = weight[[33, 17]]


def fused_step(model):
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()


def replaced_submodule(model):
    torch.manual_seed(3)
    layer(model).mlp.up_proj = torch.nn.Linear(64, 128, bias=False)


def hooked(model):
    layer(model).mlp.register_forward_hook(lambda part, args, output: -output)


def hooked_before(model):
    layer(model).register_forward_pre_hook(lambda part, args: (2 * args[0], *args[1:]))


def patched_object(model):
    part = layer(model).mlp
    part.forward = functools.partial(lambda own, x: -type(own).forward(own, x), part)


def patched_model(model):
    """As accelerate's hooks do it: the object's forward goes round its class's."""
    original = model.forward
    model.forward = functools.wraps(original)(lambda *args, **kwargs: flipped(original(*args, **kwargs)))


def flipped(output):
    output.logits = output.logits.roll(1, -1)
    return output


def pruned(model):
    prune.l1_unstructured(layer(model).mlp.down_proj, "weight", amount=0.6)


def scaled(model):
    for own in model.model.layers:
        own.self_attn.scaling *= 3000  # random keys hardly differ


def other_epsilon(model):
    for own in model.model.layers:
        own.input_layernorm.variance_epsilon = 30.0


def turned_otherwise(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.2


def eager(model):
    model.set_attn_implementation("eager")


CHANGES = [added_data, copied_data, negated_in_pairs, swapped_rows, fused_step, replaced_submodule, hooked]
CHANGES += [hooked_before, patched_object, patched_model, pruned, scaled, other_epsilon, turned_otherwise]
NATIVE = {added_data, copied_data, negated_in_pairs, swapped_rows, fused_step, turned_otherwise, eager}


@pytest.mark.parametrize("change", [*CHANGES, eager], ids=lambda own: own.__name__)
@pytest.mark.parametrize("when", ["after", "before"])
def test_every_change_is_seen(change, when):
    model, decode = sharpened(), viasd.transformers_generate(speculation=FIXED)
    before = plain(model)
    if when == "after":
        assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), before)
        assert implementation(decode) == "native"
    change(model)
    expected = plain(model)
    assert change is eager or not torch.equal(expected, before)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), expected)
    assert implementation(decode) == ("native" if change in NATIVE else "transformers")


@pytest.mark.parametrize("change", [own for own in CHANGES if own not in (fused_step,)], ids=lambda own: own.__name__)
def test_the_generic_path_sees_every_change_too(change):
    model = sharpened()
    decode = viasd.transformers_generate(speculation=FIXED, implementation="transformers", route="default")
    before = plain(model)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), before)
    change(model)
    if change is patched_model:
        with pytest.raises(UnsupportedModel, match="route: "):
            model.generate(IDS, custom_generate=decode, **OPTIONS)
        return
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), plain(model))


class Negated:
    """A method that is no function."""

    def __init__(self, forward):
        self.forward = forward

    def __get__(self, part, kind):
        return self if part is None else lambda x: -self.forward(part, x)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_patches_of_classes_and_functions_come_and_go(monkeypatch, implementation):
    model, decode = sharpened(), viasd.transformers_generate(speculation=FIXED, implementation=implementation)
    before = plain(model)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), before)
    own_forward, own_rotation = modeling_llama.LlamaMLP.forward, modeling_llama.apply_rotary_pos_emb
    with monkeypatch.context() as patch:
        patch.setattr(
            modeling_llama.LlamaMLP, "forward", functools.wraps(own_forward)(lambda own, x: -own_forward(own, x))
        )
        expected = plain(model)
        assert not torch.equal(expected, before)
        assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), expected)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), before)
    for method in (functools.partialmethod(lambda own, x: -own_forward(own, x)), Negated(own_forward)):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama.LlamaMLP, "forward", method)
            assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), expected)
            assert implementation == "transformers" or "has a patched forward" in decode.prepared.model.reason
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: own_rotation(-q, k, *args))
        expected = plain(model)
        assert not torch.equal(expected, before)
        assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), expected)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), before)


def test_adapters_come_and_go():
    model, decode = sharpened(), viasd.transformers_generate(speculation=FIXED, route="default")
    settings = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    adapted.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    seen = []

    def check(model):
        expected = model.generate(input_ids=IDS, **OPTIONS)
        assert torch.equal(model.generate(input_ids=IDS, custom_generate=decode, **OPTIONS), expected)
        seen.append((tuple(expected[0].tolist()), implementation(decode)))

    check(adapted)
    with adapted.disable_adapter():
        check(adapted)
    adapted.set_adapter("other")
    check(adapted)
    adapted.merge_adapter()
    check(adapted)
    adapted.unmerge_adapter()
    check(adapted.merge_and_unload())
    assert len({output for output, _ in seen}) == 3  # with one, without, with the other
    assert [how for _, how in seen] == ["transformers"] * 4 + ["native"]


class Tripling(ModelHook):
    def post_forward(self, module, output):
        return 3 * output


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_accelerate_hooks(implementation):
    model, decode = sharpened(), viasd.transformers_generate(speculation=FIXED, implementation=implementation)
    before = model.generate(IDS, custom_generate=decode, **OPTIONS)
    add_hook_to_module(layer(model).mlp, Tripling())
    expected = plain(model)
    assert not torch.equal(expected, before)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), expected)
    remove_hook_from_module(layer(model).mlp)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), before)


def test_a_model_made_under_inference_mode():
    with torch.inference_mode():
        model = sharpened()
    decode = viasd.transformers_generate(speculation=FIXED)
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), plain(model))
    with torch.inference_mode():
        model.lm_head.weight.neg_()
    assert torch.equal(model.generate(IDS, custom_generate=decode, **OPTIONS), plain(model))


def test_an_attention_that_takes_no_mask_of_ours_is_refused_by_name():
    model = sharpened()
    decode = viasd.transformers_generate(speculation=FIXED, implementation="transformers")
    model.generate(IDS, custom_generate=decode, **OPTIONS)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModel, match="attention implementation 'flex_attention'"):
        model.generate(IDS, custom_generate=decode, **OPTIONS)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_a_kept_object_prepares_once_and_lets_models_go(implementation):
    model, decode = sharpened(), viasd.transformers_generate(speculation=FIXED, implementation=implementation)
    model.generate(IDS, custom_generate=decode, **OPTIONS)
    prepared = decode.prepared
    model.generate(IDS, custom_generate=decode, **OPTIONS)
    assert decode.prepared is prepared
    gone = [weakref.ref(own) for own in (model, model.model.layers[0].mlp.up_proj.weight)]
    del model, prepared
    gc.collect()
    assert [own() for own in gone] == [None, None]
    assert decode.prepared is None


def test_copies_and_pickles_decode_alike():
    model, decode = sharpened(), viasd.transformers_generate(drafter="self", speculation=FIXED, route="default")
    expected = model.generate(IDS, custom_generate=decode, **OPTIONS)
    for other in (copy.copy(decode), copy.deepcopy(decode), pickle.loads(pickle.dumps(decode))):
        assert other.prepared is None
        assert torch.equal(model.generate(IDS, custom_generate=other, **OPTIONS), expected)
