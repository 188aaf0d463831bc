"""The names and shapes of a decoder's weights, and a form of them that code can read."""

from dataclasses import dataclass, fields
from typing import Dict, Mapping, Optional, Sequence, Tuple

import torch

from ..checks import LOGIT_DTYPES, check_tensor
from .config import DecoderConfig


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer; field ``x`` of layer i is called ``layers.i.x`` in the dict. None: the model has no such weight."""

    attention_norm: torch.Tensor  # [D], before attention
    qkv: torch.Tensor  # [(H + 2 H_kv) Dh, D]: the query heads, then the key heads, then the value heads
    attention_out: torch.Tensor  # [D, H Dh]
    mlp_norm: torch.Tensor  # [D], before the MLP
    gate_up: torch.Tensor  # [2 Dff, D]: the gate, then up
    mlp_out: torch.Tensor  # [D, Dff]
    qkv_bias: Optional[torch.Tensor] = None  # [(H + 2 H_kv) Dh]
    q_norm: Optional[torch.Tensor] = None  # [Dh]
    k_norm: Optional[torch.Tensor] = None  # [Dh]
    attention_out_bias: Optional[torch.Tensor] = None  # [D]
    attention_post_norm: Optional[torch.Tensor] = None  # [D], on what attention yields
    gate_up_bias: Optional[torch.Tensor] = None  # [2 Dff]
    mlp_out_bias: Optional[torch.Tensor] = None  # [D]
    mlp_post_norm: Optional[torch.Tensor] = None  # [D], on what the MLP yields


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """All weights of a decoder; ``embedding``, ``final_norm`` and ``head`` go by these names in the dict."""

    embedding: torch.Tensor  # [V, D]
    final_norm: torch.Tensor  # [D]
    head: torch.Tensor  # [V, D]; the embedding itself where the head is tied
    layers: Tuple[LayerWeights, ...]

    @property
    def num_bytes(self) -> int:
        """Of all matrices; a tied head counts once."""
        own = [m for layer in self.layers for m in (layer.qkv, layer.attention_out, layer.gate_up, layer.mlp_out)]
        heads = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        return sum(matrix.nbytes for matrix in own + heads)

    @classmethod
    def from_dict(cls, weights: Mapping[str, torch.Tensor], config: DecoderConfig) -> "DecoderWeights":
        """Check the dict against ``weight_shapes(config)`` and arrange it; nothing is copied.

        Raises:
            ValueError: a name missing or unknown, a wrong shape or device. TypeError: not one floating dtype.
        """
        shapes = check_names(weights, config)
        embedding = take_weight(weights, "embedding", shapes)
        taken = {name: take_weight(weights, name, shapes, embedding) for name in shapes}
        names = [field.name for field in fields(LayerWeights)]
        layers = tuple(
            LayerWeights(**{name: taken.get(f"layers.{i}.{name}") for name in names})  # type: ignore[arg-type]
            for i in range(config.num_layers)
        )
        return cls(embedding, taken["final_norm"], embedding if config.tied_head else taken["head"], layers)


def check_names(weights: Mapping[str, torch.Tensor], config: DecoderConfig) -> Dict[str, Tuple[int, ...]]:
    """``weight_shapes(config)``, once the dict is known to hold these names and no others."""
    shapes = weight_shapes(config)
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unknown:
        raise ValueError(f"SkipDecoder: weights must have the names of weight_shapes; {missing=}, {unknown=}")
    return shapes


def take_weight(
    weights: Mapping[str, torch.Tensor],
    name: str,
    shapes: Mapping[str, Sequence[int]],
    like: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Read one weight, once, and check it; ``like`` has the dtype and device that it must have."""
    weight = weights[name]
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"SkipDecoder: {name} must be a tensor, got {type(weight).__name__}")
    device, dtypes = (weight.device, LOGIT_DTYPES) if like is None else (like.device, (like.dtype,))
    check_tensor("SkipDecoder", name, weight, shapes[name], dtypes, device)
    return weight


def weight_shapes(config: DecoderConfig) -> Dict[str, Tuple[int, ...]]:
    """Every name that a decoder of this configuration needs in its dict of weights, with its shape."""
    hidden, width, heads_dim = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv_dim = heads_dim + 2 * config.num_kv_heads * config.head_dim
    layer: Dict[str, Tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "qkv": (qkv_dim, hidden),
        "attention_out": (hidden, heads_dim),
        "mlp_norm": (hidden,),
        "gate_up": (2 * width, hidden),
        "mlp_out": (hidden, width),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (qkv_dim,)
    if config.qk_norm:
        layer["q_norm"] = layer["k_norm"] = (config.head_dim,)
    if config.attention_out_bias:
        layer["attention_out_bias"] = (hidden,)
    if config.mlp_bias:
        layer["gate_up_bias"], layer["mlp_out_bias"] = (2 * width,), (hidden,)
    if config.post_norms:
        layer["attention_post_norm"] = layer["mlp_post_norm"] = (hidden,)
    shapes: Dict[str, Tuple[int, ...]] = {"embedding": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes
