"""Decoders in the shapes of real models, with random weights made on the device; and one whose output is known."""

from __future__ import annotations

import torch

from viasd.models.base import SlotPool
from viasd.models.skip_model import SkipCache, SkipModel
from viasd.routing import Route
from viasd_kernels import DecoderConfig, SkipDecoder, weight_shapes

SLIM_SHARE = 0.45  # of the middle sub-layers that the slim tier bypasses


def slim_route(config: DecoderConfig) -> Route:
    return Route.spread(config.num_layers, attention=SLIM_SHARE, mlp=SLIM_SHARE)


def route_pairs(route: Route | None) -> list[tuple[bool, bool]] | None:
    """What ``SkipDecoder.forward`` takes."""
    return None if route is None else list(zip(route.attention, route.mlp, strict=True))


def random_weights(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Norms of 1, and everything else so that activations and logits are of the order of 1."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in weight_shapes(config).items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            weights[name] = weight.fill_(1.0 - config.norm_weight_offset if "norm" in name else 0.0)
        else:
            scale = 1.0 if name == "embedding" else shape[1] ** -0.5
            weights[name] = weight.normal_(0.0, scale, generator=generator)
    return weights


def bytes_of_step(weights: dict[str, torch.Tensor], config: DecoderConfig, route: Route | None) -> int:
    """Of the weights that a step must read: all of the sub-layers that it keeps, and the head."""
    total = (weights["embedding"] if config.tied_head else weights["head"]).nbytes
    for layer in range(config.num_layers):
        kept = (True, True) if route is None else (route.attention[layer], route.mlp[layer])
        for names, keep in zip((("qkv", "attention_out"), ("gate_up", "mlp_out")), kept, strict=True):
            total += sum(weights[f"layers.{layer}.{name}"].nbytes for name in names) if keep else 0
    return total


PERIOD = 10  # tokens after which the full model's output starts again
BRANCH = 0.01  # of the size of embeddings is what ordinary sub-layers add: too little to change a token
MARK, PUSH = 0, 1  # two elements of the residual stream that nothing else uses


def full_successor(token: int) -> int:
    return 0 if token % PERIOD == PERIOD - 1 else token + 1


def slim_successor(token: int) -> int:
    return token + 1


def set_successors(weights: dict[str, torch.Tensor], config: DecoderConfig, route: Route) -> None:
    """Change random weights so that greedy output is known, with margins that no rounding bridges; in place.

    The head predicts token + 1 from a token's embedding. A neuron of an MLP that the slim tier bypasses sees a mark in
    the embedding of each PERIOD-th token and pushes the stream towards token 0. So the full model counts from 0 to
    PERIOD - 1 over and over, and the slim tier goes wrong once in PERIOD tokens. What a step costs stays the same.
    """
    embedding, head = weights["embedding"], weights["head"]
    embedding[:, [MARK, PUSH]] = 0.0
    head.copy_(embedding.roll(1, 0) * config.hidden_size**-0.5)
    embedding[PERIOD - 1 :: PERIOD, MARK] = 8.0
    head[0, PUSH] = 2.0
    for layer in range(config.num_layers):
        weights[f"layers.{layer}.attention_out"].mul_(BRANCH)
        weights[f"layers.{layer}.mlp_out"].mul_(BRANCH)
    layer = route.mlp.index(False)
    gate_up, mlp_out = weights[f"layers.{layer}.gate_up"], weights[f"layers.{layer}.mlp_out"]
    for row in (0, config.intermediate_size):
        gate_up[row] = 0.0
        gate_up[row, MARK] = 1.0
    mlp_out[:, 0] = 0.0
    mlp_out[PUSH, 0] = 1.0


class DecoderModel(SkipModel):
    """``SkipModel`` over a decoder that comes from no module. Its caches share one pool, so they follow each other.

    The pool keeps its place, as that of a server would: passes captured for one run serve the next.
    """

    def __init__(self, name: str, decoder: SkipDecoder, num_slots: int) -> None:
        config = decoder.config
        self.name, self.decoder, self.config_hash, self.eos_token_ids = name, decoder, "", ()
        self.num_layers, self.vocab_size, self.max_positions = config.num_layers, config.vocab_size, num_slots
        self.implementation, self.reason = decoder.implementation, "random weights"
        self.kv = decoder.new_pool(num_slots)
        self.slot_bytes = 2 * self.kv.keys[:, 0].nbytes

    def new_cache(self) -> SkipCache:
        return SkipCache(self.kv, SlotPool())
