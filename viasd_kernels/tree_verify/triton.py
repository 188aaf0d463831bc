"""Triton implementations of the tree ops, for CUDA and ROCm; on CPU tensors under Triton's interpreter."""

from .triton_attention import tree_attention
from .triton_build import build_tree
from .triton_compact import compact_kv
from .triton_walk import verify_tree

__all__ = ["build_tree", "compact_kv", "tree_attention", "verify_tree"]
