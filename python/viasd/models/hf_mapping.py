"""Transformers' configurations and weights in the terms of ``viasd_kernels.SkipDecoder``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from viasd_kernels import DecoderConfig, LayerConfig, RopeConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
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


def decoder_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights by the names of ``viasd_kernels.weight_shapes``; q, k, v and gate, up are packed."""
    state = model.state_dict()
    config: Any = model.config
    weights = {"embedding": state["model.embed_tokens.weight"], "final_norm": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        weights["head"] = state["lm_head.weight"]
    post_norms = config.model_type.startswith("gemma")
    names = {
        "input_layernorm.weight": "attention_norm",
        "post_attention_layernorm.weight": "attention_post_norm" if post_norms else "mlp_norm",
        "pre_feedforward_layernorm.weight": "mlp_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
        "self_attn.q_norm.weight": "q_norm",
        "self_attn.k_norm.weight": "k_norm",
        "self_attn.o_proj.weight": "attention_out",
        "self_attn.o_proj.bias": "attention_out_bias",
        "mlp.down_proj.weight": "mlp_out",
        "mlp.down_proj.bias": "mlp_out_bias",
    }
    packed = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        for name, own in names.items():
            if layer + name in state:
                weights[f"layers.{i}.{own}"] = state[layer + name]
        for own, parts in packed.items():
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                if f"{layer}{parts[0]}.{kind}" in state:
                    tensors = [state[f"{layer}{part}.{kind}"] for part in parts]
                    weights[f"layers.{i}.{own}{suffix}"] = torch.cat(tensors)
    return weights
