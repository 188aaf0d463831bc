"""What a model's output depends on, in forms that can be kept and compared: whether anything was changed since."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from viasd.models.identity import config_hash
from viasd_kernels import digest

# What every module has, but for the mode: looked at in other ways here, or without a say in what a forward yields.
COMMON = frozenset(vars(nn.Module())) - {"training"}


def structure_of(model: nn.Module) -> tuple[object, ...]:
    """The model's parts, their settings and hooks, and the code that they run; not what its weights hold."""
    parts = list(model.named_modules())
    kinds = {type(part): None for _, part in parts}
    everywhere = nn.modules.module
    config: Any = model.config
    return (
        tuple((name, type(part), _hooks_of(part), tuple(settings_of(part).items())) for name, part in parts),
        tuple((name, weight.dtype, weight.device, weight.shape) for name, weight in _tensors_of(model)),
        tuple((kind, kind.forward, kind.__call__) for kind in kinds),
        tuple(functions_of(home) for home in dict.fromkeys(kind.__module__ for kind in kinds)),
        (*everywhere._global_forward_hooks, *everywhere._global_forward_pre_hooks),
        config_hash(config),
        getattr(config, "_attn_implementation", None),
    )


def weights_of(model: nn.Module) -> tuple[int, ...]:
    """Digests of the parameters and buffers: one read of each. Writes past autograd, as by ``p.data``, are seen too."""
    return tuple(digest(weight) for _, weight in _tensors_of(model))


def settings_of(part: nn.Module) -> dict[str, object]:
    """A part's own attributes by name: numbers and the like by value, other objects by which one they are."""
    return {
        name: _comparable(value)
        for name, value in vars(part).items()
        if name not in COMMON and not isinstance(value, (torch.Tensor, nn.Module))
    }


def functions_of(home: str) -> tuple[FunctionType, ...]:
    """The functions in a Python module by its name, which the forwards of the classes in it may call."""
    defined = vars(sys.modules[home]) if home in sys.modules else {}
    return tuple(value for value in defined.values() if isinstance(value, FunctionType))


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _hooks_of(part: nn.Module) -> tuple[object, ...]:
    """The keys of its hooks, which are never given twice."""
    return (*part._forward_hooks, None, *part._forward_pre_hooks)


def _comparable(value: Any) -> object:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, type)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((str(key), _comparable(own)) for key, own in value.items())
    try:
        return _Same(value)
    except TypeError:  # its kind takes no weak references
        return id(value)


class _Same:
    """Equal where it stands for the very same object, which it does not keep alive."""

    def __init__(self, value: object) -> None:
        self._value = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value() is not None and self._value() is other._value()

    __hash__ = None  # type: ignore[assignment]
