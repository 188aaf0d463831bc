"""Layer skipping in plain PyTorch: the specification, on any device, in float64 too."""

from typing import Mapping, Optional, Tuple

import torch
import torch.nn.functional as F

from ..tree_verify.reference import build_tree, soft_capped, tree_attention
from .config import DecoderConfig
from .rope import inverse_frequencies, rotate, rotation
from .structs import DecoderOutput, RowPlaces, Step
from .weights import DecoderWeights, LayerWeights


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension, rounded once, at the end."""
    wide = x.to(accumulation_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.to(wide.dtype) + weight_offset)).to(x.dtype)


def bypass_add(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    keep: torch.Tensor,
    delta_weight: Optional[torch.Tensor],
    eps: float,
    weight_offset: float,
) -> torch.Tensor:
    """The residual stream after a sub-layer: a row that bypasses it keeps its bits, whatever its delta holds."""
    if delta_weight is not None:
        delta = rms_norm(delta, delta_weight, eps, weight_offset)
    return torch.where(keep.unsqueeze(1), hidden + delta, hidden)


def bypass_norm(
    hidden: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
    delta_weight: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The residual stream after a sub-layer, and its norm for the next one."""
    hidden_out = hidden.clone() if delta is None else bypass_add(hidden, delta, keep, delta_weight, eps, weight_offset)
    return hidden_out, rms_norm(hidden_out, weight, eps, weight_offset)


def bypass_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    keep: torch.Tensor,
    *,
    bias: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
    activation: Optional[str] = None,
) -> torch.Tensor:
    """A linear layer and its epilogue for the rows that keep it; the others yield their residual, or 0."""
    out = _linear(x, weight, bias)
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        out = (F.silu(gate) if activation == "silu_mul" else F.gelu(gate, approximate="tanh")) * up
    if residual is None:
        bypassed = out.new_zeros((), dtype=x.dtype)
    else:
        out, bypassed = out + residual, residual
    return torch.where(keep.unsqueeze(1), out.to(x.dtype), bypassed)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """x weight^T + bias in the accumulation dtype."""
    wide = accumulation_dtype(x.dtype)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


class ReferenceDecoder:
    """A decoder in plain PyTorch, in the weights' own dtype and on their device; uses the weights without a copy."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: DecoderConfig) -> None:
        self.config = config
        self.weights = DecoderWeights.from_dict(weights, config)
        self.weight_bytes = self.weights.num_bytes
        device = self.weights.embedding.device
        self.frequencies = {
            layer.rope: inverse_frequencies(layer.rope, config.head_dim).to(device) for layer in config.layers
        }

    def step(self, step: Step) -> DecoderOutput:
        """Embed the rows, run the sub-layers that they keep, and score the rows asked for."""
        weights, config = self.weights, self.config
        eps, offset = config.norm_eps, config.norm_weight_offset
        places = RowPlaces.of(step.tokens.shape[0], step.row_start, step.kv, step.parents)
        longest = int(step.row_start.diff().max()) if places.slots.numel() else 1
        ancestors = build_tree(places.parents, step.row_start, max_rows=longest).ancestors
        hidden = embed(weights.embedding, step.tokens, config.embedding_scale)
        rotations = {rope: rotation(turns, step.positions) for rope, turns in self.frequencies.items()}
        captured = {}
        for i, (kind, layer) in enumerate(zip(config.layers, weights.layers)):
            if i in step.capture_layers:
                captured[i] = hidden
            if step.kept[i][0]:
                keep = step.keep_rows(i, 0)
                normed = rms_norm(hidden, layer.attention_norm, eps, offset)
                q, k, v = self._project(normed, keep, layer, rotations[kind.rope])
                keys, values, written = step.kv.pool.keys[i], step.kv.pool.values[i], places.slots[keep]
                keys[written], values[written] = k[keep], v[keep]
                attended = tree_attention(
                    q,
                    keys,
                    values,
                    step.kv.slots,
                    step.kv.context_len,
                    step.row_start,
                    ancestors,
                    scale=config.score_scale,
                    soft_cap=config.attention_soft_cap,
                    window=kind.window,
                )
                delta = bypass_linear(attended.flatten(1), layer.attention_out, keep, bias=layer.attention_out_bias)
                hidden = bypass_add(hidden, delta, keep, layer.attention_post_norm, eps, offset)
            if step.kept[i][1]:
                keep = step.keep_rows(i, 1)
                normed = rms_norm(hidden, layer.mlp_norm, eps, offset)
                inner = bypass_linear(
                    normed, layer.gate_up, keep, bias=layer.gate_up_bias, activation=config.activation
                )
                delta = bypass_linear(inner, layer.mlp_out, keep, bias=layer.mlp_out_bias)
                hidden = bypass_add(hidden, delta, keep, layer.mlp_post_norm, eps, offset)
        if config.num_layers in step.capture_layers:
            captured[config.num_layers] = hidden
        hidden = rms_norm(hidden, weights.final_norm, eps, offset)
        scored = hidden if step.logits_rows is None else hidden[step.logits_rows.long()]
        logits = soft_capped(_linear(scored, weights.head, None), config.logit_soft_cap)
        return DecoderOutput(hidden, logits.to(hidden.dtype), captured)

    def _project(
        self,
        normed: torch.Tensor,
        keep: torch.Tensor,
        layer: LayerWeights,
        angles: Tuple[torch.Tensor, torch.Tensor],
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [R, H, Dh], keys and values [R, H_kv, Dh], the first two rotated."""
        config = self.config
        packed = bypass_linear(normed, layer.qkv, keep, bias=layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        q, k, v = packed.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.norm_eps, config.norm_weight_offset)
            k = rms_norm(k, layer.k_norm, config.norm_eps, config.norm_weight_offset)
        q, k = (rotate(x.to(accumulation_dtype(x.dtype)), *angles).to(x.dtype) for x in (q, k))
        return q, k, v


def embed(embedding: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows of the embedding times ``scale``; zeros for ids outside [0, V), which are never used as an index."""
    known = (tokens >= 0) & (tokens < embedding.shape[0])
    rows = embedding[tokens.long() * known] * torch.tensor(scale, dtype=embedding.dtype).item()
    return torch.where(known.unsqueeze(1), rows, rows.new_zeros(()))
