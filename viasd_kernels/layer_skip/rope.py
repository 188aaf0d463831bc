"""Rotary position embedding."""

from math import pi
from typing import Tuple

import torch

from .config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] float32: by how much each pair of dimensions turns per position, in radians.

    Float32 throughout, as in Transformers: models were trained with these roundings, and at large positions a more
    accurate frequency is a different one.
    """
    if rope.kind == "given":
        return torch.tensor(rope.frequencies, dtype=torch.float32)
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_llama3(frequencies, rope)
    return frequencies


def _stretch_llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow turns are slowed by ``factor``, fast ones stay, those between are interpolated."""
    wavelength = 2 * pi / frequencies
    slow = wavelength > rope.original_max_positions / rope.low_freq_factor
    fast = wavelength < rope.original_max_positions / rope.high_freq_factor
    turns = rope.original_max_positions / wavelength
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - share) * frequencies / rope.factor + share * frequencies
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, between))


def rotation(frequencies: torch.Tensor, positions: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, [R, rotary_dim / 2] float32 each, of the angles position * frequency (a float32 product)."""
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn dimensions (j, j + rotary_dim / 2) of ``x`` [R, H, Dh] by the row's angles; the rest stays."""
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
