"""Fused layer-skipping forward with masked residual bypass: two ops, and the whole decode step."""

from .api import bypass_linear, bypass_norm
from .config import DecoderConfig, LayerConfig, RopeConfig
from .decoder import SkipDecoder
from .kv_pool import KVPool, KVSlots
from .structs import DecoderOutput
from .weights import weight_shapes

__all__ = [
    "DecoderConfig",
    "DecoderOutput",
    "KVPool",
    "KVSlots",
    "LayerConfig",
    "RopeConfig",
    "SkipDecoder",
    "bypass_linear",
    "bypass_norm",
    "weight_shapes",
]
