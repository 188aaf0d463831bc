"""Whether a tensor still holds the bits that it held: also after writes that autograd's version counter misses."""

import torch

from .checks import implementations, resolve_impl
from .native import load_native

BLOCK_WORDS = 128
_LOW_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_BLOCKS_AT_A_TIME = 1 << 15  # the reference's intermediate results are a few times as large: 32 MiB each


def digest(tensor: torch.Tensor, *, impl: str = "auto") -> int:
    """A number for a tensor's bits, read once at memory speed.

    Equal bits give equal numbers; bits that differ anywhere, in their order too, give others but for a chance of about
    2^-32. With w the tensor's 64-bit words, padded with zeros to blocks of 128, k fixed keys and m a mixing of 64 bits:
    sum over blocks b of m(sum_i lo(w_i + k_i) hi(w_i + k_i) + m(b + 1)), plus m(number of bytes), modulo 2^64, where lo
    and hi are added in 32 bits each. Source of the inner sum: NH of Black et al., "UMAC", CRYPTO 1999. It is no
    protection against somebody who looks for two tensors of one digest.

    Args:
        tensor: any shape, dtype and strides; one that is not contiguous is copied. Its shape and dtype do not count.
        impl: "auto", "reference" or "native" (CPU): the same number.

    Returns:
        An int in [0, 2^64). On a GPU this waits for the device.

    Raises:
        NotImplementedError: ``impl`` is missing on the tensor's device. ValueError: there is no such ``impl``.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if resolve_impl("digest", impl, data.device, implementations(data.device)) == "native":
        number: int = load_native().digest(data.data_ptr(), data.numel(), torch.get_num_threads())
        return number
    return _reference(data)


def _reference(data: torch.Tensor) -> int:
    device, num_bytes = data.device, data.numel()
    keys = _mix(torch.arange(1, BLOCK_WORDS + 1, device=device))
    total = _mix(torch.tensor(num_bytes, device=device))
    step = 8 * BLOCK_WORDS * _BLOCKS_AT_A_TIME
    for first in range(0, num_bytes, step):
        part = data[first : first + step]
        words = torch.nn.functional.pad(part, (0, -part.numel() % (8 * BLOCK_WORDS))).view(torch.int64)
        words = words.view(-1, BLOCK_WORDS)
        # int64 wraps modulo 2**64, and its low 32 bits are those of a sum in 32 bits.
        low, high = (words + keys) & _LOW_32, ((words >> 32) + (keys >> 32)) & _LOW_32
        index = torch.arange(len(words), device=device) + first // (8 * BLOCK_WORDS)
        total = total + _mix((low * high).sum(1) + _mix(index + 1)).sum()
    return int(total) & _MASK_64


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64 bits."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * (factor - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """x >> places with zeros coming in, where int64's own shift repeats the sign."""
    return (x >> places) & (_MASK_64 >> places)
