"""The time of ``bypass_norm`` and ``bypass_linear`` beside the bytes they must move, in the shapes of a decoder.

benchmark_layer_skip.py measures them in the shapes of its model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import peers
from timing import DTYPES, Cases, cold
from viasd_kernels import DecoderConfig, bypass_linear, bypass_norm

EPS = 1e-5


def torch_norm(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = hidden + delta
    return total, F.rms_norm(total, (hidden.shape[1],), weight, EPS)


def measure_norm(cases: Cases, rows: int, width: int, dtype_name: str) -> None:
    device, dtype = cases.device, DTYPES[dtype_name]
    hidden, delta = torch.randn(2, rows, width, device=device).to(dtype)
    weight, keep = torch.ones(width, dtype=dtype, device=device), torch.ones(rows, dtype=torch.bool, device=device)
    streams, deltas = (cold(tensor, cases.buffer_bytes // 2) for tensor in (hidden, delta))

    def pair(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        return streams[turn % len(streams)], deltas[turn % len(deltas)]

    def call(impl: str, turn: int = 0):
        return bypass_norm(*pair(turn), keep, weight, eps=EPS, impl=impl)

    case = f"{rows} x {width}"
    found = cases.implementations(call, what=f"bypass_norm, {case}, {dtype_name}")
    ways = {impl: lambda turn, impl=impl: call(impl, turn) for impl in found}
    ways |= cases.torch_ways(torch_norm, lambda turn: (*pair(turn), weight))
    if cases.peers:
        ways |= peers.norm_ways(streams, deltas, weight, EPS)  # last: they write where the others read
    cases.measure("bypass_norm", case, dtype_name, 4 * hidden.nbytes, ways, "copy")


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int, str | None]]:
    """Dout, Din and epilogue of a layer's linear layers and the head."""
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return {
        "qkv": (heads + 2 * config.num_kv_heads * config.head_dim, width, None),
        "attention_out": (width, heads, "residual"),
        "gate_up": (2 * inner, width, config.activation),
        "mlp_out": (width, inner, "residual"),
        "head": (config.vocab_size, width, None),
    }


def torch_linear(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    y = F.linear(x, weight)
    if activation:
        gate, up = y.chunk(2, -1)
        return (F.silu(gate) if activation == "silu_mul" else F.gelu(gate, approximate="tanh")) * up
    return y if residual is None else y + residual


def measure_linear(cases: Cases, name: str, shape: tuple[int, int, str | None], rows: int, dtype_name: str) -> None:
    """All rows kept; and, for the weight of the MLP's gates, all bypassed: what is left of a tile's time then."""
    device, dtype, (outputs, inputs, epilogue) = cases.device, DTYPES[dtype_name], shape
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weights = cold((torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype), cases.buffer_bytes)
    residual = torch.randn(rows, outputs, device=device).to(dtype) if epilogue == "residual" else None
    activation = epilogue if epilogue != "residual" else None

    def call(impl: str, turn: int, keep: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"residual": residual, "activation": activation, "impl": impl}
        return bypass_linear(x, weights[turn % len(weights)], keep, **options)

    case = f"{name}, {rows} rows"
    num_outputs = outputs // 2 if activation else outputs
    activations = x.nbytes + dtype.itemsize * rows * num_outputs * (2 if epilogue == "residual" else 1)
    for kept in (True, False) if name == "gate_up" else (True,):
        keep = torch.full((rows,), kept, device=device)
        what = case if kept else f"{case}, bypassed"
        found = cases.implementations(lambda impl, keep=keep: call(impl, 0, keep), what=f"bypass_linear, {what}")
        ways = {impl: lambda turn, impl=impl, keep=keep: call(impl, turn, keep) for impl in found}
        if kept:
            ways |= cases.torch_ways(torch_linear, lambda turn: (x, weights[turn % len(weights)], residual, activation))
        num_bytes = weights[0].nbytes + activations if kept else rows * num_outputs * dtype.itemsize
        cases.measure("bypass_linear", what, dtype_name, num_bytes, ways)
