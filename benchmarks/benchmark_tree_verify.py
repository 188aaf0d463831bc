"""Time of the tree ops beside the bytes they must move.

One sequence per call, but for the greedy walk over given argmax ids. Trees are binary, numbered breadth-first; the walk
goes down the first children as far as there are any. "torch" is the plain expression of the same rule, where there is
one.

    python benchmarks/benchmark_tree_verify.py --device cpu
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import peers
from measure import Report, arguments_parser
from timing import DTYPES, Cases, cold
from viasd_kernels import build_tree, compact_kv, tree_attention, verify_tree

HEADS = (9, 3, 64)  # query heads, key heads and elements of a head of SmolLM2-135M


def binary_tree(rows: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([-1, *((row - 1) // 2 for row in range(1, rows))], dtype=torch.int32, device=device)


def measure_build(cases: Cases, rows: int) -> None:
    parents, row_start = binary_tree(rows, cases.device), torch.tensor([0, rows], device=cases.device)

    def call(impl: str, turn: int = 0):
        return build_tree(parents, row_start, max_rows=rows, impl=impl, check=False)

    found = cases.implementations(call, what=f"build_tree, {rows} rows")
    ways = {impl: lambda turn, impl=impl: call(impl) for impl in found}
    cases.measure("build_tree", f"{rows} rows", "int32", rows * (4 + 8 + 12), ways)


def torch_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """One sequence: its keys and values are gathered, then attended to."""
    k, v = (pool[slots[0]].transpose(0, 1).unsqueeze(0) for pool in (keys, values))
    return F.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=mask, enable_gqa=True)


def measure_attention(
    cases: Cases, rows: int, context: int, dtype_name: str, heads: tuple[int, int, int] = HEADS
) -> None:
    device, dtype, (num_heads, num_kv_heads, head_dim) = cases.device, DTYPES[dtype_name], heads
    generator = torch.Generator(device).manual_seed(rows)
    length = context + rows
    shape = length, num_kv_heads, head_dim
    keys, values = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    key_pools, value_pools = (cold(pool, cases.buffer_bytes // 2) for pool in (keys, values))
    q = torch.randn(rows, num_heads, head_dim, generator=generator, device=device).to(dtype)
    slots = torch.randperm(length, generator=generator, device=device).int().unsqueeze(0)
    row_start, context_len = torch.tensor([0, rows], device=device), torch.tensor([context], device=device)
    tree = build_tree(binary_tree(rows, device), row_start, max_rows=rows, impl="reference")
    bits = (tree.ancestors >> torch.arange(rows, device=device)) & 1
    own = (bits + torch.eye(rows, device=device)).bool()
    mask = torch.cat([torch.ones(rows, context, dtype=torch.bool, device=device), own], 1)

    def pools(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        return key_pools[turn % len(key_pools)], value_pools[turn % len(value_pools)]

    def call(impl: str, turn: int = 0) -> torch.Tensor:
        options = {"scale": head_dim**-0.5, "impl": impl, "check": False}
        return tree_attention(q, *pools(turn), slots, context_len, row_start, tree.ancestors, **options)

    case = f"{rows} rows, context {context:,}"
    found = cases.implementations(call, what=f"tree_attention, {case}, {dtype_name}")
    ways = {impl: lambda turn, impl=impl: call(impl, turn) for impl in found}
    ways |= cases.torch_ways(torch_attention, lambda turn: (q, *pools(turn), slots, mask))
    cases.measure("tree_attention", case, dtype_name, keys.nbytes + values.nbytes, ways)


def measure_verify(cases: Cases, rows: int, vocabulary: int, dtype_name: str) -> None:
    device, dtype = cases.device, DTYPES[dtype_name]
    generator = torch.Generator(device).manual_seed(rows)
    logits = (2 * torch.randn(rows, vocabulary, generator=generator, device=device)).to(dtype)
    parents, row_start = binary_tree(rows, device), torch.tensor([0, rows], device=device)
    tree = build_tree(parents, row_start, max_rows=rows, impl="reference")
    tokens = torch.cat([torch.zeros_like(parents[:1]), logits.argmax(-1)[parents[1:].long()].int()])
    # So small that every first child is accepted.
    coins = torch.full((rows,), 1e-9, dtype=torch.float64, device=device)
    copies = cold(logits, cases.buffer_bytes)

    def call(impl: str, turn: int, temperature: torch.Tensor):
        options = {"temperature": temperature, "impl": impl, "check": False}
        return verify_tree(tree, tokens, copies[turn % len(copies)], coins, row_start, **options)

    for name, degree in (("greedy", 0.0), ("sampled", 1.0)):
        temperature = torch.full((1,), degree, device=device)
        case = f"{name}, {rows} x {vocabulary:,}"
        num_read = int(call("reference", 0, temperature).num_accepted) + 1
        what = f"verify_tree, {case}, {dtype_name}"
        found = cases.implementations(lambda impl, t=temperature: call(impl, 0, t), what=what)
        ways = {impl: lambda turn, impl=impl, t=temperature: call(impl, turn, t) for impl in found}
        if not degree:
            ways["torch"] = lambda turn: copies[turn % len(copies)].argmax(-1)
        cases.measure("verify_tree", case, dtype_name, num_read * vocabulary * dtype.itemsize, ways)


def measure_greedy_batch(cases: Cases, sequences: int, rows: int) -> None:
    """The argmax ids are given, so no logits are read: what is left is a walk over small integers."""
    device = cases.device
    generator = torch.Generator(device).manual_seed(rows)
    parents = binary_tree(rows, device).repeat(sequences)
    row_start = torch.arange(sequences + 1, device=device) * rows
    tree = build_tree(parents, row_start, max_rows=rows, impl="reference")
    argmax = torch.randint(32_000, (sequences * rows,), generator=generator, device=device)
    firsts = torch.repeat_interleave(row_start[:-1], rows)
    tokens = argmax[firsts + parents.clamp(min=0)].int()
    coins = torch.zeros(sequences * rows, dtype=torch.float64, device=device)
    options = {"temperature": torch.zeros(sequences, device=device), "full_argmax": argmax, "check": False}

    def call(impl: str, turn: int = 0):
        return verify_tree(tree, tokens, None, coins, row_start, impl=impl, **options)

    case = f"argmax given, {sequences} sequences of {rows} rows"
    found = cases.implementations(call, what=f"verify_tree, {case}")
    ways = {impl: lambda turn, impl=impl: call(impl) for impl in found}
    if cases.peers:
        own = (x.view(sequences, rows) for x in (tokens, argmax, tree.first_child, tree.next_sibling))
        ways |= peers.greedy_tree_ways(*own)
    num_bytes = sequences * rows * 4 * 5 + sequences * 12  # of each row its links, depth and token, and the path
    cases.measure("verify_tree", case, "int32", num_bytes, ways)


def measure_compact(
    cases: Cases, rows: int, context: int, dtype_name: str, heads: tuple[int, int, int] = HEADS
) -> None:
    """Every second row is kept; all of them but the root move."""
    device, (_, num_kv_heads, head_dim) = cases.device, heads
    generator = torch.Generator(device).manual_seed(rows)
    shape = 1, context + rows, num_kv_heads, head_dim
    cache = torch.randn(shape, generator=generator, device=device).to(DTYPES[dtype_name])
    kept = list(range(0, rows, 2))
    path = torch.tensor(kept + [-1] * (rows - len(kept)), dtype=torch.int32, device=device)
    places = [torch.tensor(own, device=device) for own in ([len(kept) - 1], [0, rows], [context], kept)]
    accepted, row_start, start, moved = places
    copies = cold(cache, cases.buffer_bytes // 2)

    def move(caches: tuple[torch.Tensor, torch.Tensor], impl: str):
        compact_kv(*caches, path, accepted, row_start, start, impl=impl, check=False)
        return caches

    def pair(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        return copies[2 * turn % len(copies)], copies[(2 * turn + 1) % len(copies)]

    def plain(turn: int) -> None:
        for cache in pair(turn):
            cache[0, context : context + len(kept)] = cache[0, context + moved]

    case = f"{rows} rows, context {context:,}"
    found = cases.implementations(lambda impl: move((cache.clone(), cache.clone()), impl), what=f"compact_kv, {case}")
    ways = {impl: lambda turn, impl=impl: move(pair(turn), impl) for impl in found}
    num_bytes = 4 * num_kv_heads * head_dim * cache.itemsize * (len(kept) - 1)  # the root stays where it is
    cases.measure("compact_kv", case, dtype_name, num_bytes, {**ways, "torch": plain}, "copy")


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048])
    arguments = parser.parse_args()
    report = Report("tree_verify", arguments)
    for rows in arguments.rows:
        measure_build(report, rows)
        measure_greedy_batch(report, 64, rows)
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
