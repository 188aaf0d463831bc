"""Triton implementations of the acceptance ops, for CUDA and ROCm; on CPU tensors under Triton's interpreter."""

from .triton_chain import accept_chain
from .triton_gate import gate_tiers
from .triton_stats import acceptance_stats

__all__ = ["accept_chain", "acceptance_stats", "gate_tiers"]
