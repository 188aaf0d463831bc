"""The tree ops as torch ops: schemas, dispatch on ``impl`` and shapes for tracing."""

from typing import Optional, Tuple

import torch

from ..library import register_op
from . import reference
from .structs import Tree

Outputs = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _require_reference(op: str, impl: str) -> None:
    if impl != "reference":
        raise NotImplementedError(f"{op}: no {impl!r} implementation")


def _build_tree(parents: torch.Tensor, row_start: torch.Tensor, max_rows: int, impl: str) -> Outputs:
    if impl == "native":
        from . import native

        return native.build_tree(parents, row_start, max_rows)
    if impl == "triton":
        from . import triton

        return triton.build_tree(parents, row_start, max_rows)
    _require_reference("build_tree", impl)
    return reference.build_tree(parents, row_start, max_rows=max_rows)


def _build_tree_fake(parents: torch.Tensor, row_start: torch.Tensor, max_rows: int, impl: str) -> Outputs:
    num_rows = parents.shape[0]
    depth, first_child, next_sibling = (parents.new_empty(num_rows, dtype=torch.int32) for _ in range(3))
    return parents.new_empty(num_rows, (max_rows + 63) // 64, dtype=torch.int64), depth, first_child, next_sibling


build_tree_op = register_op(
    "build_tree(Tensor parents, Tensor row_start, int max_rows, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    _build_tree,
    _build_tree_fake,
)


@torch.no_grad()
def _tree_attention(
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
    impl: str,
) -> torch.Tensor:
    if impl == "native":
        from . import native

        return native.tree_attention(
            q, k_pool, v_pool, slots, context_len, row_start, ancestors, scale, soft_cap, window
        )
    if impl == "triton":
        from . import triton

        return triton.tree_attention(
            q, k_pool, v_pool, slots, context_len, row_start, ancestors, scale, soft_cap, window
        )
    _require_reference("tree_attention", impl)
    return reference.tree_attention(
        q, k_pool, v_pool, slots, context_len, row_start, ancestors, scale=scale, soft_cap=soft_cap, window=window
    )


def _tree_attention_fake(
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
    impl: str,
) -> torch.Tensor:
    return q.new_empty(q.shape)


tree_attention_op = register_op(
    "tree_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor slots, Tensor context_len, Tensor row_start, "
    "Tensor ancestors, float scale, float? soft_cap, int? window, str impl) -> Tensor",
    _tree_attention,
    _tree_attention_fake,
)


@torch.no_grad()
def _verify_tree(
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
    impl: str,
) -> Outputs:
    if impl == "native":
        from . import native

        return native.verify_tree(
            depth,
            first_child,
            next_sibling,
            row_tokens,
            full_logits,
            uniforms,
            row_start,
            temperature,
            draft_logits,
            proposal,
            full_argmax,
        )
    if impl == "triton":
        from . import triton

        return triton.verify_tree(
            depth,
            first_child,
            next_sibling,
            row_tokens,
            full_logits,
            uniforms,
            row_start,
            temperature,
            draft_logits,
            proposal,
            full_argmax,
        )
    _require_reference("verify_tree", impl)
    return reference.verify_tree(
        Tree(depth.new_empty(0), depth, first_child, next_sibling),
        row_tokens,
        full_logits,
        uniforms,
        row_start,
        temperature=temperature,
        draft_logits=draft_logits,
        proposal=proposal,
        full_argmax=full_argmax,
    )


def _verify_tree_fake(
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
    impl: str,
) -> Outputs:
    num_sequences = row_start.shape[0] - 1
    num_accepted, next_token, status = (row_tokens.new_empty(num_sequences, dtype=torch.int32) for _ in range(3))
    return row_tokens.new_empty(row_tokens.shape, dtype=torch.int32), num_accepted, next_token, status


verify_tree_op = register_op(
    "verify_tree(Tensor depth, Tensor first_child, Tensor next_sibling, Tensor row_tokens, Tensor? full_logits, "
    "Tensor uniforms, Tensor row_start, Tensor temperature, Tensor? draft_logits, str proposal, Tensor? full_argmax, "
    "str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    _verify_tree,
    _verify_tree_fake,
)


@torch.no_grad()
def _compact_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    row_start: torch.Tensor,
    start: torch.Tensor,
    impl: str,
) -> None:
    if impl == "native":
        from . import native

        return native.compact_kv(k, v, path, num_accepted, row_start, start)
    if impl == "triton":
        from . import triton

        return triton.compact_kv(k, v, path, num_accepted, row_start, start)
    _require_reference("compact_kv", impl)
    reference.compact_kv(k, v, path, num_accepted, row_start, start)


def _compact_kv_fake(
    k: torch.Tensor,
    v: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    row_start: torch.Tensor,
    start: torch.Tensor,
    impl: str,
) -> None:
    return None


compact_kv_op = register_op(
    "compact_kv(Tensor(a!) k, Tensor(b!) v, Tensor path, Tensor num_accepted, Tensor row_start, Tensor start, "
    "str impl) -> ()",
    _compact_kv,
    _compact_kv_fake,
)
