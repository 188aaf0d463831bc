"""The one sampling rule, and the coins that drive it."""

import torch

from .checks import implementations, resolve_impl
from .library import register_op
from .native import load_native, ready


def draw_from_weights(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Sample one id per row by inverse CDF.

    The id is the smallest whose running sum exceeds ``coin * total``; rounding that leaves none gives the highest id
    with mass. Weights keep their dtype, the running sum is float64, and the total comes from the same sums.

    Args:
        weights: [..., V] non-negative, not necessarily normalised, any floating dtype.
        coins: [...] float64 in [0, 1).

    Returns:
        [...] int64 ids; -1 where a row has no mass.
    """
    running = weights.double().cumsum(-1)
    threshold = coins.unsqueeze(-1) * running[..., -1:]
    positive = weights > 0
    # A parallel scan's running sum may waver by a rounding where a weight is 0: only ids with mass are ever drawn.
    beyond = (running > threshold) & positive
    ids = beyond.int().argmax(-1)
    highest = weights.shape[-1] - 1 - positive.flip(-1).int().argmax(-1)
    ids = torch.where(beyond.any(-1), ids, highest)
    return torch.where(positive.any(-1), ids, -1)


PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF


def uniforms(seeds: torch.Tensor, draws: torch.Tensor, n: int, *, impl: str = "auto") -> torch.Tensor:
    """Coins in [0, 1) that depend on (seed, draw, slot) only: Philox-4x32-10, counter-based.

    The same on every device and in every batch. Key: the seed's two 32-bit halves. Counter: the draw's two halves,
    then slot // 2. Each block of four words gives the coins of two slots, 53 random bits each: (hi >> 5, lo >> 6) as
    the high 27 and the low 26 bits. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        seeds: [B] int64, one per request.
        draws: [B] int64, the request's own running count of passes: never reused, never a token position (coins that
            are shared between tiers or keyed by position bias what is sampled).
        n: coins per sequence; slot i is row i within the op's sequence.
        impl: "auto", "reference" or "native" (CPU): the same bits.

    Returns:
        [B, n] float64.
    """
    if seeds.shape != draws.shape or seeds.ndim != 1:
        raise ValueError(f"uniforms: seeds and draws must both be [B], got {list(seeds.shape)}, {list(draws.shape)}")
    if n < 0:
        raise ValueError(f"uniforms: n must be >= 0, got {n}")
    return uniforms_op(seeds, draws, n, resolve_impl("uniforms", impl, seeds.device, implementations(seeds.device)))


def _uniforms_reference(seeds: torch.Tensor, draws: torch.Tensor, n: int) -> torch.Tensor:
    blocks = torch.arange((n + 1) // 2, device=seeds.device)
    seeds, draws = seeds.long().unsqueeze(1), draws.long().unsqueeze(1)
    keys = [seeds & _LOW_32, (seeds >> 32) & _LOW_32]
    words = [draws & _LOW_32, (draws >> 32) & _LOW_32, blocks.unsqueeze(0), torch.zeros_like(blocks).unsqueeze(0)]
    for _ in range(10):
        # int64 products of 32-bit words wrap modulo 2**64, which keeps all 64 bits.
        first, second = words[0] * PHILOX_MULTIPLIERS[0], words[2] * PHILOX_MULTIPLIERS[1]
        words = [
            ((second >> 32) & _LOW_32) ^ words[1] ^ keys[0],
            second & _LOW_32,
            ((first >> 32) & _LOW_32) ^ words[3] ^ keys[1],
            first & _LOW_32,
        ]
        keys = [(key + step) & _LOW_32 for key, step in zip(keys, PHILOX_KEY_STEPS)]
    pairs = torch.stack(torch.broadcast_tensors(*words), -1).reshape(seeds.shape[0], 2 * blocks.numel(), 2)
    bits = ((pairs[..., 0] >> 5) << 26) | (pairs[..., 1] >> 6)
    return bits[:, :n].double() * 2.0**-53


def _uniforms_native(seeds: torch.Tensor, draws: torch.Tensor, n: int) -> torch.Tensor:
    seeds, draws = ready(seeds, torch.int64), ready(draws, torch.int64)
    out = torch.empty(seeds.shape[0], n, dtype=torch.float64)
    load_native().uniforms(seeds.data_ptr(), draws.data_ptr(), out.data_ptr(), seeds.shape[0], n)
    return out


def _uniforms(seeds: torch.Tensor, draws: torch.Tensor, n: int, impl: str) -> torch.Tensor:
    if impl == "reference":
        return _uniforms_reference(seeds, draws, n)
    if impl == "native":
        return _uniforms_native(seeds, draws, n)
    raise NotImplementedError(f"uniforms: no {impl!r} implementation")


def _uniforms_fake(seeds: torch.Tensor, draws: torch.Tensor, n: int, impl: str) -> torch.Tensor:
    return seeds.new_empty((seeds.shape[0], n), dtype=torch.float64)


uniforms_op = register_op("uniforms(Tensor seeds, Tensor draws, int n, str impl) -> Tensor", _uniforms, _uniforms_fake)
