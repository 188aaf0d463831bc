"""Random batches of drafted chains, bad rows included."""

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LAST_COIN = 1 - 2.0**-53


def random_chains(seed: int, dtype: torch.dtype, sequences: int, vocab: int) -> dict:
    """Ragged chains from the head of each proposal; -1, ids out of range, bad rows and greedy sequences among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (sequences,), generator=generator)
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = int(row_start[-1])
    target = torch.randn(rows, vocab, generator=generator) * 2
    target = target.masked_fill(torch.rand(target.shape, generator=generator) < 0.1, float("-inf")).to(dtype)
    draft = (target.float().clamp(min=-3) + torch.randn(target.shape, generator=generator)).to(dtype)
    draft = draft[:, : vocab - 1].contiguous()
    for logits in (target, draft):
        logits[torch.rand(rows, generator=generator) < 0.01] = float("nan")
        logits[torch.rand(rows, generator=generator) < 0.01] = float("-inf")
        logits[torch.rand(rows, generator=generator) < 0.01, 3] = float("inf")
    heads = draft.float().nan_to_num(0).topk(3).indices.roll(1, 0)
    tokens = heads.gather(1, torch.randint(0, 3, (rows, 1), generator=generator)).squeeze(1)
    for token in (-1, -2, vocab, vocab - 1, 2**40):
        tokens[torch.rand(rows, generator=generator) < 0.02] = token
    return {
        "row_tokens": tokens,
        "target_logits": target,
        "uniforms": torch.rand(rows, generator=generator, dtype=torch.float64),
        "row_start": row_start,
        "temperature": torch.tensor([0.0, 0.7, 1.3])[torch.randint(3, (sequences,), generator=generator)],
        "draft_logits": draft,
    }
