"""Tiny random Transformers models of every family, and what a SkipDecoder needs of them."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from viasd_kernels.layer_skip import DecoderConfig, LayerConfig, RopeConfig, SkipDecoder

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
# Soft caps and the query scale are small enough to matter in a tiny model.
GEMMA2 = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 1.5}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 5,
    "query_pre_attn_scalar": 10,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SLIDING_QWEN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
VARIANTS = {
    "llama": ("llama", {}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 6, "rope_theta": 100_000.0}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": LINEAR}),
    "partial rope": ("phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2, two windows": ("qwen2", SLIDING_QWEN),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {**GEMMA2, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA3, "rope_local_base_freq": 100.0}),
    "gemma3, linear rope": (
        "gemma3_text",
        {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 3.0},
    ),
}


def tiny(name: str, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A model whose every weight is random, norms and biases too, and whose logits are of the order of 1."""
    family, overrides = VARIANTS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **overrides})).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if "norm" in key:
                weight.copy_(0.2 * values + (0.0 if "gemma" in family else 1.0))
            elif weight.ndim == 1:
                weight.copy_(0.3 * values)
            else:
                weight.copy_(values * weight.shape[1] ** -0.5)
    return model.to(dtype)


def decoder_of(model: torch.nn.Module, impl: str = "reference") -> SkipDecoder:
    return SkipDecoder(map_weights(model), map_config(model.config), impl=impl)


def map_config(hf) -> DecoderConfig:
    gemma, gemma2 = hf.model_type in ("gemma2", "gemma3_text"), hf.model_type == "gemma2"
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    has_bias = hf.model_type == "qwen2" or getattr(hf, "attention_bias", False)
    return DecoderConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        layers=map_layers(hf, head_dim),
        norm_eps=hf.rms_norm_eps,
        norm_weight_offset=1.0 if gemma else 0.0,
        activation="gelu_tanh_mul" if gemma else "silu_mul",
        attention_scale=hf.query_pre_attn_scalar**-0.5 if gemma else None,
        # Gemma 3 has the option, but its attention does not use it.
        attention_soft_cap=hf.attn_logit_softcapping if gemma2 else None,
        logit_soft_cap=getattr(hf, "final_logit_softcapping", None),
        embedding_scale=hf.hidden_size**0.5 if gemma else 1.0,
        qk_norm=hf.model_type in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        qkv_bias=has_bias,
        attention_out_bias=has_bias and hf.model_type != "qwen2",
        mlp_bias=getattr(hf, "mlp_bias", False),
        tied_head=hf.tie_word_embeddings,
    )


def map_layers(hf, head_dim: int) -> tuple[LayerConfig, ...]:
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    layers = []
    for kind in kinds:
        rope = hf.rope_parameters.get(kind, hf.rope_parameters)
        own = {"theta": rope["rope_theta"], "kind": rope["rope_type"]}
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            own["rotary_dim"] = int(head_dim * rope["partial_rotary_factor"])
        if rope["rope_type"] != "default":
            own["factor"] = rope["factor"]
        if rope["rope_type"] == "llama3":
            own["low_freq_factor"], own["high_freq_factor"] = rope["low_freq_factor"], rope["high_freq_factor"]
            own["original_max_positions"] = rope["original_max_position_embeddings"]
        layers.append(LayerConfig(window if kind == "sliding_attention" else None, RopeConfig(**own)))
    return tuple(layers)


def map_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state, hf = model.state_dict(), model.config
    weights = {"embedding": state["model.embed_tokens.weight"], "final_norm": state["model.norm.weight"]}
    if not hf.tie_word_embeddings:
        weights["head"] = state["lm_head.weight"]
    post_norms = hf.model_type.startswith("gemma")
    names = {
        "attention_norm": "input_layernorm.weight",
        "attention_post_norm": "post_attention_layernorm.weight" if post_norms else None,
        "mlp_norm": "pre_feedforward_layernorm.weight" if post_norms else "post_attention_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
        "qkv": "self_attn.qkv_proj.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "attention_out": "self_attn.o_proj.weight",
        "attention_out_bias": "self_attn.o_proj.bias",
        "gate_up": "mlp.gate_up_proj.weight",
        "mlp_out": "mlp.down_proj.weight",
        "mlp_out_bias": "mlp.down_proj.bias",
    }
    for i in range(hf.num_hidden_layers):
        layer = f"model.layers.{i}."
        for own, name in names.items():
            if name is not None and layer + name in state:
                weights[f"layers.{i}.{own}"] = state[layer + name]
        for own, parts in (
            ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            for suffix, kind in (("", "weight"), ("_bias", "bias")):
                if f"{layer}{parts[0]}.{kind}" in state:
                    packed = torch.cat([state[f"{layer}{part}.{kind}"] for part in parts])
                    weights[f"layers.{i}.{own}{suffix}"] = packed
    return weights
