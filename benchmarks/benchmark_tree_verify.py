"""Time of the tree ops beside the bytes they must move.

One sequence per call. Trees are binary, numbered breadth-first; the walk goes down the first children as far as there
are any. "torch" is the plain expression of the same rule, where there is one.

    python benchmarks/benchmark_tree_verify.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from measure import DTYPES, Report, arguments_parser, cold, implementations
from viasd_kernels import build_tree, compact_kv, tree_attention, verify_tree

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # of SmolLM2-135M


def binary_tree(rows: int) -> torch.Tensor:
    return torch.tensor([-1, *((row - 1) // 2 for row in range(1, rows))], dtype=torch.int32)


def measure_build(report: Report, rows: int) -> None:
    parents, row_start = binary_tree(rows), torch.tensor([0, rows])

    def call(impl: str, turn: int = 0):
        return build_tree(parents, row_start, max_rows=rows, impl=impl, check=False)

    found = implementations(call, what=f"build_tree, {rows} rows")
    ways = {impl: lambda turn, impl=impl: call(impl) for impl in found}
    report.measure("build_tree", f"{rows} rows", "int32", rows * (4 + 8 + 12), ways)


def measure_attention(report: Report, rows: int, context: int, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    generator = torch.Generator().manual_seed(rows)
    length = context + rows
    shape = length, KV_HEADS, HEAD_DIM
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    key_pools, value_pools = (cold(pool, report.buffer_bytes // 2) for pool in (keys, values))
    q = torch.randn(rows, HEADS, HEAD_DIM, generator=generator).to(dtype)
    slots = torch.randperm(length, generator=generator).int().unsqueeze(0)
    row_start, context_len = torch.tensor([0, rows]), torch.tensor([context])
    tree = build_tree(binary_tree(rows), row_start, max_rows=rows)
    bits = (tree.ancestors >> torch.arange(rows)) & 1
    mask = torch.cat([torch.ones(rows, context, dtype=torch.bool), (bits + torch.eye(rows)).bool()], 1)

    def call(impl: str, turn: int = 0) -> torch.Tensor:
        pools = key_pools[turn % len(key_pools)], value_pools[turn % len(value_pools)]
        options = {"scale": HEAD_DIM**-0.5, "impl": impl, "check": False}
        return tree_attention(q, *pools, slots, context_len, row_start, tree.ancestors, **options)

    def plain(turn: int) -> torch.Tensor:
        pools = key_pools[turn % len(key_pools)], value_pools[turn % len(value_pools)]
        k, v = (pool[slots[0]].transpose(0, 1).unsqueeze(0) for pool in pools)
        return F.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=mask, enable_gqa=True)

    case = f"{rows} rows, context {context:,}"
    found = implementations(call, what=f"tree_attention, {case}, {dtype_name}")
    ways = {impl: lambda turn, impl=impl: call(impl, turn) for impl in found}
    report.measure("tree_attention", case, dtype_name, keys.nbytes + values.nbytes, {**ways, "torch": plain})


def measure_verify(report: Report, rows: int, vocabulary: int, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    generator = torch.Generator().manual_seed(rows)
    logits = (2 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    parents, row_start = binary_tree(rows), torch.tensor([0, rows])
    tree = build_tree(parents, row_start, max_rows=rows)
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), logits.argmax(-1)[parents[1:].long()]]).int()
    coins = torch.full((rows,), 1e-9, dtype=torch.float64)  # so small that every first child is accepted
    copies = cold(logits, report.buffer_bytes)

    def call(impl: str, turn: int, temperature: float):
        options = {"temperature": torch.tensor([temperature]), "impl": impl, "check": False}
        return verify_tree(tree, tokens, copies[turn % len(copies)], coins, row_start, **options)

    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        case = f"{name}, {rows} x {vocabulary:,}"
        num_read = int(call("reference", 0, temperature).num_accepted) + 1
        found = implementations(lambda impl, t=temperature: call(impl, 0, t), what=f"verify_tree, {case}, {dtype_name}")
        ways = {impl: lambda turn, impl=impl, t=temperature: call(impl, turn, t) for impl in found}
        if not temperature:
            ways["torch"] = lambda turn: copies[turn % len(copies)].argmax(-1)
        report.measure("verify_tree", case, dtype_name, num_read * vocabulary * dtype.itemsize, ways)


def measure_compact(report: Report, rows: int, context: int, dtype_name: str) -> None:
    """Every second row is kept; all of them but the root move."""
    generator = torch.Generator().manual_seed(rows)
    cache = torch.randn(1, context + rows, KV_HEADS, HEAD_DIM, generator=generator).to(DTYPES[dtype_name])
    kept = list(range(0, rows, 2))
    path = torch.tensor(kept + [-1] * (rows - len(kept)), dtype=torch.int32)
    accepted, row_start, start = torch.tensor([len(kept) - 1]), torch.tensor([0, rows]), torch.tensor([context])
    copies = cold(cache, report.buffer_bytes // 2)

    def move(caches: tuple[torch.Tensor, torch.Tensor], impl: str):
        compact_kv(*caches, path, accepted, row_start, start, impl=impl, check=False)
        return caches

    def pair(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        return copies[2 * turn % len(copies)], copies[(2 * turn + 1) % len(copies)]

    def plain(turn: int) -> None:
        for cache in pair(turn):
            cache[0, context : context + len(kept)] = cache[0, context + torch.tensor(kept)]

    case = f"{rows} rows, context {context:,}"
    found = implementations(lambda impl: move((cache.clone(), cache.clone()), impl), what=f"compact_kv, {case}")
    ways = {impl: lambda turn, impl=impl: move(pair(turn), impl) for impl in found}
    num_bytes = 4 * KV_HEADS * HEAD_DIM * cache.itemsize * (len(kept) - 1)  # the root stays where it is
    report.measure("compact_kv", case, dtype_name, num_bytes, {**ways, "torch": plain}, "copy")


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048])
    arguments = parser.parse_args()
    report = Report("tree_verify", arguments)
    for rows in arguments.rows:
        measure_build(report, rows)
        for dtype in arguments.dtypes:
            for context in arguments.contexts:
                measure_attention(report, rows, context, dtype)
                if rows > 2:  # else nothing moves
                    measure_compact(report, rows, context, dtype)
            for vocabulary in arguments.vocabularies:
                measure_verify(report, rows, vocabulary, dtype)
    report.finish()


if __name__ == "__main__":
    main()
