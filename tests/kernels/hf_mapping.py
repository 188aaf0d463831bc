"""Tiny random Transformers models of every family, and what a SkipDecoder needs of them."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from viasd.models.hf_mapping import decoder_config, decoder_weights
from viasd_kernels.layer_skip import SkipDecoder

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


# Which implementation `decoder_of` takes: the fixture `each_implementation` sets it.
IMPLEMENTATION = "auto"


def decoder_of(model: torch.nn.Module) -> SkipDecoder:
    return SkipDecoder(decoder_weights(model), decoder_config(model.config), impl=IMPLEMENTATION)


def map_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in decoder_weights(model).items()}
