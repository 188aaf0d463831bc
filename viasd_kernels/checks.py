"""Argument checks and the choice of an implementation, shared by every op."""

import importlib.util
import os
from typing import Optional, Sequence, Tuple

import torch

LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
PANEL_DTYPES = (torch.float32, torch.bfloat16)  # what native products and attention are written for

# Asked once, and without importing any of them: a traced function cannot ask.
HAS_NATIVE, HAS_CUDA = (importlib.util.find_spec(name, __package__) is not None for name in ("._native", "._cuda"))
HAS_TRITON = importlib.util.find_spec("triton") is not None


def resolve_impl(op: str, impl: str, device: torch.device, available: Sequence[str]) -> str:
    """The implementation that runs: native where there is one, on GPUs else Triton, what has neither the reference.

    ``available`` lists the op's implementations for ``device``. An explicit ``impl`` never falls back: it raises
    ``NotImplementedError`` when the op does not have it there, ``ValueError`` when no such kind exists.
    """
    if impl not in ("auto", "reference", "triton", "native"):
        raise ValueError(f"{op}: impl must be 'auto', 'reference', 'triton' or 'native', got {impl!r}")
    if impl == "auto":
        preferred = ["native", "reference"] if device.type == "cpu" else ["native", "triton", "reference"]
        return next(name for name in preferred if name in available)
    if impl != "reference" and impl not in available:
        raise NotImplementedError(
            f"{op}: no {impl!r} implementation for {device.type} tensors; available: {', '.join(available)}"
            f"{_why_missing(impl, device.type)}"
        )
    return impl


def _why_missing(impl: str, device_type: str) -> str:
    """What would bring an implementation, in brackets; nothing where only the op, or its dtype, stands in the way."""
    if impl == "triton" and not HAS_TRITON:
        return " (Triton is not installed)"
    if impl == "triton" and not triton_runs(device_type):
        return " (Triton takes CPU tensors in its interpreter only: set TRITON_INTERPRET=1 before the first import)"
    if impl == "native" and not (HAS_NATIVE if device_type == "cpu" else HAS_CUDA):
        return " (this copy of the package was not built with it)"
    return ""


def implementations(
    device: torch.device, native_dtype: bool = True, triton_dtype: bool = False, cuda_dtype: bool = False
) -> Tuple[str, ...]:
    """An op's implementations on a device, each for some dtypes only: native is C++ for CPUs, CUDA C++ for GPUs."""
    found = ["reference"]
    if native_dtype and HAS_NATIVE if device.type == "cpu" else cuda_dtype and cuda_runs(device.type):
        found.append("native")
    if triton_dtype and triton_runs(device.type):
        found.append("triton")
    return tuple(found)


def cuda_runs(device_type: str) -> bool:
    """Whether the kernels in CUDA C++ were built and take tensors of this device."""
    return HAS_CUDA and device_type == "cuda" and torch.version.cuda is not None  # AMD's GPUs are called cuda too


def triton_runs(device_type: str) -> bool:
    """Whether Triton is installed and takes tensors of this device; those of the CPU under its interpreter only."""
    return HAS_TRITON and (device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def check_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[Optional[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise ``TypeError`` or ``ValueError`` naming the argument, what was expected and what came.

    ``shape`` has None where any size will do. The last dimension must be contiguous; outer strides are free.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, tensor.shape)):
        expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{op}: {name} must have shape {expected}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {tensor.device}")
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{op}: {name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def check_row_start(op: str, row_start: torch.Tensor, num_rows: int) -> None:
    """Raise ``ValueError`` unless ``row_start [B+1]`` runs from 0 to ``num_rows`` without going back (synchronises)."""
    if not row_start.numel() or bool((row_start[0] != 0) | (row_start[-1] != num_rows) | (row_start.diff() < 0).any()):
        raise ValueError(
            f"{op}: row_start must run from 0 to the number of rows, {num_rows}, ascending; got {row_start}"
        )
