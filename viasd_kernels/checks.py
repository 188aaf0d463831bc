"""Argument checks and the choice of an implementation, shared by every op."""

import importlib.util
import os
from typing import Optional, Sequence, Tuple

import torch

LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
PANEL_DTYPES = (torch.float32, torch.bfloat16)  # what native products and attention are written for


def resolve_impl(op: str, impl: str, device: torch.device, available: Sequence[str]) -> str:
    """The implementation that runs: CUDA tensors take Triton, CPU tensors native, what has neither the reference.

    ``available`` lists the op's implementations for ``device``. An explicit ``impl`` never falls back: it raises
    ``NotImplementedError`` when the op does not have it there, ``ValueError`` when no such kind exists.
    """
    if impl not in ("auto", "reference", "triton", "native"):
        raise ValueError(f"{op}: impl must be 'auto', 'reference', 'triton' or 'native', got {impl!r}")
    if impl == "auto":
        preferred = "triton" if device.type == "cuda" else "native"
        return preferred if preferred in available else "reference"
    if impl != "reference" and impl not in available:
        raise NotImplementedError(
            f"{op}: no {impl!r} implementation for {device.type} tensors; available: {', '.join(available)}"
        )
    return impl


def implementations(device: torch.device, native_dtype: bool = True, triton_dtype: bool = False) -> Tuple[str, ...]:
    """An op's implementations on a device: the native one is for CPUs, Triton for GPUs, each for some dtypes only."""
    found = ["reference"]
    if device.type == "cpu" and native_dtype:
        found.append("native")
    if triton_dtype and triton_runs(device.type):
        found.append("triton")
    return tuple(found)


def triton_runs(device_type: str) -> bool:
    """Whether Triton is installed and takes tensors of this device; those of the CPU under its interpreter only."""
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return importlib.util.find_spec("triton") is not None


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
