"""The fast path: SkipModel beside Transformers' own forward, what it refuses, and what it leaves of the module."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import viasd
from tiny_models import chain, tiny
from viasd import InvalidInput, Route, TransformersModel, UnsupportedModel
from viasd.models import Rows, SkipModel, skip_model
from viasd.models.hf_mapping import UnknownArchitecture, decoder_config, decoder_weights
from viasd_kernels import SkipDecoder, weight_shapes

FAMILIES = ["llama", "mistral", "phi3", "qwen2", "qwen3", "gemma2", "gemma3_text"]
IMPLS = ["reference", "native"]
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_ragged_sequences_equal_plain_forwards(family, impl):
    module = tiny(family)
    model = SkipModel(module, impl=impl)
    sequences = [torch.randint(3, 97, (length,)).tolist() for length in (3, 14, 9)]
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
    for own, ids in zip(logits, sequences, strict=True):
        torch.testing.assert_close(own, module(torch.tensor([ids])).logits[0, -2:], atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_batches_in_the_loop_equal_transformers_own(family):
    module = tiny(family)
    prompts = [IDS, IDS[:4] * 3]
    lm = viasd.load(module, implementation="native", drafter="self", route="default")
    results = lm.generate(prompts, max_new_tokens=16, eos_token_ids=[])
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(16):
            ids = torch.cat([ids, module(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert list(result.tokens) == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_routes_and_captured_layers_equal_the_generic_path(family, impl):
    module = tiny(family)
    route = Route((True, False, True, True), (True, True, False, True))
    fast, generic = (
        chain(model, model.new_cache(), IDS, route=route, capture_layers=(0, 2), logits_rows=[9, 3])[0]
        for model in (SkipModel(module, impl=impl), TransformersModel(module))
    )
    torch.testing.assert_close(fast.logits, generic.logits, atol=2e-4, rtol=0)
    for layer in (0, 2):
        torch.testing.assert_close(fast.captured[layer], generic.captured[layer], atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_reaches_the_decoder_and_passes_the_probe(family):
    model = SkipModel(tiny(family).to(torch.bfloat16))
    assert model.dtype == torch.bfloat16
    assert chain(model, model.new_cache(), IDS)[0].logits.dtype == torch.bfloat16


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}, {"rope_parameters": LLAMA3}], ids=str)
def test_tensors_have_the_names_and_shapes_of_the_decoder(overrides):
    module = tiny("llama", **overrides)
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder_weights(module).items()}
    assert shapes == weight_shapes(decoder_config(module.config))


def test_the_users_module_stays_as_it_is():
    module = tiny("gemma2")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    logits = module(torch.tensor([IDS])).logits
    SkipModel(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(module(torch.tensor([IDS])).logits, logits)


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_of_our_own_gives_its_weights_away_one_by_one(tied):
    module = tiny("llama", tie_word_embeddings=tied)
    expected = module(torch.tensor([IDS])).logits[0]
    model = SkipModel(module, consume=True)
    assert not any(parameter.numel() for parameter in module.parameters())
    torch.testing.assert_close(chain(model, model.new_cache(), IDS)[0].logits, expected, atol=2e-4, rtol=0)


def test_a_consumed_tensor_is_gone():
    weights = decoder_weights(tiny("llama"), consume=True)
    weights["layers.0.qkv"]
    with pytest.raises(KeyError):
        weights["layers.0.qkv"]


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gpt2", {}, "model type 'gpt2' is none of llama"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding 'yarn'",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_configurations_that_the_decoder_would_misread_are_unknown(family, overrides, message):
    with pytest.raises(UnknownArchitecture, match=message):
        decoder_weights(tiny(family, **overrides))


def test_a_partial_rotary_embedding_is_unknown():
    config = tiny("llama").config
    config.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(UnknownArchitecture, match="partial_rotary_factor"):
        decoder_config(config)


def _subclass(module):
    module.__class__ = type("LlamaForCausalLM", (type(module),), {"__module__": "mine"})


def _other_linear(module):
    module.model.layers[1].mlp.up_proj = type("LoraLinear", (nn.Linear,), {})(64, 128, bias=False)


def _extra_bias(module):
    module.model.layers[1].mlp.up_proj.bias = nn.Parameter(torch.zeros(128))


PATCHES = {
    "is not Transformers' LlamaForCausalLM": _subclass,
    "LoraLinear": _other_linear,
    "parameters differ in model.layers.1.mlp.up_proj.bias": _extra_bias,
    "model.layers.2 has forward hooks": lambda m: m.model.layers[2].register_forward_hook(lambda *_: None),
    "model.norm has forward hooks": lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None),
    "model.norm has a patched forward": lambda m: setattr(m.model.norm, "forward", lambda x: x),
    "is a torch.nn.utils.parametrize": lambda m: parametrize.register_parametrization(
        m.lm_head, "weight", nn.Identity()
    ),
    "tie_word_embeddings": lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
    "several dtypes": lambda m: m.model.norm.half(),
}


@pytest.mark.parametrize("message", PATCHES)
def test_changed_modules_are_unknown(message):
    module = tiny("llama")
    PATCHES[message](module)
    with pytest.raises(UnknownArchitecture, match=message):
        decoder_weights(module)


def test_load_takes_the_fast_path_where_there_is_one():
    fast = viasd.load(tiny("llama")).model
    assert fast.implementation == "native"
    assert fast.reason == "llama is an architecture that viasd_kernels knows: one call per pass"
    short = tiny("llama").bfloat16().float()
    assert "its weights lose nothing in" in viasd.load(short).model.reason
    generic = viasd.load(tiny("llama").half()).model
    assert generic.implementation == "transformers"
    assert generic.reason.endswith("(not native: no native decoder for torch.float16 on cpu)")
    assert "(not native: model type 'gpt2' is none of" in viasd.load(tiny("gpt2")).model.reason


def test_an_explicit_implementation_never_falls_back():
    reason = viasd.load(tiny("llama"), implementation="transformers").model.reason
    assert reason == "the generic path: the model's own forward, over a slot cache"
    with pytest.raises(UnsupportedModel, match="model type 'gpt2'"):
        viasd.load(tiny("gpt2"), implementation="native")
    with pytest.raises(InvalidInput, match="must be one of 'auto', 'native', 'transformers', got 'fast'"):
        viasd.load(tiny("llama"), implementation="fast")


def test_where_the_probe_differs_the_generic_path_has_the_model_intact(tmp_path, monkeypatch):
    module = tiny("llama")
    module.save_pretrained(tmp_path)

    def differs(model, module, plain):
        raise UnsupportedModel("logits differ")

    monkeypatch.setattr(skip_model, "probe", differs)
    for given in (tmp_path, module):
        lm = viasd.load(given)
        assert lm.model.implementation == "transformers"
        assert lm.model.reason.endswith("(not native: logits differ)")
        assert lm.generate(IDS, max_new_tokens=8).tokens == plain_tokens(module, 8)
        with pytest.raises(UnsupportedModel, match="logits differ"):
            viasd.load(given, implementation="native")


def plain_tokens(module, count):
    ids = torch.tensor([IDS])
    return module.generate(ids, max_new_tokens=count, do_sample=False)[0, len(IDS) :].tolist()


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_frequencies_are_the_models_own(family):
    """As ``module.bfloat16()`` leaves them: rounded, which tells from a few dozen positions on."""
    module = tiny(family).bfloat16().float()
    ids = [(5 * i + 1) % 97 for i in range(200)]
    expected = module(torch.tensor([ids])).logits[0]
    model = SkipModel(module)

    def error():
        return (chain(model, model.new_cache(), ids)[0].logits - expected).abs().max()

    own = error()
    assert own < 2e-4
    model.decoder = SkipDecoder(decoder_weights(module), decoder_config(module.config))  # the configuration's
    assert error() > 20 * own


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_the_embedding_scale_is_the_models_own(family):
    module = tiny(family)
    module.model.embed_tokens.embed_scale *= 1.3
    expected, model = module(torch.tensor([IDS])).logits[0], SkipModel(module)
    torch.testing.assert_close(chain(model, model.new_cache(), IDS)[0].logits, expected, atol=2e-4, rtol=0)


def test_a_model_loaded_from_a_folder_is_consumed(tmp_path):
    module = tiny("qwen3")
    module.save_pretrained(tmp_path)
    model = viasd.load(tmp_path, implementation="native", dtype=torch.bfloat16).model
    assert isinstance(model, SkipModel)
    assert model.dtype == torch.bfloat16
    lm = viasd.load(tmp_path, implementation="native")
    result = lm.generate(IDS, max_new_tokens=8)
    assert result.tokens == viasd.load(module, implementation="transformers").generate(IDS, max_new_tokens=8).tokens


def test_broken_weights_and_training_mode_are_refused():
    module = tiny("llama")
    with pytest.raises(UnsupportedModel, match=r"call model.eval\(\)"):
        SkipModel(module.train())
    with torch.no_grad():
        module.model.norm.weight[0] = float("nan")
    with pytest.raises(UnsupportedModel, match="logits are not finite"):
        SkipModel(module.eval())


@pytest.mark.model
def test_smollm2_greedy_equals_the_generic_path():
    prompt = "The three primary colours are"
    skip, generic = (viasd.load(implementation=implementation) for implementation in ("native", "transformers"))
    assert skip.generate(prompt, max_new_tokens=32).tokens == generic.generate(prompt, max_new_tokens=32).tokens
