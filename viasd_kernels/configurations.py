"""Sizes of tiles, warps and stages by kernel and device, from ``configurations.json`` beside each family's kernels.

The file maps a kernel's name to a list per device, by the name that torch gives it, and to one called "default", which
runs within every target's limits. A list's entries ascend in ``up_to``, the size up to which an entry serves; the last
one has none. Nothing is timed where a model decodes: benchmarks/gpu_check.py finds what the files say.
"""

import json
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any, Dict, Iterator, List

import torch

FILE = "configurations.json"


@cache
def load_configurations(family: str) -> Dict[str, Dict[str, List[Dict[str, int]]]]:
    """A family's file: kernel, then device, then the entries."""
    assert __package__  # by whatever name, and from wherever, the package was loaded: out of an archive too
    found: Any = json.loads((files(__package__) / family / FILE).read_text(encoding="utf-8"))
    return found


def configuration(family: str, kernel: str, device: torch.device, size: int) -> Dict[str, int]:
    """The entry for tensors on this device, of the size that the kernel's launcher speaks of."""
    return _configuration(family, kernel, _device_name(device), size)


@contextmanager
def trying(family: str, kernel: str, device: torch.device, entry: Dict[str, int]) -> Iterator[None]:
    """Within: the one entry for tensors on this device, whatever the file says. For who looks for better ones."""
    by_device, name = load_configurations(family)[kernel], _device_name(device)
    before = by_device.get(name)
    by_device[name] = [entry]
    _configuration.cache_clear()
    try:
        yield
    finally:
        del by_device[name]
        if before is not None:
            by_device[name] = before
        _configuration.cache_clear()


@cache
def _configuration(family: str, kernel: str, device_name: str, size: int) -> Dict[str, int]:
    by_device = load_configurations(family)[kernel]
    entries = by_device.get(device_name, by_device["default"])
    return next(entry for entry in entries if size <= entry.get("up_to", size))


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
