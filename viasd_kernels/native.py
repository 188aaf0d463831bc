"""The compiled modules, imported on first use (importing the package needs no build), and how tensors reach them."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Optional, Tuple

import torch

from .checks import PANEL_DTYPES

_DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


@cache
def load_native() -> ModuleType:
    """Return ``_native``, built from ``csrc`` when the package is installed; ``ImportError`` says how to build it."""
    try:
        return import_module("._native", __package__)
    except ImportError as error:
        raise ImportError(
            "viasd_kernels._native cannot be imported. Build it with `pip install --no-build-isolation -e .` in the "
            'source tree (needs a C++17 compiler, pybind11 and ninja), or pass impl="reference".'
        ) from error


@cache
def load_cuda() -> ModuleType:
    """Return ``_cuda``, built where nvcc is found; ``ImportError`` says how to build it."""
    try:
        return import_module("._cuda", __package__)
    except ImportError as error:
        raise ImportError(
            "viasd_kernels._cuda cannot be imported. Install the CUDA toolkit, so that nvcc is found, and build again "
            'with `pip install --no-build-isolation -e .` in the source tree, or pass impl="triton".'
        ) from error


def launch_place(device: torch.device) -> Optional[Tuple[int, int]]:
    """Where ``_cuda`` launches for tensors of a device, its index and current stream; None for the CPU."""
    if device.type == "cpu":
        return None
    return device.index, torch.cuda.current_stream(device).cuda_stream


def ready(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype that the compiled code reads, contiguous; itself where it already is."""
    return (tensor if tensor.dtype is dtype else tensor.to(dtype)).contiguous()


def matrix(logits: Optional[torch.Tensor]) -> Tuple[int, int, int, int]:
    """Address, row stride, width and dtype code of a [R, V] tensor with contiguous rows; zeros for None."""
    if logits is None:
        return 0, 0, 0, 0
    return logits.data_ptr(), logits.stride(0), logits.shape[1], _DTYPE_CODES[logits.dtype]


def team_logits(
    num_sequences: int, target: Optional[torch.Tensor], draft: Optional[torch.Tensor]
) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
    """What ``_cuda`` takes: both logits in one dtype, and memory for what rejections leave of a sequence's two rows."""
    if target is None:
        return None, None, None
    if draft is None:
        width = target.shape[1]
    else:
        width = target.shape[1] + draft.shape[1]
        if draft.dtype != target.dtype:
            target, draft = target.float(), draft.float()
    return target, draft, target.new_empty(num_sequences, width, dtype=torch.float32)


# csrc's Element, what kernels over panels read and write.
ELEMENT_CODES = {dtype: code for code, dtype in enumerate(PANEL_DTYPES)}


def address(tensor: Optional[torch.Tensor]) -> int:
    """Where a tensor's data lies; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
