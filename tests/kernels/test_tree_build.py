"""build_tree: links, depths and ancestor bits by a direct reading of the definition; pruning; the op itself."""

import pytest
import torch

from viasd_kernels.tree_verify import Tree, build_tree

IMPLS = ["reference", "native"]


def random_parents(generator: torch.Generator, lengths: list[int]) -> torch.Tensor:
    parents = [
        -1 if row == 0 else int(torch.randint(max(0, row - 9), row, (), generator=generator))
        for length in lengths
        for row in range(length)
    ]
    return torch.tensor(parents, dtype=torch.int32)


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def ancestors_of(parents: list[int], row: int) -> set[int]:
    found = set()
    while parents[row] >= 0:
        row = parents[row]
        found.add(row)
    return found


def bits_of(words: torch.Tensor) -> set[int]:
    return {64 * w + bit for w, word in enumerate(words.tolist()) for bit in range(64) if word >> bit & 1}


def assert_same(left: Tree, right: Tree) -> None:
    for name in Tree._fields:
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("impl", IMPLS)
def test_links_depths_and_ancestors_follow_from_the_parents(impl: str) -> None:
    lengths = [1, 150, 0, 64, 65, 7]
    parents, row_start = random_parents(torch.Generator().manual_seed(0), lengths), starts_of(lengths)
    tree = build_tree(parents, row_start, max_rows=150, impl=impl)
    assert tree.ancestors.shape == (287, 3)
    assert [field.dtype for field in tree] == [torch.int64, torch.int32, torch.int32, torch.int32]
    for begin, length in zip(row_start.tolist(), lengths, strict=False):
        local = parents[begin : begin + length].tolist()
        for row in range(length):
            above = ancestors_of(local, row)
            children = [child for child in range(length) if local[child] == row]
            siblings = [other for other in range(row + 1, length) if local[other] == local[row]]
            assert bits_of(tree.ancestors[begin + row]) == above
            assert tree.depth[begin + row] == len(above)
            assert tree.first_child[begin + row] == min(children, default=-1)
            assert tree.next_sibling[begin + row] == min(siblings, default=-1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_small_tree_by_hand(impl: str, dtype: torch.dtype) -> None:
    parents = torch.tensor([-1, 0, 0, 1, 1, -1, 0, 1], dtype=dtype)
    tree = build_tree(parents, torch.tensor([0, 5, 5, 8], dtype=dtype), max_rows=5, impl=impl)
    assert tree.ancestors.tolist() == [[0], [1], [1], [3], [3], [0], [1], [3]]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 0, 1, 2]
    assert tree.first_child.tolist() == [1, 3, -1, -1, -1, 1, 2, -1]
    assert tree.next_sibling.tolist() == [-1, 2, -1, 4, -1, -1, -1, -1]


BAD_PARENTS = {
    "orphan": ([-1, 0, -1, 1], [0, 1, -1, 2]),
    "its own parent": ([-1, 0, 2, 1], [0, 1, -1, 2]),
    "cycle": ([-1, 0, 3, 2], [0, 1, -1, -1]),
    "forward reference": ([-1, 3, 0, 0], [0, -1, 1, 1]),
    "outside the sequence": ([-1, 0, 9, 1], [0, 1, -1, 2]),
    "descendants of a pruned row": ([-1, -7, 1, 2], [0, -1, -1, -1]),
    "more than 32 bits": ([-1, 0, 2**32, 1], [0, 1, -1, 2]),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", BAD_PARENTS)
def test_rows_without_a_preceding_parent_are_pruned_with_their_descendants(impl: str, case: str) -> None:
    parents, depth = BAD_PARENTS[case]
    rows = torch.tensor([-1, 0, *parents, -1, 0])
    row_start = torch.tensor([0, 2, 6, 8])
    tree = build_tree(rows, row_start, max_rows=4, impl=impl, check=False)
    assert tree.depth.tolist() == [0, 1, *depth, 0, 1]
    pruned = [2 + row for row in range(4) if depth[row] < 0]
    for row in pruned:
        assert tree.ancestors[row].tolist() == [0]
        assert tree.first_child[row] == tree.next_sibling[row] == -1
        assert row - 2 not in tree.first_child[2:6].tolist() + tree.next_sibling[2:6].tolist()
    with pytest.raises(ValueError, match=rf"row {pruned[0] - 2} of sequence 1 must be in \[0, {pruned[0] - 2}\)"):
        build_tree(rows, row_start, max_rows=4, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_past_max_rows_are_pruned_or_refused(impl: str) -> None:
    parents, row_start = torch.arange(-1, 69), torch.tensor([0, 70])
    tree = build_tree(parents, row_start, max_rows=64, impl=impl, check=False)
    assert tree.ancestors.shape == (70, 1)
    assert tree.depth.tolist() == [*range(64), *[-1] * 6]
    assert tree.first_child[63] == -1
    with pytest.raises(ValueError, match="at most max_rows = 64 rows, got 70"):
        build_tree(parents, row_start, max_rows=64, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_sequences_and_no_rows(impl: str) -> None:
    for row_start in ([0], [0, 0, 0]):
        tree = build_tree(torch.empty(0, dtype=torch.int32), torch.tensor(row_start), max_rows=65, impl=impl)
        assert tree.ancestors.shape == (0, 2)
        assert tree.depth.shape == tree.first_child.shape == tree.next_sibling.shape == (0,)


def test_native_equals_reference_on_arbitrary_integers() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 90, (200,), generator=generator).tolist()
    parents = torch.randint(-2, 92, (sum(lengths),), generator=generator)
    sensible = torch.rand(sum(lengths), generator=generator) < 0.8
    parents = torch.where(sensible, random_parents(generator, lengths).long(), parents)
    trees = [build_tree(parents, starts_of(lengths), max_rows=80, impl=impl, check=False) for impl in IMPLS]
    assert (trees[0].depth < 0).any()
    assert_same(*trees)


def test_arguments_are_checked() -> None:
    parents, row_start = torch.tensor([-1, 0]), torch.tensor([0, 2])
    with pytest.raises(TypeError, match=r"parents must be torch.int32 or torch.int64, got torch.float32"):
        build_tree(parents.float(), row_start, max_rows=2)
    with pytest.raises(ValueError, match=r"row_start must have shape \[any\], got \[1, 2\]"):
        build_tree(parents, row_start.unsqueeze(0), max_rows=2)
    with pytest.raises(ValueError, match="max_rows must be >= 1, got 0"):
        build_tree(parents, row_start, max_rows=0)
    with pytest.raises(ValueError, match="row_start must run from 0 to the number of rows, 2"):
        build_tree(parents, torch.tensor([0, 3]), max_rows=2)
    with pytest.raises(ValueError, match="first row must be -1"):
        build_tree(torch.tensor([0, 0]), row_start, max_rows=2)
    with pytest.raises(NotImplementedError, match="no 'triton' implementation for cpu"):
        build_tree(parents, row_start, max_rows=2, impl="triton")
    with pytest.raises(ValueError, match="impl must be"):
        build_tree(parents, row_start, max_rows=2, impl="fast")


def test_native_refuses_a_wrong_row_start_even_unchecked() -> None:
    for row_start in ([0, 3], [1, 2], [0, 2, 1, 2]):
        with pytest.raises(ValueError, match="row_start"):
            build_tree(torch.tensor([-1, 0]), torch.tensor(row_start), max_rows=2, impl="native", check=False)
