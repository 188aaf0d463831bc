"""Transformers' configurations and weights in the terms of ``viasd_kernels.SkipDecoder``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from viasd.errors import UnsupportedModel
from viasd.models.fingerprint import functions_of, settings_of
from viasd_kernels import DecoderConfig, LayerConfig, RopeConfig

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ACTIVATIONS = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}
ROPE_BASICS = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
ROPE_KEYS = {
    "default": ROPE_BASICS,
    "linear": ROPE_BASICS | {"factor"},
    "llama3": ROPE_BASICS | {"factor", "low_freq_factor", "high_freq_factor"},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, nn.Dropout)
MODEL_LIBRARIES = frozenset({"transformers", "kernels", "torch"})
LIBRARIES = MODEL_LIBRARIES | sys.stdlib_module_names


class UnknownArchitecture(UnsupportedModel):
    """``SkipDecoder`` does not know this model; the message says what of it."""


def decoder_config(config: Any, module: Any = None) -> DecoderConfig:
    """What a Transformers configuration describes.

    Args:
        module: the model, whose own rotary frequencies and embedding scale count where they are not those of the
            configuration: ``model.bfloat16()`` rounds them too. None: the configuration's.

    Raises:
        UnknownArchitecture: a family, rotary embedding, layer kind or activation outside those of ``SkipDecoder``.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise UnknownArchitecture(f"model type {family!r} is none of {', '.join(FAMILIES)}")
    gemma = family.startswith("gemma")
    activation = config.hidden_activation if gemma else config.hidden_act
    if activation not in ACTIVATIONS:
        raise UnknownArchitecture(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnknownArchitecture("use_bidirectional_attention: rows would see what comes after them")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Mistral's and Phi 3's code has no biases and Qwen2's always the same ones, whatever their configurations say.
    has_bias = family not in ("mistral", "phi3", "qwen2") and bool(config.attention_bias)
    try:
        return DecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            layers=_layers(config, head_dim, None if module is None else module.model.rotary_emb),
            norm_eps=config.rms_norm_eps,
            norm_weight_offset=1.0 if gemma else 0.0,
            activation=ACTIVATIONS[activation],
            attention_scale=config.query_pre_attn_scalar**-0.5 if gemma else None,
            # Gemma 3 has the option, but its attention does not use it.
            attention_soft_cap=config.attn_logit_softcapping if family == "gemma2" else None,
            logit_soft_cap=config.final_logit_softcapping if gemma else None,
            embedding_scale=_embedding_scale(config, module) if gemma else 1.0,
            qk_norm=family in ("qwen3", "gemma3_text"),
            post_norms=gemma,
            qkv_bias=has_bias or family == "qwen2",
            attention_out_bias=has_bias,
            mlp_bias=family == "llama" and bool(config.mlp_bias),
            tied_head=config.tie_word_embeddings,
        )
    except ValueError as error:
        raise UnknownArchitecture(str(error)) from error


def _embedding_scale(config: Any, module: Any) -> float:
    own = None if module is None else getattr(module.model.embed_tokens, "embed_scale", None)
    return config.hidden_size**0.5 if own is None else float(own)


def _layers(config: Any, head_dim: int, rotary: Any) -> tuple[LayerConfig, ...]:
    window = None if config.model_type == "llama" else config.sliding_window
    # These treat all layers alike and read no layer_types.
    alike = config.model_type in ("llama", "mistral", "phi3")
    kinds = ["sliding_attention"] * config.num_hidden_layers if alike else config.layer_types
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnknownArchitecture(f"layers of kind {', '.join(unknown)}")
    turned = head_dim if config.model_type == "phi3" else None
    ropes = {kind: _rope(config.rope_parameters.get(kind, config.rope_parameters), turned) for kind in set(kinds)}
    if rotary is not None:
        made, own = (dict(part.named_buffers()) for part in (type(rotary)(config), rotary))
        for kind in ropes:
            name = f"{kind}_inv_freq" if f"{kind}_inv_freq" in made else "inv_freq"
            frequencies = own[name].float().cpu()
            if not torch.equal(frequencies, made[name]):
                ropes[kind] = replace(ropes[kind], kind="given", frequencies=tuple(frequencies.tolist()))
    return tuple(LayerConfig(window if kind == "sliding_attention" else None, ropes[kind]) for kind in kinds)


