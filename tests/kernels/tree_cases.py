"""verify_tree on Python lists, for tests of single inputs."""

import math

import pytest
import torch

from viasd_kernels.tree_verify import TreeVerdict, build_tree, verify_tree

IMPLS = ["reference", "native"]
RULES = ["deterministic", "without_replacement", "with_replacement"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INF, NAN = math.inf, math.nan
LAST_COIN = 1 - 2.0**-53

by_impl = pytest.mark.parametrize("impl", IMPLS)
by_rule = pytest.mark.parametrize("proposal", RULES)


def run(parents, tokens, logits, coins, *, impl, row_start=None, temperature=1.0, **options) -> TreeVerdict:
    """verify_tree on Python lists; one sequence unless ``row_start`` says otherwise; status is returned, not raised."""
    row_start = torch.tensor([0, len(parents)] if row_start is None else row_start)
    tree = build_tree(torch.tensor(parents, dtype=torch.int32), row_start, max_rows=len(parents) + 1, check=False)
    temperature = torch.as_tensor(temperature, dtype=torch.float32).expand(row_start.shape[0] - 1).contiguous()
    logits = None if logits is None else torch.as_tensor(logits)
    options = {name: torch.as_tensor(x) if isinstance(x, list) else x for name, x in options.items()}
    options.setdefault("check", False)
    return verify_tree(
        tree,
        torch.as_tensor(tokens),
        logits,
        torch.as_tensor(coins, dtype=torch.float64),
        row_start,
        temperature=temperature,
        impl=impl,
        **options,
    )


def outcome(verdict: TreeVerdict) -> tuple[list[int], list[int], list[int], list[int]]:
    return tuple(field.tolist() for field in verdict)


def peaked(*tokens: int, width: int = 5) -> list[list[float]]:
    """One row per token, with almost all mass on it."""
    return [[9.0 if i == token else 0.0 for i in range(width)] for token in tokens]


def drafts(proposal: str, logits) -> dict:
    return {"proposal": proposal} | ({} if proposal == "deterministic" else {"draft_logits": torch.as_tensor(logits)})
