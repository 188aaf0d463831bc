"""Schemas, bodies and fakes of the two ops. Imports neither Triton nor the native module."""

from typing import Optional, Tuple

import torch

from ..checks import PANEL_DTYPES, implementations
from ..library import register_op
from . import reference


def available(device: torch.device, dtype: torch.dtype) -> Tuple[str, ...]:
    """The family's implementations for tensors on a device, of a dtype."""
    return implementations(device, native_dtype=dtype in PANEL_DTYPES, triton_dtype=dtype != torch.float64)


@torch.no_grad()
def _bypass_norm(
    hidden: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    delta_weight: Optional[torch.Tensor],
    impl: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    if impl == "reference":
        return reference.bypass_norm(
            hidden, delta, keep, weight, eps=eps, weight_offset=weight_offset, delta_weight=delta_weight
        )
    if impl == "native":
        from . import native

        return native.bypass_norm(hidden, delta, keep, weight, eps, weight_offset, delta_weight)
    if impl == "triton":
        from . import triton

        return triton.bypass_norm(hidden, delta, keep, weight, eps, weight_offset, delta_weight)
    raise NotImplementedError(f"bypass_norm: no {impl!r} implementation")


def _bypass_norm_fake(
    hidden: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    delta_weight: Optional[torch.Tensor],
    impl: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)


bypass_norm_op = register_op(
    "bypass_norm(Tensor hidden, Tensor? delta, Tensor keep, Tensor weight, float eps, float weight_offset, "
    "Tensor? delta_weight, str impl) -> (Tensor hidden_out, Tensor normed)",
    _bypass_norm,
    _bypass_norm_fake,
)


@torch.no_grad()
def _bypass_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    keep: torch.Tensor,
    bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    activation: Optional[str],
    impl: str,
) -> torch.Tensor:
    if impl == "reference":
        return reference.bypass_linear(x, weight, keep, bias=bias, residual=residual, activation=activation)
    if impl == "native":
        from . import native

        return native.bypass_linear(x, weight, keep, bias, residual, activation)
    if impl == "triton":
        from . import triton

        return triton.bypass_linear(x, weight, keep, bias, residual, activation)
    raise NotImplementedError(f"bypass_linear: no {impl!r} implementation")


def _bypass_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    keep: torch.Tensor,
    bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    activation: Optional[str],
    impl: str,
) -> torch.Tensor:
    width = weight.shape[0] if activation is None else weight.shape[0] // 2
    return x.new_empty(x.shape[0], width)


bypass_linear_op = register_op(
    "bypass_linear(Tensor x, Tensor weight, Tensor keep, Tensor? bias, Tensor? residual, str? activation, str impl) "
    "-> Tensor",
    _bypass_linear,
    _bypass_linear_fake,
)
