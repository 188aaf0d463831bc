"""The decode step on a GPU: few rows through Triton kernels, many through torch's products and attention."""

from typing import List, Mapping, Optional

import torch

from ..tree_verify.op import build_tree_op, tree_attention_op
from ..tree_verify.reference import soft_capped
from .config import DecoderConfig
from .cuda_graphs import PassGraphs
from .many_rows import attend_many, linear_many
from .reference import embed
from .rope import inverse_frequencies, rotation
from .structs import DecoderOutput, RowPlaces, Step
from .triton_linear import MAX_ROWS, bypass_linear
from .triton_norm import bypass_norm
from .triton_rotary import rotate_and_store
from .weights import DecoderWeights, LayerWeights


class TritonDecoder:
    """A decoder on the weights as they are. Passes of up to MAX_ROWS rows are captured in CUDA graphs and replayed.

    A pass reads nothing back from the device, but for one of more rows, which reads where its sequences lie.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], config: DecoderConfig, *, graphs: bool) -> None:
        self.config = config
        self.weights = DecoderWeights.from_dict(weights, config)
        self.weight_bytes = self.weights.num_bytes
        device = self.weights.embedding.device
        self.frequencies = {
            layer.rope: inverse_frequencies(layer.rope, config.head_dim).to(device) for layer in config.layers
        }
        self._graphs = PassGraphs(self._run) if graphs and device.type == "cuda" else None

    def step(self, step: Step) -> DecoderOutput:
        """Run one pass whose arguments have been checked."""
        if self._graphs is not None and 0 < step.tokens.shape[0] <= MAX_ROWS:
            return self._graphs.step(step)
        return self._run(step)

    def _run(self, step: Step) -> DecoderOutput:
        return _Pass(self, step).run()


class _Pass:
    """One pass: the residual stream, and what the last sub-layer yielded, which the next norm adds to it."""

    def __init__(self, decoder: TritonDecoder, step: Step) -> None:
        self.config, self.weights, self.step = decoder.config, decoder.weights, step
        num_rows = step.tokens.shape[0]
        self.places = RowPlaces.of(num_rows, step.row_start, step.kv, step.parents)
        self.ancestors, *_ = build_tree_op(self.places.parents, step.row_start, max(num_rows, 1), "triton")
        self.rotations = {rope: rotation(turns, step.positions) for rope, turns in decoder.frequencies.items()}
        self.hidden = embed(self.weights.embedding, step.tokens, self.config.embedding_scale)
        self.delta: Optional[torch.Tensor] = None
        self.delta_keep = self.places.present
        self.post_norm: Optional[torch.Tensor] = None
        self.captured = dict.fromkeys(step.capture_layers, self.hidden)

    def run(self) -> DecoderOutput:
        config, weights, step = self.config, self.weights, self.step
        waiting: List[int] = []  # layers to capture: the stream that enters them is complete after the next norm
        for i, layer in enumerate(weights.layers):
            waiting += [i] if i in self.captured else []
            if step.kept[i][0]:
                keep, normed = self._keep(i, 0), self._norm(layer.attention_norm, waiting)
                attended = self._attend(i, layer, keep, normed)
                self._add(attended, layer.attention_out, layer.attention_out_bias, keep, layer.attention_post_norm)
            if step.kept[i][1]:
                keep, normed = self._keep(i, 1), self._norm(layer.mlp_norm, waiting)
                inner = self._linear(normed, layer.gate_up, keep, layer.gate_up_bias, config.activation)
                self._add(inner, layer.mlp_out, layer.mlp_out_bias, keep, layer.mlp_post_norm)
        waiting += [config.num_layers] if config.num_layers in self.captured else []
        hidden = self._norm(weights.final_norm, waiting)
        scored = hidden if step.logits_rows is None else hidden[step.logits_rows.long()]
        everywhere = torch.ones(scored.shape[0], dtype=torch.bool, device=hidden.device)
        logits = self._linear(scored, weights.head, everywhere, None)
        return DecoderOutput(hidden, soft_capped(logits, config.logit_soft_cap), self.captured)

    def _keep(self, layer: int, sub_layer: int) -> torch.Tensor:
        """[R] bool: the rows of some sequence that keep the sub-layer."""
        if self.step.row_route is None:
            return self.places.present
        return self.step.row_route[:, layer, sub_layer] & self.places.present

    def _norm(self, weight: torch.Tensor, waiting: List[int]) -> torch.Tensor:
        """Bring the residual stream up to date and norm it."""
        config = self.config
        self.hidden, normed = bypass_norm(
            self.hidden,
            self.delta,
            self.delta_keep,
            weight,
            config.norm_eps,
            config.norm_weight_offset,
            self.post_norm,
        )
        self.delta = self.post_norm = None
        self.captured.update(dict.fromkeys(waiting, self.hidden))
        waiting.clear()
        return normed

    def _add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        keep: torch.Tensor,
        post_norm: Optional[torch.Tensor],
    ) -> None:
        """Leave a sub-layer's last product for the next norm to add."""
        self.delta, self.delta_keep, self.post_norm = self._linear(x, weight, keep, bias), keep, post_norm

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        keep: torch.Tensor,
        bias: Optional[torch.Tensor],
        activation: Optional[str] = None,
    ) -> torch.Tensor:
        if x.shape[0] > MAX_ROWS:
            return linear_many(x, weight, keep, bias, activation)
        return bypass_linear(x, weight, keep, bias, None, activation)

    def _attend(self, i: int, layer: LayerWeights, keep: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """[R, H Dh]: what layer i's heads read; rows that bypass its attention hold anything."""
        config, step = self.config, self.step
        keys, values = step.kv.pool.keys[i], step.kv.pool.values[i]
        packed = self._linear(normed, layer.qkv, keep, layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        q = rotate_and_store(
            packed,
            (layer.q_norm, layer.k_norm),
            self.rotations[config.layers[i].rope],
            keep,
            self.places,
            keys,
            values,
            config.norm_eps,
            config.norm_weight_offset,
        )
        places = (step.kv.slots, step.kv.context_len, step.row_start, self.ancestors)
        options = (config.score_scale, config.attention_soft_cap, config.layers[i].window)
        if q.shape[0] > MAX_ROWS:
            return attend_many(q, keys, values, *places, *options).flatten(1)
        return tree_attention_op(q, keys, values, *places, *options, "triton").flatten(1)
