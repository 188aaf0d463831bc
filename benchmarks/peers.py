"""Kernels of other projects beside ours, on GPUs, where their packages can be imported: FlashInfer, SGLang, vLLM.

Each function returns its ways by name, none where there is no package for it. What a peer does not do is said here:
FlashInfer's chain starts from probabilities, so a softmax of both rows comes before it, as in an engine that calls it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from timing import Way


def _installed(package: str, tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and importlib.util.find_spec(package) is not None


def norm_ways(
    streams: Sequence[torch.Tensor], deltas: Sequence[torch.Tensor], weight: torch.Tensor, eps: float
) -> dict[str, Way]:
    """Add and norm in place, without a mask: delta becomes the norm, the stream the sum."""
    ways: dict[str, Way] = {}

    def in_place(call) -> Way:
        return lambda turn: call(deltas[turn % len(deltas)], streams[turn % len(streams)], weight, eps)

    if _installed("flashinfer", weight):
        from flashinfer.norm import fused_add_rmsnorm as flashinfer_norm

        ways["FlashInfer"] = in_place(flashinfer_norm)
    if _installed("sgl_kernel", weight):
        from sgl_kernel import fused_add_rmsnorm as sglang_norm

        ways["SGLang"] = in_place(sglang_norm)
    if _installed("vllm", weight):
        from vllm._custom_ops import fused_add_rms_norm as vllm_norm

        ways["vLLM"] = in_place(vllm_norm)
    return ways


def chain_ways(targets: Sequence[torch.Tensor], drafts: Sequence[torch.Tensor], tokens: torch.Tensor) -> dict[str, Way]:
    """One chain: the root, then drafted tokens."""
    if not _installed("flashinfer", tokens):
        return {}
    from flashinfer.sampling import chain_speculative_sampling

    ids = tokens[1:].unsqueeze(0).contiguous()

    def chain(turn: int) -> object:
        p, q = (own[turn % len(own)].float().softmax(-1).unsqueeze(0) for own in (drafts, targets))
        return chain_speculative_sampling(p[:, :-1].contiguous(), ids, q)

    return {"FlashInfer": chain}


def greedy_tree_ways(
    tokens: torch.Tensor, argmax: torch.Tensor, first_child: torch.Tensor, next_sibling: torch.Tensor
) -> dict[str, Way]:
    """Greedy verification of B trees of N rows each; all [B, N]."""
    if not _installed("sgl_kernel", tokens):
        return {}
    from sgl_kernel import verify_tree_greedy

    num_trees, num_rows = tokens.shape
    wide = [own.long() for own in (tokens, first_child, next_sibling)]
    index = torch.arange(num_trees * num_rows, device=tokens.device).view(num_trees, num_rows)
    predicts = torch.empty(num_trees * num_rows, dtype=torch.int32, device=tokens.device)
    accept_index = torch.full((num_trees, num_rows), -1, dtype=torch.int32, device=tokens.device)
    accepted = torch.empty(num_trees, dtype=torch.int32, device=tokens.device)
    target = argmax.long()

    def verify(turn: int) -> None:
        verify_tree_greedy(predicts, accept_index, accepted, wide[0], index, wide[1], wide[2], target)

    return {"SGLang": verify}
