"""What a decoder-only model looks like: sizes, norms, attention, rotary embedding; everything but its weights."""

from dataclasses import dataclass
from math import isfinite
from typing import Optional, Tuple

ROPE_KINDS = ("default", "linear", "llama3", "given")
ACTIVATIONS = ("silu_mul", "gelu_tanh_mul")


def _require_positive(owner: str, name: str, value: float) -> None:
    if not (value > 0 and isfinite(value)):
        raise ValueError(f"{owner}: {name} must be finite and > 0, got {value}")


@dataclass(frozen=True)
class RopeConfig:
    """How fast each pair of a head's dimensions turns with the position (rotary embedding, arXiv:2104.09864).

    With r = rotary_dim, dimensions j and j + r/2 turn together by position * f(j), f(j) = theta ** (-2j / r); those
    from r on stay as they are ("partial" rotary embedding).

    Attributes:
        theta: the base.
        kind: "default"; "linear": f / factor; "llama3": f / factor where a turn takes more than
            original_max_positions / low_freq_factor positions, f where it takes fewer than
            original_max_positions / high_freq_factor, interpolated between the two; "given": f is ``frequencies``, and
            theta is not read.
        rotary_dim: even, at most head_dim; None: all of head_dim.
        factor: of "linear" and "llama3".
        low_freq_factor: of "llama3".
        high_freq_factor: of "llama3", above low_freq_factor.
        original_max_positions: of "llama3".
        frequencies: of "given": f(0) to f(r/2 - 1), in radians per position.
    """

    theta: float = 10_000.0
    kind: str = "default"
    rotary_dim: Optional[int] = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    frequencies: Tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"RopeConfig: kind must be one of {', '.join(map(repr, ROPE_KINDS))}, got {self.kind!r}")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            _require_positive("RopeConfig", name, getattr(self, name))
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"RopeConfig: rotary_dim must be even and >= 2, or None, got {self.rotary_dim}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RopeConfig: high_freq_factor must be above low_freq_factor = {self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        window: a row at position p attends to positions above p - window; None: to all.
        rope: the layer's rotary embedding.
    """

    window: Optional[int] = None
    rope: RopeConfig = RopeConfig()

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"LayerConfig: window must be >= 1 or None, got {self.window}")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only model of the Llama kind: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text).

    Attributes:
        vocab_size: V.
        hidden_size: D.
        intermediate_size: Dff, the MLP's width.
        num_heads: H, query heads.
        num_kv_heads: H_kv, divides H; query head h reads key head h // (H / H_kv).
        head_dim: Dh; H * Dh need not be D.
        layers: one per layer.
        norm_eps: epsilon of every RMSNorm.
        norm_weight_offset: added to every norm's weight (1.0 in Gemma).
        activation: "silu_mul" or "gelu_tanh_mul".
        attention_scale: factor of the attention scores; None: Dh ** -0.5.
        attention_soft_cap: attention scores s become cap * tanh(s / cap); None leaves them.
        logit_soft_cap: the same for the logits.
        embedding_scale: factor of the embeddings, rounded to the weights' dtype, as Transformers does.
        qk_norm: whether queries and keys are normed per head, before the rotary embedding.
        post_norms: whether what a sub-layer yields is normed before it is added to the residual stream.
        qkv_bias, attention_out_bias, mlp_bias: which linear layers have a bias (mlp: gate-up and out).
        tied_head: whether the LM head is the embedding.

    Raises:
        ValueError: sizes that do not fit together, or values out of range.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: Tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    norm_weight_offset: float = 0.0
    activation: str = "silu_mul"
    attention_scale: Optional[float] = None
    attention_soft_cap: Optional[float] = None
    logit_soft_cap: Optional[float] = None
    embedding_scale: float = 1.0
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "norm_eps", "embedding_scale"):
            _require_positive("DecoderConfig", name, getattr(self, name))
        for name in ("attention_scale", "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                _require_positive("DecoderConfig", name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"DecoderConfig: num_kv_heads must divide num_heads = {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"DecoderConfig: activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {self.activation!r}"
            )
        if not self.layers:
            raise ValueError("DecoderConfig: layers must hold at least one LayerConfig")
        for layer in self.layers:
            rotary_dim = self.head_dim if layer.rope.rotary_dim is None else layer.rope.rotary_dim
            if rotary_dim > self.head_dim or rotary_dim % 2:
                raise ValueError(
                    f"DecoderConfig: rotary_dim must be even and at most head_dim = {self.head_dim}, got {rotary_dim}"
                )
            if layer.rope.kind == "given" and len(layer.rope.frequencies) != rotary_dim // 2:
                raise ValueError(
                    f"DecoderConfig: a rope of kind 'given' must have rotary_dim / 2 = {rotary_dim // 2} frequencies, "
                    f"got {len(layer.rope.frequencies)}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def score_scale(self) -> float:
        """The factor of the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
