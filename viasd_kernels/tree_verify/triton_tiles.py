"""Which rows a program works on, where sequences have any number of rows and the host knows none of them."""

import triton
import triton.language as tl


def num_tiles(num_rows: int, num_sequences: int, size: int) -> int:
    """Tiles of ``size`` rows that suffice however the rows are shared out; one per sequence at most is empty."""
    return num_rows // size + num_sequences


@triton.jit
def tile_rows(row_start_ptr, num_sequences, tile, PER_ROW: tl.constexpr, SIZE: tl.constexpr):
    """The tile's sequence, the sequence's first row and number of rows, and the tile's first entry, counted from there.

    A row has PER_ROW entries, a tile SIZE of them. Sequence b's tiles begin at number PER_ROW * row_start[b] // SIZE +
    b, which leaves each sequence as many as it needs; entries past the sequence's last are for the caller to leave out.
    """
    low, high = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64) + num_sequences
    while high - low > 1:  # the last sequence whose tiles begin at this one or before
        middle = (low + high) // 2
        begins_before = tl.load(row_start_ptr + middle).to(tl.int64) * PER_ROW // SIZE + middle <= tile
        low, high = tl.where(begins_before, middle, low), tl.where(begins_before, high, middle)
    first, end = tl.load(row_start_ptr + low).to(tl.int64), tl.load(row_start_ptr + low + 1).to(tl.int64)
    return low, first, end - first, (tile - first * PER_ROW // SIZE - low) * SIZE
