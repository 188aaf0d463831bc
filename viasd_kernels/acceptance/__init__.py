"""Fused acceptance sampling: statistics of two distributions, lossless chains, the tiered gate."""

from .api import accept_chain, acceptance_stats, gate_tiers
from .structs import ChainVerdict, Gate, GateVerdict, Region, Stats

__all__ = [
    "ChainVerdict",
    "Gate",
    "GateVerdict",
    "Region",
    "Stats",
    "accept_chain",
    "acceptance_stats",
    "gate_tiers",
]
