"""Transformers' configurations and weights in the terms of ``viasd_kernels.SkipDecoder``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from viasd_kernels import DecoderConfig, LayerConfig, RopeConfig

FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma2", "gemma3_text")
ROPE_KINDS = ("default", "linear", "llama3")
ACTIVATIONS = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}


class UnknownArchitecture(Exception):
    """The decoder step does not know this model; the message says what of it."""


def decoder_config(config: Any) -> DecoderConfig:
    """What a Transformers configuration describes.

    Raises:
        UnknownArchitecture: a family, rotary embedding or activation outside those of ``SkipDecoder``.
    """
    if config.model_type not in FAMILIES:
        raise UnknownArchitecture(f"model type {config.model_type!r} is none of {', '.join(FAMILIES)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnknownArchitecture("its attention is bidirectional")
    gemma, gemma2 = config.model_type.startswith("gemma"), config.model_type == "gemma2"
    activation = config.hidden_activation if gemma else config.hidden_act
    if activation not in ACTIVATIONS:
        raise UnknownArchitecture(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    has_bias = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        layers=_layers(config, head_dim),
        norm_eps=config.rms_norm_eps,
        norm_weight_offset=1.0 if gemma else 0.0,
        activation=ACTIVATIONS[activation],
        attention_scale=config.query_pre_attn_scalar**-0.5 if gemma else None,
        # Gemma 3 has the option, but its attention does not use it.
        attention_soft_cap=config.attn_logit_softcapping if gemma2 else None,
        logit_soft_cap=getattr(config, "final_logit_softcapping", None),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        qk_norm=config.model_type in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        qkv_bias=has_bias,
        attention_out_bias=has_bias and config.model_type != "qwen2",
        mlp_bias=getattr(config, "mlp_bias", False),
        tied_head=config.tie_word_embeddings,
    )


def _layers(config: Any, head_dim: int) -> tuple[LayerConfig, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    ropes = {kind: _rope(config.rope_parameters.get(kind, config.rope_parameters), head_dim) for kind in set(kinds)}
    return tuple(LayerConfig(window if kind == "sliding_attention" else None, ropes[kind]) for kind in kinds)


def _rope(rope: dict[str, Any], head_dim: int) -> RopeConfig:
    if rope["rope_type"] not in ROPE_KINDS:
        raise UnknownArchitecture(f"rotary embedding {rope['rope_type']!r} is none of {', '.join(ROPE_KINDS)}")
    own: dict[str, Any] = {"theta": rope["rope_theta"], "kind": rope["rope_type"]}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        own["rotary_dim"] = int(head_dim * rope["partial_rotary_factor"])
    if rope["rope_type"] != "default":
        own["factor"] = rope["factor"]
    if rope["rope_type"] == "llama3":
        own["low_freq_factor"], own["high_freq_factor"] = rope["low_freq_factor"], rope["high_freq_factor"]
        own["original_max_positions"] = rope["original_max_position_embeddings"]
    return RopeConfig(**own)


class ModuleWeights(Mapping[str, torch.Tensor]):
    """A Transformers module's weights by the names of ``viasd_kernels.weight_shapes``, made as they are asked for.

    Args:
        module: of a known architecture, unchanged.
        consume: whether a weight leaves the module when it is read, so that both never hold all weights at once.

    Raises:
        UnknownArchitecture: the module holds other parameters, or calculates otherwise, than its architecture says.
    """

    def __init__(self, module: nn.Module, *, consume: bool = False) -> None:
        _check_unchanged(module)
        self._module = module
        self._consume = consume
        state = dict(module.named_parameters())
        self._sources: dict[str, list[str]] = {}
        for own, sources in _sources(module.config).items():
            found = [name for name in sources if name in state]
            if found and len(found) < len(sources):
                raise UnknownArchitecture(f"{type(module).__name__} has {found} without the rest of {sources}")
            if found:
                self._sources[own] = sources
        known = {name for sources in self._sources.values() for name in sources}
        if unknown := sorted(state.keys() - known):
            raise UnknownArchitecture(f"{type(module).__name__} holds parameters of its own: {', '.join(unknown[:3])}")

    def __getitem__(self, name: str) -> torch.Tensor:
        parameters = [self._module.get_parameter(source) for source in self._sources[name]]
        tensors = [parameter.detach() for parameter in parameters]
        if self._consume:
            for parameter in parameters:
                parameter.data = parameter.data.new_empty(0)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _check_unchanged(module: nn.Module) -> None:
    """Raise unless the module is Transformers' own, without additions that change what it calculates."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models.") or not kind.__name__.endswith("ForCausalLM"):
        raise UnknownArchitecture(f"{kind.__module__}.{kind.__name__} is no causal language model of Transformers' own")
    for name, part in module.named_modules():
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("transformers.")]
        if foreign or "forward" in vars(part):
            raise UnknownArchitecture(f"{kind.__name__}: {name or 'the model'} has a hook or a forward of its own")
        if not type(part).__module__.startswith(("transformers.", "torch.nn.")):
            raise UnknownArchitecture(f"{kind.__name__}: {name} is a {type(part).__name__}, put there by someone else")


def _sources(config: Any) -> dict[str, list[str]]:
    """The parameters that each of the decoder's weights is made of."""
    sources = {"embedding": ["model.embed_tokens.weight"], "final_norm": ["model.norm.weight"]}
    if not config.tie_word_embeddings:
        sources["head"] = ["lm_head.weight"]
    post_norms, is_packed = config.model_type.startswith("gemma"), config.model_type == "phi3"
    modules = {
        "attention_norm": ["input_layernorm"],
        "attention_post_norm": ["post_attention_layernorm"] if post_norms else [],
        "mlp_norm": ["pre_feedforward_layernorm" if post_norms else "post_attention_layernorm"],
        "mlp_post_norm": ["post_feedforward_layernorm"] if post_norms else [],
        "q_norm": ["self_attn.q_norm"],
        "k_norm": ["self_attn.k_norm"],
        "qkv": [f"self_attn.{part}_proj" for part in (["qkv"] if is_packed else ["q", "k", "v"])],
        "attention_out": ["self_attn.o_proj"],
        "gate_up": [f"mlp.{part}_proj" for part in (["gate_up"] if is_packed else ["gate", "up"])],
        "mlp_out": ["mlp.down_proj"],
    }
    for i in range(config.num_hidden_layers):
        for own, parts in modules.items():
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                sources[f"layers.{i}.{own}{suffix}"] = [f"model.layers.{i}.{part}.{kind}" for part in parts]
    return sources
