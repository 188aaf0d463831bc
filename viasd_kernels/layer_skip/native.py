"""Calls into ``csrc/layer_skip`` on the CPU: addresses and sizes of contiguous, rightly typed tensors."""

from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from ..native import ELEMENT_CODES, address, load_native, ready
from .config import ACTIVATIONS, DecoderConfig
from .rope import inverse_frequencies
from .structs import DecoderOutput, Step
from .weights import check_names, take_weight

PANEL = 16  # outputs that lie side by side
CHUNK_BYTES = 1 << 26  # packed weights share pieces of memory, so that large pages can hold them
NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_post_norm", "mlp_post_norm")
LINEARS = ("qkv", "attention_out", "gate_up", "mlp_out")


def _rows(matrix: Optional[torch.Tensor]) -> Tuple[int, int]:
    return (0, 0) if matrix is None else (matrix.data_ptr(), matrix.stride(0))


def bypass_norm(
    hidden: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    delta_weight: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    hidden_out, normed = torch.empty(hidden.shape, dtype=hidden.dtype), torch.empty(hidden.shape, dtype=hidden.dtype)
    keep, weight = keep.contiguous(), weight.float() + weight_offset
    delta_weight = None if delta_weight is None else delta_weight.float() + weight_offset
    load_native().bypass_norm(
        element=ELEMENT_CODES[hidden.dtype],
        num_rows=hidden.shape[0],
        width=hidden.shape[1],
        hidden=_rows(hidden),
        delta=_rows(delta),
        keep=keep.data_ptr(),
        weight=weight.data_ptr(),
        delta_weight=address(delta_weight),
        eps=eps,
        hidden_out=_rows(hidden_out),
        normed=_rows(normed),
        num_threads=torch.get_num_threads(),
    )
    return hidden_out, normed


def bypass_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    keep: torch.Tensor,
    bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    activation: Optional[str],
) -> torch.Tensor:
    width = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = torch.empty(x.shape[0], width, dtype=x.dtype)
    keep, bias = keep.contiguous(), None if bias is None else ready(bias, torch.float32)
    load_native().bypass_linear(
        element=ELEMENT_CODES[x.dtype],
        num_rows=x.shape[0],
        depth=x.shape[1],
        num_outputs=weight.shape[0],
        x=_rows(x),
        weight=_rows(weight),
        keep=keep.data_ptr(),
        bias=address(bias),
        residual=_rows(residual),
        epilogue=0 if activation is None else 1 + ACTIVATIONS.index(activation),
        out=_rows(out),
        num_threads=torch.get_num_threads(),
    )
    return out


