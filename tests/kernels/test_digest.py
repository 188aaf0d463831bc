"""digest: one number for all implementations, and another one for other bits."""

import pytest
import torch

from viasd_kernels import digest

SIZES = [0, 1, 7, 8, 1023, 1024, 1025, 300_000, 3 * 2**20 + 5]  # blocks of 1,024 bytes, pieces of 256 blocks


def some_bytes(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_native_is_the_reference(size):
    data = some_bytes(size)
    assert digest(data, impl="native") == digest(data, impl="reference") == digest(data) < 2**64


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_only_the_bits_count(impl):
    numbers = some_bytes(4 * 7 * 9).view(torch.int32).reshape(7, 9)
    expected = digest(numbers, impl=impl)
    assert digest(numbers.view(torch.float32), impl=impl) == expected
    assert digest(numbers.t().contiguous().t(), impl=impl) == expected
    assert digest(torch.cat([numbers[:1], numbers])[1:], impl=impl) == expected
    assert digest(numbers[0, 0], impl=impl) == digest(numbers[0, 0].clone(), impl=impl)


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_every_bit_and_every_place_counts(impl):
    data = some_bytes(5000)
    seen = {
        digest(data, impl=impl),
        digest(data[:-1], impl=impl),
        digest(torch.nn.functional.pad(data, (0, 1)), impl=impl),
    }
    for place in (0, 3, 4, 1023, 1024, 4095, 4999):
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            seen.add(digest(changed, impl=impl))
    assert len(seen) == 3 + 7 * 8
    words = data[:4096].view(torch.int64)
    for first, second in ((0, 1), (0, 128), (5, 300)):  # in a block, the same place of two blocks, elsewhere
        swapped = words.clone()
        swapped[[first, second]] = words[[second, first]]
        assert digest(swapped, impl=impl) != digest(words, impl=impl)
    # What sums of numbers, and exclusive-ors of their bits, do not see.
    assert digest(words.view(torch.float32).neg(), impl=impl) != digest(words, impl=impl)


def test_threads_change_nothing():
    data, before = some_bytes(2**22 + 3), torch.get_num_threads()
    numbers = set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        numbers.add(digest(data))
    torch.set_num_threads(before)
    assert len(numbers) == 1


def test_what_is_missing_is_named():
    with pytest.raises(NotImplementedError, match="digest: no 'triton' implementation for cpu tensors"):
        digest(torch.zeros(3), impl="triton")
    with pytest.raises(ValueError, match="digest: impl must be"):
        digest(torch.zeros(3), impl="fast")
