"""Kernels of tiered speculative decoding: small, stateless, tensors in, tensors out."""

from .sampling import draw_from_weights, uniforms
from .status import FATAL, Status

__all__ = ["FATAL", "Status", "draw_from_weights", "uniforms"]