class NativeDecoder:
    """A decoder over weights in panels, one call per pass.

    Norms and biases are kept as float32. ``compact``: each matrix takes the coding of fewest bytes that holds all its
    weights exactly (``csrc/layer_skip/pack_weights.h``); else that of its dtype. The results are the same, bit for bit.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: DecoderConfig,
        embedding: torch.Tensor,
        *,
        compact: bool,
    ) -> None:
        self.config = config
        self._native = load_native()
        self._compact = compact
        self._weights, self._shapes = weights, check_names(weights, config)
        self._embedding = embedding  # read already: each name is read once
        self.dtype = embedding.dtype
        self._chunks: List[torch.Tensor] = []
        self._room = 0  # bytes left in the last chunk
        self._tensors: List[torch.Tensor] = []  # what the compiled side points to beside panels
        self.weight_bytes = 0

        head = self._linear("embedding" if config.tied_head else "head", None)
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        layers = [
            self._layer(i, window=layer.window or 0, rope=ropes.index(layer.rope))
            for i, layer in enumerate(config.layers)
        ]
        model = {
            "element": ELEMENT_CODES[self.dtype],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "activation": ACTIVATIONS.index(config.activation),
            "eps": config.norm_eps,
            "score_scale": config.score_scale,
            "attention_soft_cap": config.attention_soft_cap or 0.0,
            "logit_soft_cap": config.logit_soft_cap or 0.0,
            "embedding_scale": torch.tensor(config.embedding_scale, dtype=self.dtype).item(),
            "embedding": 0 if config.tied_head else self._keep(embedding.contiguous()),
            "final_norm": self._norm("final_norm"),
            "head": head,
        }
        turns = [self._keep(inverse_frequencies(rope, config.head_dim).contiguous()) for rope in ropes]
        pairs = [(rope.rotary_dim or config.head_dim) // 2 for rope in ropes]
        self._decoder = self._native.Decoder(
            model, layers, [{"frequencies": at, "num_pairs": count} for at, count in zip(turns, pairs)]
        )
        del self._weights, self._embedding

    def step(self, step: Step) -> DecoderOutput:
        """Run one pass whose arguments have been checked."""
        config, pool = self.config, step.kv.pool
        if not (pool.keys.is_contiguous() and pool.values.is_contiguous()):
            raise ValueError("SkipDecoder: kv.pool must be contiguous")
        num_rows = step.tokens.shape[0]
        tokens, positions, row_start, context_len = (
            ready(index, torch.int64) for index in (step.tokens, step.positions, step.row_start, step.kv.context_len)
        )
        parents, logits_rows = (
            None if index is None else ready(index, torch.int64) for index in (step.parents, step.logits_rows)
        )
        slots = ready(step.kv.slots, torch.int32)
        route = torch.tensor(step.kept)
        row_route = None if step.row_route is None else step.row_route.contiguous()
        num_logits = num_rows if logits_rows is None else logits_rows.shape[0]
        hidden = torch.empty(num_rows, config.hidden_size, dtype=self.dtype)
        logits = torch.empty(num_logits, config.vocab_size, dtype=self.dtype)
        captured = {layer: torch.empty_like(hidden) for layer in step.capture_layers}
        self._decoder.step(
            num_rows=num_rows,
            num_sequences=row_start.shape[0] - 1,
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            row_start=row_start.data_ptr(),
            parents=address(parents),
            slots=slots.data_ptr(),
            max_len=slots.shape[1],
            context_len=context_len.data_ptr(),
            keys=pool.keys.data_ptr(),
            values=pool.values.data_ptr(),
            num_slots=pool.num_slots,
            route=route.data_ptr(),
            row_route=address(row_route),
            logits_rows=address(logits_rows),
            num_logits=num_logits,
            captures=[(layer, out.data_ptr()) for layer, out in captured.items()],
            hidden=hidden.data_ptr(),
            logits=logits.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
        return DecoderOutput(hidden, logits, captured)

    def _layer(self, i: int, *, window: int, rope: int) -> Dict[str, Any]:
        layer: Dict[str, Any] = {"window": window, "rope": rope}
        for name in NORMS:
            layer[name] = self._norm(f"layers.{i}.{name}")
        for name in LINEARS:
            layer[name] = self._linear(f"layers.{i}.{name}", f"layers.{i}.{name}_bias")
        return layer

    def _take(self, name: str) -> torch.Tensor:
        if name == "embedding":
            return self._embedding
        return take_weight(self._weights, name, self._shapes, self._embedding)

    def _keep(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _norm(self, name: str) -> int:
        """The address of a norm's weight with its offset, 0 where the model has no such norm."""
        return self._keep(self._take(name).float() + self.config.norm_weight_offset) if name in self._shapes else 0

    def _linear(self, name: str, bias_name: Optional[str]) -> Dict[str, int]:
        """Pack a matrix."""
        weight, halves = self._take(name), name.endswith("gate_up")  # gate and up, panels of each in turn
        code = ELEMENT_CODES[self.dtype]
        matrix = (code, weight.data_ptr(), weight.stride(0), weight.shape[0], weight.shape[1], halves)
        num_threads = torch.get_num_threads()
        coding = self._native.smallest_coding(matrix, num_threads) if self._compact else code
        panels = self._room_for(self._native.packed_bytes(matrix, coding))
        self._native.pack_weights(matrix, coding, panels, num_threads)
        parts = 2 if halves else 1
        padded = -(-weight.shape[0] // parts // PANEL) * PANEL  # outputs of a part, in whole panels
        bias = self._bias(bias_name, parts, padded) if bias_name in self._shapes else 0
        outputs = parts * padded if halves else weight.shape[0]
        return {"coding": coding, "panels": panels, "bias": bias, "outputs": outputs, "depth": weight.shape[1]}

    def _bias(self, name: str, parts: int, padded: int) -> int:
        """The address of a bias in the order of its matrix's panels, zeros where those have no output."""
        values = torch.zeros(parts, padded)
        values[:, : self._shapes[name][0] // parts] = self._take(name).float().view(parts, -1)
        return self._keep(values.view(parts, -1, PANEL).transpose(0, 1).contiguous())

    def _room_for(self, num_bytes: int) -> int:
        """The address of memory for panels."""
        self.weight_bytes += num_bytes
        if num_bytes > self._room:
            chunk = torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
            self._native.advise_huge_pages(chunk.data_ptr(), chunk.numel())
            self._chunks.append(chunk)
            self._room = chunk.numel()
        at = self._chunks[-1].data_ptr() + self._chunks[-1].numel() - self._room
        self._room -= num_bytes
        return at