def _rope(rope: dict[str, Any], head_dim: int | None) -> RopeConfig:
    """``head_dim``: of a family that may turn a part of each head only."""
    kind = rope["rope_type"]
    if kind not in ROPE_KEYS:
        raise UnknownArchitecture(f"rotary embedding {kind!r} is none of {', '.join(ROPE_KEYS)}")
    unknown = sorted(rope.keys() - ROPE_KEYS[kind])
    if unknown:
        raise UnknownArchitecture(f"rotary embedding {kind!r} with {', '.join(unknown)}")
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0 and head_dim is None:
        raise UnknownArchitecture("partial_rotary_factor: the family's own code turns whole heads")
    own: dict[str, Any] = {key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor") if key in rope}
    if kind == "llama3":
        own["original_max_positions"] = rope["original_max_position_embeddings"]
    if head_dim is not None and part != 1.0:
        own["rotary_dim"] = int(head_dim * part)
    return RopeConfig(theta=rope["rope_theta"], kind=kind, **own)


def decoder_weights(module: nn.Module, *, consume: bool = False) -> DecoderTensors:
    """The weights of a Transformers model by the names of ``viasd_kernels.weight_shapes``, built when asked for.

    Args:
        module: the model; its configuration must be one that ``decoder_config`` knows.
        consume: whether each weight may be asked for once only and leaves the module then, which is useless
            afterwards: the peak of memory is the weights and one tensor. Otherwise the module stays untouched.

    Raises:
        UnknownArchitecture: a subclass, a patched or wrapped part, hooks, parameters that the family does not have.
    """
    config: Any = module.config
    wanted = decoder_config(config)
    _check_parts(module, FAMILIES[config.model_type])
    if wanted.tied_head != (module.lm_head.weight is module.model.embed_tokens.weight):  # type: ignore[union-attr]
        raise UnknownArchitecture("tie_word_embeddings says otherwise than the weights do")
    sources = _sources(wanted, is_packed=config.model_type == "phi3")
    parameters = dict(module.named_parameters())
    expected = {name for names in sources.values() for name in names}
    if parameters.keys() != expected:
        raise UnknownArchitecture(f"parameters differ in {', '.join(sorted(parameters.keys() ^ expected)[:3])}")
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            raise UnknownArchitecture(f"{name} is a {type(parameter.data).__name__}")
        if parameter.dtype not in DTYPES or parameter.is_meta:
            raise UnknownArchitecture(f"{name} is {parameter.dtype} on {parameter.device}")
    if len({(parameter.dtype, parameter.device) for parameter in parameters.values()}) > 1:
        raise UnknownArchitecture("parameters of several dtypes or on several devices")
    return DecoderTensors(parameters, sources, consume)


class DecoderTensors(Mapping[str, torch.Tensor]):
    """A decoder's tensors, each made of the module's parameters when it is asked for."""

    def __init__(self, parameters: dict[str, nn.Parameter], sources: dict[str, list[str]], consume: bool) -> None:
        self._parameters, self._sources, self._consume = parameters, sources, consume

    def __getitem__(self, name: str) -> torch.Tensor:
        parameters = [self._parameters[source] for source in self._sources[name]]
        parts = [parameter.detach() for parameter in parameters]
        if self._consume:
            for source, parameter in zip(self._sources[name], parameters, strict=True):
                parameter.data = parameter.new_empty(0)
                del self._parameters[source]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _check_parts(module: nn.Module, expected: str) -> None:
    """Every part must be what its family's own code made of the configuration, and run that code."""
    kind = type(module)
    if kind.__name__ != expected or not kind.__module__.startswith("transformers.models."):
        raise UnknownArchitecture(f"{kind.__module__}.{kind.__name__} is not Transformers' {expected}")
    with torch.device("meta"):
        made = dict(kind(copy.deepcopy(module.config)).eval().named_modules())
    for name, part in module.named_modules():
        own = type(part)
        if own not in PLAIN_MODULES and own.__module__ not in (kind.__module__, "transformers.activations"):
            raise UnknownArchitecture(f"{name} is a {own.__module__}.{own.__name__}")
        if own is not type(made.get(name)):
            raise UnknownArchitecture(f"{name}, a {own.__name__}, is not what the configuration gives")
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        # Transformers hangs its own in, to collect hidden states.
        if not all(getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks):
            raise UnknownArchitecture(f"{name or 'the model'} has forward hooks")
        if "forward" in vars(part) or not _comes_from(MODEL_LIBRARIES, own.forward):
            raise UnknownArchitecture(f"{name or 'the model'} has a patched forward")
        _check_settings(name or "the model", part, made.pop(name))
    if made:
        raise UnknownArchitecture(f"{next(iter(made))} is missing")
    for function in functions_of(kind.__module__):
        if not _comes_from(LIBRARIES, function):
            raise UnknownArchitecture(f"{kind.__module__} has a patched {function.__name__}")


def _comes_from(libraries: Set[str], function: Any) -> bool:
    """Whether it is a function defined in one of these, and likewise all that it wraps."""
    home: str = getattr(function, "__globals__", {}).get("__name__", "")
    inner = getattr(function, "__wrapped__", None)
    return home.partition(".")[0] in libraries and (inner is None or _comes_from(libraries, inner))


def _check_settings(name: str, part: nn.Module, made: nn.Module) -> None:
    """Its numbers (scales, epsilons) must be those that the configuration gives."""
    ours, wanted = _numbers(part), _numbers(made)
    for key in ours.keys() | wanted.keys():
        if ours.get(key) != wanted.get(key):
            raise UnknownArchitecture(f"{name}.{key} is {ours.get(key)}, by the configuration {wanted.get(key)}")


def _numbers(part: nn.Module) -> dict[str, object]:
    """Its settings that are numbers, without those that only training reads."""
    return {
        key: value
        for key, value in settings_of(part).items()
        if isinstance(value, (bool, int, float)) and not key.startswith("_") and key != "gradient_checkpointing"
    }


def _sources(config: DecoderConfig, is_packed: bool) -> dict[str, list[str]]:
    """Which parameters make each of the decoder's tensors, in order."""
    sources = {"embedding": ["model.embed_tokens.weight"], "final_norm": ["model.norm.weight"]}
    if not config.tied_head:
        sources["head"] = ["lm_head.weight"]
    attention, mlp = "self_attn.", "mlp."
    qkv, gate_up = (["qkv"], ["gate_up"]) if is_packed else (["q", "k", "v"], ["gate", "up"])
    layer = {
        "attention_norm": ["input_layernorm.weight"],
        "qkv": [f"{attention}{part}_proj.weight" for part in qkv],
        "attention_out": [f"{attention}o_proj.weight"],
        "mlp_norm": ["post_attention_layernorm.weight"],
        "gate_up": [f"{mlp}{part}_proj.weight" for part in gate_up],
        "mlp_out": [f"{mlp}down_proj.weight"],
    }
    if config.post_norms:
        layer["attention_post_norm"] = ["post_attention_layernorm.weight"]
        layer["mlp_norm"] = ["pre_feedforward_layernorm.weight"]
        layer["mlp_post_norm"] = ["post_feedforward_layernorm.weight"]
    if config.qk_norm:
        layer["q_norm"], layer["k_norm"] = [f"{attention}q_norm.weight"], [f"{attention}k_norm.weight"]
    if config.qkv_bias:
        layer["qkv_bias"] = [f"{attention}{part}_proj.bias" for part in qkv]
    if config.attention_out_bias:
        layer["attention_out_bias"] = [f"{attention}o_proj.bias"]
    if config.mlp_bias:
        layer["gate_up_bias"] = [f"{mlp}{part}_proj.bias" for part in gate_up]
        layer["mlp_out_bias"] = [f"{mlp}down_proj.bias"]
    for i in range(config.num_layers):
        for own, names in layer.items():
            sources[f"layers.{i}.{own}"] = [f"model.layers.{i}.{name}" for name in names]
    return sources
