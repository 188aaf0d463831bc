"""Kernels of tiered speculative decoding: small, stateless, tensors in, tensors out."""

from .acceptance import ChainVerdict, Gate, GateVerdict, Region, Stats, accept_chain, acceptance_stats, gate_tiers
from .digest import digest
from .layer_skip import (
    DecoderConfig,
    DecoderOutput,
    KVPool,
    KVSlots,
    LayerConfig,
    RopeConfig,
    SkipDecoder,
    bypass_linear,
    bypass_norm,
    weight_shapes,
)
from .sampling import draw_from_weights, uniforms
from .status import FATAL, Status
from .tree_verify import Tree, TreeVerdict, build_tree, compact_kv, tree_attention, verify_tree

__all__ = [
    "FATAL",
    "ChainVerdict",
    "DecoderConfig",
    "DecoderOutput",
    "Gate",
    "GateVerdict",
    "KVPool",
    "KVSlots",
    "LayerConfig",
    "Region",
    "RopeConfig",
    "SkipDecoder",
    "Stats",
    "Status",
    "Tree",
    "TreeVerdict",
    "accept_chain",
    "acceptance_stats",
    "build_tree",
    "bypass_linear",
    "bypass_norm",
    "compact_kv",
    "digest",
    "draw_from_weights",
    "gate_tiers",
    "tree_attention",
    "uniforms",
    "verify_tree",
    "weight_shapes",
]
