"""Views of a Transformers model in which some sub-layers pass their input through, sharing every weight with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from viasd.errors import UnsupportedModel
from viasd.routing import Route

ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
MLP_NAMES = ("mlp", "feed_forward", "ffn")

# Where the running pass wants captured hidden states to go; per thread and task, since views are shared.
capture_sink: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("capture_sink", default=None)


def find_layers(model: nn.Module, num_layers: int) -> str:
    """The dotted path of the model's list of decoder layers.

    Raises:
        UnsupportedModel: not exactly one list of ``num_layers`` modules.
    """
    paths = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers
    ]
    if len(paths) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__}: expected one list of {num_layers} decoder layers, found {paths or 'none'}"
        )
    return paths[0]


def make_view(model: nn.Module, layers_path: str, layer_returns_tuple: bool, route: Route | None) -> nn.Module:
    """A model that bypasses what ``route`` does not keep, and can hand out hidden states; ``model`` stays untouched.

    The list of layers keeps its length and order: models pick masks and cache layers by index.

    Raises:
        UnsupportedModel: the route treats a layer's attention and MLP differently, and they cannot be told apart.
    """
    *parents, list_name = layers_path.split(".")
    view = part = shallow_copy(model)
    for name in parents:
        child = shallow_copy(part._modules[name])
        part._modules[name] = child
        part = child
    layers = part._modules[list_name]
    assert isinstance(layers, nn.ModuleList)
    part._modules[list_name] = nn.ModuleList(
        _layer_view(layer, i, layer_returns_tuple, route) for i, layer in enumerate(layers)
    )
    view.training = False
    return view


def shallow_copy(module: nn.Module | None) -> nn.Module:
    """The same module as another object, with a list of parts of its own."""
    assert module is not None
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone


def _layer_view(layer: nn.Module, index: int, returns_tuple: bool, route: Route | None) -> nn.Module:
    keep_attention, keep_mlp = (route.attention[index], route.mlp[index]) if route else (True, True)
    run: Callable[..., Any] = layer.forward
    if not keep_attention and not keep_mlp:

        def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return (hidden_states,) if returns_tuple else hidden_states

    elif not keep_attention or not keep_mlp:
        run = _silenced(layer, MLP_NAMES if keep_attention else ATTENTION_NAMES, index).forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sink = capture_sink.get()
        if sink is not None and index in sink:
            sink[index] = hidden_states[0]
        return run(hidden_states, *args, **kwargs)

    clone = shallow_copy(layer)
    clone.forward = forward
    return clone


def _silenced(layer: nn.Module, names: tuple[str, ...], index: int) -> nn.Module:
    """A copy of ``layer`` whose sub-layer of one of these names yields zeros, which the residual then passes by."""
    found = [name for name in names if isinstance(layer._modules.get(name), nn.Module)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"route: layer {index} ({type(layer).__name__}) has no sub-layer named {' or '.join(names)}; "
            "only routes that bypass whole layers fit this model"
        )
    is_attention = names is ATTENTION_NAMES

    def zeros(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if is_attention else nothing

    clone, child = shallow_copy(layer), shallow_copy(layer._modules[found[0]])
    child.forward = zeros
    clone._modules[found[0]] = child
    return clone
