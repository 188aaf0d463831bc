"""compact_kv: rows on the path move to the front, everything else stays, moves may overlap."""

from functools import partial

import pytest
import torch

from viasd_kernels import tree_verify
from viasd_kernels.tree_verify import compact_kv

# Rows per sequence, the accepted path of each, and where its first row lies in a cache of 12 positions.
LENGTHS, PATHS, STARTS = [6, 1, 0, 5, 4], [[0, 2, 3, 5], [0], [], [0, 1, 2, 3, 4], [0, 3]], [4, 11, 12, 0, 8]


@pytest.fixture(params=["reference", "native", "cuda"], autouse=True)
def impl(request, monkeypatch):
    """Every test of this file holds for each implementation, that of GPUs on a simulated team."""
    if request.param == "cuda":
        request.getfixturevalue("on_host_team")
    impl = "reference" if request.param == "reference" else "native"
    monkeypatch.setitem(globals(), "compact_kv", partial(tree_verify.compact_kv, impl=impl))
    return request.param


LAYOUTS = {
    "heads one behind the other": torch.clone,
    "heads outside positions": lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2),
    "gaps between heads": lambda cache: torch.cat([cache, cache], 3)[..., : cache.shape[3]],
}


def inputs(index_dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, ...]:
    path = [row for length, rows in zip(LENGTHS, PATHS, strict=True) for row in rows + [-1] * (length - len(rows))]
    num_accepted = [max(len(rows) - 1, 0) for rows in PATHS]
    row_start = torch.tensor([0, *LENGTHS]).cumsum(0)
    return tuple(torch.as_tensor(x).to(index_dtype) for x in (path, num_accepted, row_start, STARTS))


