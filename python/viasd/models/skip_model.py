"""The fast path: architectures that ``viasd_kernels.SkipDecoder`` knows, one call per pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from viasd.errors import UnsupportedModel
from viasd.models.base import DecoderOutput, Rows, SlotPool
from viasd.models.hf_mapping import UnknownArchitecture, decoder_config, decoder_weights
from viasd.models.identity import config_hash, eos_token_ids, max_positions
from viasd.models.probe import plain_logits, probe
from viasd.routing import Route
from viasd_kernels import KVPool, SkipDecoder


@dataclass
class SkipCache:
    """Which slots are free, and what the others hold."""

    kv: KVPool
    pool: SlotPool = field(default_factory=SlotPool)


class SkipModel:
    """Implements ``viasd.models.base.Model`` over a ``SkipDecoder`` made from a Transformers model.

    The decoder has weights of its own: what happens to the module later does not reach it. The probe of the generic
    path holds here too.

    Args:
        module: a Transformers causal language model.
        name: what messages and routes call it.
        consume: whether the module may be emptied on the way, which spares the memory of a second copy.
        impl: of the decoder; "auto" takes "native" on a CPU and "triton" elsewhere.

    Raises:
        UnknownArchitecture: the decoder does not know the model, or has no ``impl`` for its device and dtype; the
            module is as it was.
        UnsupportedModel: the probe differs, weights that are not finite, or a model in training mode.
    """

    def __init__(self, module: Any, name: str | None = None, *, consume: bool = False, impl: str = "auto") -> None:
        if module.training:
            raise UnsupportedModel(f"{type(module).__name__} is in training mode; call model.eval() first")
        config: Any = module.config
        weights = decoder_weights(module, consume=consume)
        parameter = next(module.parameters())
        if impl == "auto":
            impl = "native" if parameter.device.type == "cpu" else "triton"
        if impl not in SkipDecoder.available(parameter.device, parameter.dtype):
            raise UnknownArchitecture(f"no {impl} decoder for {parameter.dtype} on {parameter.device.type}")
        self.name = name or getattr(config, "_name_or_path", "") or type(module).__name__
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.max_positions = max_positions(config)
        self.config_hash = config_hash(config)
        self.eos_token_ids = eos_token_ids(module)
        num_weights = sum(own.numel() for own in module.parameters())
        plain = plain_logits(self.name, module, self.vocab_size, self.max_positions)
        self.decoder = SkipDecoder(weights, decoder_config(config, module), impl=impl)
        self.implementation = self.decoder.implementation
        self.reason = f"{config.model_type} is an architecture that viasd_kernels knows: one call per pass"
        plain_bytes = parameter.element_size() * num_weights
        if self.decoder.weight_bytes < 0.95 * plain_bytes:
            self.reason += (
                f"; its weights lose nothing in {self.decoder.weight_bytes / 1e6:,.0f} MB "
                f"in place of {plain_bytes / 1e6:,.0f}"
            )
        pool = self.decoder.new_pool(1)
        self.slot_bytes = pool.keys.nbytes + pool.values.nbytes
        probe(self, module, plain)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    def check_route(self, route: Route) -> None:
        """See ``viasd.models.base.Model.check_route``."""
        route.check(self.num_layers, self.config_hash, self.name)

    def new_cache(self) -> SkipCache:
        return SkipCache(self.decoder.new_pool(0))

    def forward(
        self,
        rows: Rows,
        cache: SkipCache,
        *,
        route: Route | None = None,
        logits_rows: Sequence[int] | None = None,
        capture_layers: Sequence[int] = (),
    ) -> DecoderOutput:
        """See ``viasd.models.base.Model.forward``."""
        cache.kv.reserve(cache.pool.num_slots)
        output = self.decoder.forward(
            self._index(rows.tokens),
            self._index(rows.positions),
            self._index(rows.row_start),
            cache.kv.place(rows.context, rows.slots, rows.row_start),
            parents=None if rows.parents is None else self._index(rows.parents),
            route=None if route is None else tuple(zip(route.attention, route.mlp, strict=True)),
            logits_rows=None if logits_rows is None else self._index(logits_rows),
            capture_layers=capture_layers,
            check=False,
        )
        return DecoderOutput(output.logits, output.captured)

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
