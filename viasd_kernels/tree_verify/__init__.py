"""Batched tree verification: build a tree, attend over it, verify it losslessly, compact the cache."""

from .api import build_tree, compact_kv, tree_attention, verify_tree
from .structs import Tree, TreeVerdict

__all__ = ["Tree", "TreeVerdict", "build_tree", "compact_kv", "tree_attention", "verify_tree"]
