"""Tiny random Transformers models, and passes over their slots."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from viasd.models import Rows

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"head_dim": 16, "sliding_window": 5}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": WINDOW,
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi3": {},
    "olmo2": {},
    "falcon": {},
    "mixtral": {"num_local_experts": 2},
    "stablelm": {},
    "granite": {},
    "gptj": {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8},
    "exaone4": {"sliding_window": 5},
}


def tiny(family, **overrides):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


def chain(model, cache, ids, context=(), route=None, **options):
    slots = cache.pool.take(len(ids))
    positions = range(len(context), len(context) + len(ids))
    output = model.forward(Rows(ids, positions, [0, len(ids)], slots, [context]), cache, route=route, **options)
    return output, [*context, *slots]
