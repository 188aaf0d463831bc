"""Where the tests of GPU kernels run: on a GPU, or where there is none on the CPU, in Triton's interpreter.

Inputs are made on the CPU, where the reference stays; what is tested gets copies on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from viasd_kernels import Gate
from viasd_kernels.checks import cuda_runs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() and not INTERPRETED else torch.device("cpu")
# Of the ops that there are in CUDA C++, too.
by_kernels = pytest.mark.parametrize("impl", ["triton", "native"] if cuda_runs(DEVICE.type) else ["triton"])
HALF = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # the interpreter is wrong about bfloat16
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="too large, or without meaning, for Triton's interpreter")


def moved(value: Any, device: torch.device) -> Any:
    """The same on a device: tensors with their strides, and what holds tensors."""
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        if value._base is None:
            return value.to(device)
        return value._base.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, Gate):
        return Gate(value.criterion, moved(value.accept, device), moved(value.escalate, device))
    if isinstance(value, dict):
        return {name: moved(own, device) for name, own in value.items()}
    if isinstance(value, tuple):
        own = [moved(item, device) for item in value]
        return type(value)(*own) if hasattr(value, "_fields") else tuple(own)
    return value


def on_device(op: Callable[..., Any], num_written: int = 0) -> Callable[..., Any]:
    """The op, which takes and gives CPU tensors; its first ``num_written`` arguments are written to."""

    @wraps(op)
    def call(*args: Any, impl: str, **options: Any) -> Any:
        if impl == "reference":
            return op(*args, impl=impl, **options)
        own = moved(args, DEVICE)
        result = op(*own, impl=impl, **moved(options, DEVICE))
        for given, written in zip(args[:num_written], own, strict=False):
            if written is not given:
                given.copy_(written)
        return moved(result, torch.device("cpu"))

    return call


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poison() -> None:
    """Fill what the allocator hands out next with something that no test would take for a result."""
    for size in (1, 8, 64, 512, 4096):
        torch.full((size,), float("nan"), device=DEVICE)
        torch.full((size,), 77, dtype=torch.int32, device=DEVICE)