def caches(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.arange(len(LENGTHS) * 12 * 2 * 3).reshape(len(LENGTHS), 12, 2, 3)
    return k.to(dtype), (k + 7).to(dtype)


def expected(cache: torch.Tensor) -> torch.Tensor:
    moved = cache.clone()
    for b, path in enumerate(PATHS):
        for j, row in enumerate(path):
            moved[b, STARTS[b] + j] = cache[b, STARTS[b] + row]
    return moved


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_accepted_rows_move_to_the_front_and_the_rest_stays(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    k, v = caches(dtype)
    want_k, want_v = expected(k), expected(v)
    assert not torch.equal(want_k, k)
    compact_kv(k, v, *inputs(index_dtype))
    assert torch.equal(k, want_k)
    assert torch.equal(v, want_v)


def test_overlapping_moves_are_safe_in_either_direction() -> None:
    k, v = torch.arange(6.0).reshape(1, 6, 1, 1), torch.arange(6.0).reshape(1, 6, 1, 1)
    moves = (torch.tensor([1, 2, 3, 4, 4, -1]), torch.tensor([4]), torch.tensor([0, 6]), torch.tensor([0]))
    compact_kv(k, v, *moves)
    assert k.flatten().tolist() == [1, 2, 3, 4, 4, 5]
    backwards = (torch.tensor([1, 0, 1, 2, 3, -1]), torch.tensor([4]), torch.tensor([0, 6]), torch.tensor([0]))
    compact_kv(k, v, *backwards)
    assert k.flatten().tolist() == [2, 1, 2, 3, 4, 5]


def test_transposed_caches_of_transformers_are_changed_in_place() -> None:
    k, v = (cache.transpose(1, 2).contiguous() for cache in caches())  # [B, H_kv, S, Dh]
    want_k, want_v = expected(k.transpose(1, 2)), expected(v.transpose(1, 2))
    compact_kv(k.transpose(1, 2), v.transpose(1, 2), *inputs())
    assert torch.equal(k.transpose(1, 2), want_k)
    assert torch.equal(v.transpose(1, 2), want_v)


def test_no_sequences() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    compact_kv(torch.empty(0, 4, 1, 1), torch.empty(0, 4, 1, 1), empty, empty, torch.tensor([0]), empty)


def test_arguments_are_checked_before_anything_moves() -> None:
    path, num_accepted, row_start, start = inputs()
    wrong = {
        r"start must be >= 0 and, with the sequence's rows, at most S = 12": (path, num_accepted, row_start, start + 1),
        r"num_accepted must be in \[0, rows": (path, num_accepted + 2, row_start, start),
        r"path must name rows of its sequence, got 6": (path.masked_fill(path == 5, 6), num_accepted, row_start, start),
        r"path must name rows of its sequence, got -1": (
            path.masked_fill(path == 5, -1),
            num_accepted,
            row_start,
            start,
        ),
        r"row_start must run from 0": (path, num_accepted, row_start + 1, start),
    }
    for message, values in wrong.items():
        k, v = caches()
        with pytest.raises(ValueError, match=message):
            compact_kv(k, v, *values)
        assert torch.equal(k, caches()[0])
    k, v = caches()
    with pytest.raises(ValueError, match=r"v must have shape \[5, 12, 2, 3\], got \[5, 11, 2, 3\]"):
        compact_kv(k, v[:, 1:], path, num_accepted, row_start, start)
    with pytest.raises(NotImplementedError, match="no 'triton' implementation"):
        compact_kv(k, v, path, num_accepted, row_start, start, impl="triton")


def test_native_moves_nothing_astray_even_unchecked(impl) -> None:
    if impl == "cuda":
        pytest.skip("kernels cannot raise: test_kernels_leave_alone_what_they_cannot_move")
    path, num_accepted, row_start, start = inputs()
    for wrong in (
        (path, num_accepted, row_start, start + 1),
        (path, num_accepted, row_start, start - 1),
        (path, num_accepted + 2, row_start, start),
        (path, num_accepted - 1, row_start, start),
        (path.masked_fill(path == 5, 6), num_accepted, row_start, start),
        (path.masked_fill(path == 5, -1), num_accepted, row_start, start),
        (path, num_accepted, row_start + 1, start),
    ):
        k, v = caches()
        with pytest.raises(ValueError, match=r"row_start|rows"):
            tree_verify.compact_kv(k, v, *wrong, impl="native", check=False)
        assert torch.equal(k, caches()[0])
        assert torch.equal(v, caches()[1])


@pytest.mark.parametrize("wrong_row", [-1, 6])
def test_kernels_leave_alone_what_they_cannot_move(on_host_team, wrong_row: int) -> None:
    path, num_accepted, row_start, start = inputs()
    (k, v), (want, _) = caches(), caches()
    want[1:] = expected(want)[1:]
    path[path == 5] = wrong_row
    tree_verify.compact_kv(k, v, path, num_accepted, row_start, start, impl="native", check=False)
    assert torch.equal(k, want)
    start[:] = 13
    tree_verify.compact_kv(k, v, path, num_accepted, row_start, start, impl="native", check=False)
    assert torch.equal(k, want)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_caches_of_any_layout_move_the_same(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, sequences = 9, 24
    paths = [torch.randint(rows, (rows,), generator=generator) for _ in range(sequences)]
    paths[::2] = [path.sort().values.maximum(torch.arange(rows)) for path in paths[::2]]  # in order; the others not
    num_accepted = torch.randint(rows, (sequences,), generator=generator)
    moves = (torch.cat(paths), num_accepted, torch.arange(sequences + 1) * rows, torch.arange(sequences))
    cache = torch.randn(sequences, 40, 4, 32, generator=generator)
    want = cache.clone()
    for b, path in enumerate(paths):
        kept = path[: int(num_accepted[b]) + 1]
        want[b, b : b + len(kept)] = cache[b, b + kept]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        k, v = LAYOUTS[layout](cache), LAYOUTS[layout](cache)
        version = k._version
        compact_kv(k, v, *moves)
        assert torch.equal(k, want)
        assert torch.equal(v, want)
        assert k._version > version
