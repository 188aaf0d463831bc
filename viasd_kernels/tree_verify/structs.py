"""What the tree ops return, and the names of the ways in which a tree's tokens were proposed."""

from typing import NamedTuple

import torch

PROPOSALS = ("deterministic", "without_replacement", "with_replacement")


class Tree(NamedTuple):
    """The links of every sequence's tree. Rows are numbered within their sequence; -1 stands for none."""

    ancestors: torch.Tensor  # [R, W] int64: bit i of word i // 64 is row i, an ancestor; the row itself is not set
    depth: torch.Tensor  # [R] int32: 0 for the root, -1 for a pruned row
    first_child: torch.Tensor  # [R] int32
    next_sibling: torch.Tensor  # [R] int32


class TreeVerdict(NamedTuple):
    """What was accepted of each sequence's tree, and the token that follows."""

    path: torch.Tensor  # [R] int32: at row_start[b] + j: 0 (the root), the accepted rows in order, then -1
    num_accepted: torch.Tensor  # [B] int32: accepted drafted rows, without the root
    next_token: torch.Tensor  # [B] int32: -1 after a fatal status and for a sequence without rows
    status: torch.Tensor  # [B] int32: bits of viasd_kernels.Status
