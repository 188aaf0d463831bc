"""Calls into ``csrc/tree_verify``: addresses and sizes of contiguous, rightly typed tensors."""

from typing import Optional, Tuple

import torch

from ..native import ELEMENT_CODES, address, launch_place, load_cuda, load_native, matrix, ready, team_logits
from .structs import PROPOSALS

Outputs = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def build_tree(parents: torch.Tensor, row_start: torch.Tensor, max_rows: int) -> Outputs:
    parents, row_start = ready(parents, torch.int64), ready(row_start, torch.int64)
    num_rows = parents.shape[0]
    ancestors = parents.new_empty(num_rows, (max_rows + 63) // 64)
    depth, first_child, next_sibling = (parents.new_empty(num_rows, dtype=torch.int32) for _ in range(3))
    arguments = {
        "parents": parents.data_ptr(),
        "row_start": row_start.data_ptr(),
        "num_sequences": row_start.shape[0] - 1,
        "max_rows": max_rows,
        "ancestors": ancestors.data_ptr(),
        "depth": depth.data_ptr(),
        "first_child": first_child.data_ptr(),
        "next_sibling": next_sibling.data_ptr(),
    }
    place = launch_place(parents.device)
    if place is None:
        load_native().build_tree(**arguments, num_rows=num_rows)
    else:
        load_cuda().build_tree(**arguments, place=place)
    return ancestors, depth, first_child, next_sibling


def verify_tree(
    depth: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    row_tokens: torch.Tensor,
    full_logits: Optional[torch.Tensor],
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    proposal: str,
    full_argmax: Optional[torch.Tensor],
) -> Outputs:
    depth, first_child, next_sibling = (ready(links, torch.int32) for links in (depth, first_child, next_sibling))
    row_tokens, row_start = ready(row_tokens, torch.int64), ready(row_start, torch.int64)
    uniforms, temperature = ready(uniforms, torch.float64), ready(temperature, torch.float64)
    full_argmax = None if full_argmax is None else ready(full_argmax, torch.int64)
    num_rows, num_sequences = row_tokens.shape[0], row_start.shape[0] - 1
    path = row_tokens.new_empty(num_rows, dtype=torch.int32)
    num_accepted, next_token, status = (row_tokens.new_empty(num_sequences, dtype=torch.int32) for _ in range(3))
    arguments = {
        "depth": depth.data_ptr(),
        "first_child": first_child.data_ptr(),
        "next_sibling": next_sibling.data_ptr(),
        "row_tokens": row_tokens.data_ptr(),
        "full_argmax": address(full_argmax),
        "uniforms": uniforms.data_ptr(),
        "row_start": row_start.data_ptr(),
        "temperature": temperature.data_ptr(),
        "num_sequences": num_sequences,
        "proposal": PROPOSALS.index(proposal),
        "path": path.data_ptr(),
        "num_accepted": num_accepted.data_ptr(),
        "next_token": next_token.data_ptr(),
        "status": status.data_ptr(),
    }
    place = launch_place(row_tokens.device)
    if place is None:
        load_native().verify_tree(
            **arguments,
            num_rows=num_rows,
            full_logits=matrix(full_logits),
            draft_logits=matrix(draft_logits),
            num_threads=torch.get_num_threads(),
        )
    else:
        target, draft, weights = team_logits(num_sequences, full_logits, draft_logits)
        load_cuda().verify_tree(
            **arguments,
            full_logits=matrix(target),
            draft_logits=matrix(draft),
            weights=address(weights),
            place=place,
        )
    return path, num_accepted, next_token, status


def tree_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    row_start: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    soft_cap: Optional[float],
    window: Optional[int],
) -> torch.Tensor:
    num_rows, num_heads, head_dim = q.shape
    wide, ancestors = ready(q, torch.float32), ready(ancestors, torch.int64)
    context_len, row_start = ready(context_len, torch.int64), ready(row_start, torch.int64)
    slots = ready(slots, torch.int32)
    out = torch.empty(num_rows, num_heads, head_dim)
    load_native().tree_attention(
        element=ELEMENT_CODES[q.dtype],
        num_kv_heads=k_pool.shape[1],
        group=num_heads // k_pool.shape[1],
        head_dim=head_dim,
        scale=scale,
        soft_cap=soft_cap or 0.0,
        num_sequences=slots.shape[0],
        num_rows=num_rows,
        q=wide.data_ptr(),
        keys=(k_pool.data_ptr(), k_pool.stride(0), k_pool.stride(1)),
        values=(v_pool.data_ptr(), v_pool.stride(0), v_pool.stride(1)),
        num_slots=k_pool.shape[0],
        slots=slots.data_ptr(),
        max_len=slots.shape[1],
        context_len=context_len.data_ptr(),
        row_start=row_start.data_ptr(),
        ancestors=ancestors.data_ptr(),
        num_words=ancestors.shape[1],
        window=window or 0,
        out=out.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    return out.to(q.dtype)


def compact_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    row_start: torch.Tensor,
    start: torch.Tensor,
) -> None:
    path, num_accepted = ready(path, torch.int64), ready(num_accepted, torch.int64)
    row_start, start = ready(row_start, torch.int64), ready(start, torch.int64)
    num_sequences, cache_len, num_heads, head_dim = k.shape
    # Bits written past torch: autograd is told as if an operation of its own had changed them.
    torch.autograd.graph.increment_version((k, v))
    arguments = {
        "k": _cache(k),
        "v": _cache(v),
        "path": path.data_ptr(),
        "num_accepted": num_accepted.data_ptr(),
        "row_start": row_start.data_ptr(),
        "start": start.data_ptr(),
        "num_sequences": num_sequences,
        "cache_len": cache_len,
        "num_heads": num_heads,
        "head_bytes": head_dim * k.element_size(),
    }
    place = launch_place(k.device)
    if place is None:
        load_native().compact_kv(**arguments, num_rows=path.shape[0], num_threads=torch.get_num_threads())
    else:
        staging = k.new_empty(path.shape[0], num_heads, head_dim)
        load_cuda().compact_kv(**arguments, staging=staging.data_ptr(), place=place)


def _cache(cache: torch.Tensor) -> Tuple[int, int, int, int]:
    """Address, and in bytes the strides of sequence, position and head."""
    sequence, position, head = (stride * cache.element_size() for stride in cache.stride()[:3])
    return cache.data_ptr(), sequence, position, head
