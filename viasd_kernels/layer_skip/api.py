"""The public ops: check the arguments, choose an implementation, call it."""

from math import isfinite
from typing import Optional, Tuple

import torch

from ..checks import LOGIT_DTYPES, check_tensor, resolve_impl
from .config import ACTIVATIONS
from .op import available, bypass_linear_op, bypass_norm_op


def bypass_norm(
    hidden: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
    delta_weight: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Add what a sub-layer yielded to the residual stream of the rows that keep it, and norm the stream.

    With RMSNorm(x, w) = x / sqrt(mean(x^2) + eps) * (w + weight_offset) (arXiv:1910.07467)::

        hidden_out = hidden + delta where keep, else hidden
        normed = RMSNorm(hidden_out, weight)

    A bypassed row is bit-identical: -0.0 stays, and whatever its delta holds, NaN included, stays out. Its ``normed``
    is that of the row as it is. Models with post-norms (Gemma 2, Gemma 3) give ``delta_weight``: the row adds
    RMSNorm(delta, delta_weight) instead.

    Args:
        hidden: [R, D] float32, float16, bfloat16 or float64; last dimension contiguous, any outer stride.
        delta: [R, D], same dtype. None: the entry norm; nothing is added, and ``keep`` is not read.
        keep: [R] bool, True where the row keeps the sub-layer that ``delta`` comes from.
        weight: [D], same dtype, of the norm.
        eps: >= 0, added to the mean square.
        weight_offset: added to ``weight`` and ``delta_weight`` (1.0 in Gemma, whose norms store weight - 1).
        delta_weight: [D], same dtype, of the norm on ``delta``; None: no such norm.
        impl: "auto", "reference", "triton" or "native"; only "auto" falls back.

    Returns:
        (hidden_out [R, D], normed [R, D]), dtype of ``hidden``; new tensors.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value. NotImplementedError: ``impl``.

    Numerics: norms in float32 (float64 for float64), rounded once, at the end; the sum hidden + delta is rounded to
    the dtype before it is normed. Not differentiable.
    """
    op = "bypass_norm"
    device = hidden.device
    check_tensor(op, "hidden", hidden, [None, None], LOGIT_DTYPES, device)
    num_rows, width = hidden.shape
    if width < 1:
        raise ValueError(f"{op}: hidden must have at least one column, got {list(hidden.shape)}")
    if delta is not None:
        check_tensor(op, "delta", delta, [num_rows, width], [hidden.dtype], device)
    check_tensor(op, "keep", keep, [num_rows], [torch.bool], device)
    check_tensor(op, "weight", weight, [width], [hidden.dtype], device)
    if delta_weight is not None:
        if delta is None:
            raise ValueError(f"{op}: delta_weight must be None where delta is None")
        check_tensor(op, "delta_weight", delta_weight, [width], [hidden.dtype], device)
    if not (eps >= 0 and isfinite(eps)):
        raise ValueError(f"{op}: eps must be finite and >= 0, got {eps}")
    if not isfinite(weight_offset):
        raise ValueError(f"{op}: weight_offset must be finite, got {weight_offset}")
    chosen = resolve_impl(op, impl, device, available(device, hidden.dtype))
    hidden_out, normed = bypass_norm_op(hidden, delta, keep, weight, eps, weight_offset, delta_weight, chosen)
    return hidden_out, normed


def bypass_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    keep: torch.Tensor,
    *,
    bias: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
    activation: Optional[str] = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Apply a linear layer, with its epilogue, to the rows that keep it.

    Per row, y = weight x + bias, and then::

        activation "silu_mul":       out = silu(g) * u,       g, u = the halves of y, silu(g) = g / (1 + exp(-g))
        activation "gelu_tanh_mul":  out = gelu_tanh(g) * u,  the tanh approximation of GELU (arXiv:1606.08415)
        residual:                    out = y + residual
        neither:                     out = y

    A bypassed row yields its residual, bit for bit, or 0 without one; nothing of its ``x`` enters. A tile of rows that
    are all bypassed loads no weight. Made for few rows (R <= 64), where the weights' bytes are what costs.

    Args:
        x: [R, Din] float32, float16, bfloat16 or float64; last dimension contiguous, any outer stride.
        weight: [Dout, Din], same dtype; with an activation gate and up are packed, Dout = 2 Dff, gate first.
        keep: [R] bool, True where the row keeps the layer.
        bias: [Dout], same dtype.
        residual: [R, Dout], same dtype; not together with an activation.
        activation: None, "silu_mul" or "gelu_tanh_mul".
        impl: "auto", "reference", "triton" or "native"; only "auto" falls back.

    Returns:
        [R, Dout], or [R, Dff] with an activation; dtype of ``x``; a new tensor.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value. NotImplementedError: ``impl``.

    Numerics: sums and epilogue in float32 (float64 for float64), rounded once, at the end. Not differentiable.
    """
    op = "bypass_linear"
    device = x.device
    check_tensor(op, "x", x, [None, None], LOGIT_DTYPES, device)
    check_tensor(op, "weight", weight, [None, x.shape[1]], [x.dtype], device)
    check_tensor(op, "keep", keep, [x.shape[0]], [torch.bool], device)
    if bias is not None:
        check_tensor(op, "bias", bias, [weight.shape[0]], [x.dtype], device)
    if residual is not None:
        check_tensor(op, "residual", residual, [x.shape[0], weight.shape[0]], [x.dtype], device)
    if activation is not None:
        _check_activation(op, activation, weight.shape[0], residual)
    chosen = resolve_impl(op, impl, device, available(device, x.dtype))
    return bypass_linear_op(x, weight, keep, bias, residual, activation, chosen)


def _check_activation(op: str, activation: str, width: int, residual: Optional[torch.Tensor]) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be None, {' or '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if width % 2:
        raise ValueError(f"{op}: weight must pack gate and up, an even number of rows, got {width}")
    if residual is not None:
        raise ValueError(f"{op}: residual must be None with an activation")
