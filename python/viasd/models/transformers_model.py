"""The generic path: any decoder-only Transformers model over token slots, with layers bypassed on request."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from viasd.errors import InvalidInput, UnsupportedModel
from viasd.models.base import DecoderOutput, Rows
from viasd.models.bypass import capture_sink, find_layers, make_view, shallow_copy
from viasd.models.identity import config_hash, eos_token_ids, max_positions
from viasd.models.probe import plain_logits, probe
from viasd.models.slot_cache import SlotCache, visible_slots
from viasd.routing import Route

MASK_KINDS = ("full_attention", "sliding_attention")


class TransformersModel:
    """Implements ``viasd.models.base.Model`` for a Transformers causal language model; the model stays untouched.

    A pass is one row of the model's batch with explicit positions and a 4D additive mask (a boolean mask is silently
    wrong on eager models). At construction a short probe compares the slot forward, with a rollback and a tree in it,
    against the model's plain forward. ``reason`` says why no faster path was taken.

    Raises:
        UnsupportedModel: the probe differs or fails, an attention kind or implementation that masks by slots cannot
            serve, weights that are not finite, or a model in training mode.
    """

    implementation = "transformers"

    def __init__(self, model: nn.Module, name: str | None = None, *, reason: str | None = None) -> None:
        if model.training:
            raise UnsupportedModel(f"{type(model).__name__} is in training mode; call model.eval() first")
        self.reason = "the generic path: the model's own forward, over a slot cache"
        self.reason += f" ({reason})" if reason else ""
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.model = shallow_copy(model)  # who holds this object does not hold the user's, and can see when it dies
        self.config = config
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.config_hash = config_hash(config)
        self.eos_token_ids = eos_token_ids(model)
        self.max_positions = max_positions(config)
        self._layers_path = find_layers(model, self.num_layers)
        arguments = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._keeps_logits = "logits_to_keep" in arguments
        self._mask_kinds = self._read_mask_kinds()
        self._layer_returns_tuple = False
        self._views: dict[Route | None, nn.Module] = {}
        self._learn_and_probe()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def check_route(self, route: Route) -> None:
        """See ``viasd.models.base.Model.check_route``."""
        route.check(self.num_layers, self.config_hash, self.name)
        everywhere, cache = range(self.num_layers), self.new_cache()
        rows = Rows([0], [0], [0, 1], cache.pool.take(1), [[]])
        reached = self.forward(rows, cache, route=route, capture_layers=everywhere).captured
        if any(not own.numel() for own in reached.values()):
            raise UnsupportedModel(
                f"route: {self.name} ({type(self.model).__name__}) has a patched forward that goes round the layers "
                "that the route would bypass; take the patch off, or decode without a route"
            )

    def new_cache(self) -> SlotCache:
        return SlotCache(self.num_layers, self.device)

    @torch.inference_mode()
    def forward(
        self,
        rows: Rows,
        cache: SlotCache,
        *,
        route: Route | None = None,
        logits_rows: Sequence[int] | None = None,
        capture_layers: Sequence[int] = (),
    ) -> DecoderOutput:
        """See ``viasd.models.base.Model.forward``."""
        cache.begin(rows)
        device = self.device
        visible = visible_slots(rows, cache)
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor(rows.tokens, device=device).unsqueeze(0),
            "position_ids": torch.tensor(rows.positions, device=device).unsqueeze(0),
            "attention_mask": self._masks(visible, rows, cache),
            self._cache_argument: cache.layers,
            "use_cache": True,
        }
        wanted = None if logits_rows is None else torch.tensor(logits_rows, dtype=torch.int64, device=device)
        if wanted is not None and self._keeps_logits:
            arguments["logits_to_keep"] = wanted
        if not all(0 <= layer < self.num_layers for layer in capture_layers):
            raise InvalidInput(f"capture_layers must lie in [0, {self.num_layers}), got {list(capture_layers)}")
        captured: dict[int, torch.Tensor] = dict.fromkeys(capture_layers, torch.empty(0))
        token = capture_sink.set(captured)
        try:
            logits = self._view(route)(**arguments).logits[0]
        finally:
            capture_sink.reset(token)
        sees_broken = (visible & cache.broken).any(-1)
        if wanted is not None:
            sees_broken = sees_broken[wanted]
            logits = logits if self._keeps_logits else logits[wanted]
        return DecoderOutput(logits.masked_fill_(sees_broken.unsqueeze(1), torch.nan), captured)

    def _view(self, route: Route | None) -> nn.Module:
        if route not in self._views:
            self._views[route] = make_view(self.model, self._layers_path, self._layer_returns_tuple, route)
        return self._views[route]

    def _read_mask_kinds(self) -> list[str]:
        """The kinds of attention mask that the layers take, without repetition."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None) or [MASK_KINDS[1] if window else MASK_KINDS[0]]
        unknown = sorted(set(kinds) - set(MASK_KINDS))
        if unknown:
            raise UnsupportedModel(
                f"{self.name}: layers of kind {', '.join(unknown)} keep state that cannot be rolled back by token slots"
            )
        attention = getattr(self.config, "_attn_implementation", "eager")
        if attention not in ("eager", "sdpa"):
            raise UnsupportedModel(
                f"{self.name}: attention implementation {attention!r} takes no additive mask; "
                "load the model with attn_implementation='sdpa'"
            )
        return sorted(set(kinds))

    def _masks(self, visible: torch.Tensor, rows: Rows, cache: SlotCache) -> torch.Tensor | dict[str, torch.Tensor]:
        masks = {}
        for kind in self._mask_kinds:
            keep = visible
            if kind == "sliding_attention":
                positions = torch.tensor(rows.positions, device=cache.device).unsqueeze(1)
                keep = visible & (positions - cache.positions < self.config.sliding_window)
            additive = torch.zeros(keep.shape, dtype=self.dtype, device=cache.device)
            masks[kind] = additive.masked_fill_(~keep, torch.finfo(self.dtype).min)[None, None]
        return masks if len(masks) > 1 else masks[self._mask_kinds[0]]

    def _learn_and_probe(self) -> None:
        """Probe the slot forward; the plain forward that it is compared with shows what the layers return."""
        layers = self.model.get_submodule(self._layers_path)
        hook = next(layers.children()).register_forward_hook(self._note_layer_output)
        try:
            plain = plain_logits(self.name, self.model, self.vocab_size, self.max_positions)
            probe(self, self.model, plain)
        finally:
            hook.remove()
        cache = self.new_cache()  # what a token's keys and values take is seen once there are some
        self.forward(Rows([0], [0], [0, 1], cache.pool.take(1), [[]]), cache)
        self.slot_bytes = cache.num_bytes // cache.capacity

    def _note_layer_output(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._layer_returns_tuple = isinstance(output, tuple)
