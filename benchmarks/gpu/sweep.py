"""Other entries for ``configurations.json``, timed beside the one in use. Reported; who reads them edits the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bypass_cases import linear_shapes
from gpu.bench import Bench
from gpu.record import Attempts, Part
from timing import Way, cold, refuse_unless_close
from viasd_kernels import Gate, accept_chain, acceptance_stats, bypass_linear, gate_tiers, tree_attention, verify_tree
from viasd_kernels.configurations import configuration, trying
from viasd_kernels.tree_verify import build_tree

Entry = dict[str, int]


@dataclass(frozen=True)
class Candidates:
    """A kernel at one size: the entries to try, and ``call(turn)``, which gives what must not depend on them."""

    family: str
    kernel: str
    size: int
    entries: tuple[Entry, ...]
    num_bytes: int
    call: Callable[[int], Any]


def parts(bench: Bench) -> list[Part]:
    plan = bench.plan
    makers: dict[str, Callable[[Bench], Candidates]] = {}
    for rows in plan.linear_rows[-2:] if plan.rehearsal else (16, 32, 64):
        makers[f"bypass_linear, {rows} rows"] = lambda bench, rows=rows: linear(bench, rows)
    for rows in plan.attention_rows:
        makers[f"tree_attention, {rows} rows"] = lambda bench, rows=rows: attention(bench, rows)
    for op in ("acceptance_stats", "accept_chain", "gate_tiers", "verify_tree"):
        makers[op] = lambda bench, op=op: logits(bench, op)
    return [
        Part(f"sweep/{name}", lambda bench, name=name, maker=maker: measure(bench, name, maker(bench)))
        for name, maker in makers.items()
    ]


def measure(bench: Bench, name: str, found: Candidates) -> dict[str, Any]:
    """Each entry's time, the fastest first, and those that need more than there is, or give other results."""
    used = configuration(found.family, found.kernel, bench.device, found.size)
    used = {key: value for key, value in used.items() if key != "up_to"}
    expected = found.call(0)
    ways: dict[str, Way] = {}
    rejected = Attempts()
    entries: dict[str, Entry] = {}
    waiting = [used, *(entry for entry in found.entries if entry != used)]
    while waiting and (not ways or bench.remaining_s > 0):
        entry = waiting.pop(0)
        described = ", ".join(f"{key} {value}" for key, value in entry.items())

        def under(turn: int, entry: Entry = entry) -> Any:
            with trying(found.family, found.kernel, bench.device, entry):
                return found.call(turn)

        with rejected.attempt(described):
            refuse_unless_close(f"{name}, {described}", under(0), expected)
            ways[described], entries[described] = under, entry
    cases = bench.cases
    before = len(cases.rows)
    cases.measure(found.kernel, name, bench.plan.dtype, found.num_bytes, ways)
    cases.add_fractions()
    timed = sorted(cases.rows[before:], key=lambda row: row["p50_ms"])
    keys = ("p20_ms", "p50_ms", "p80_ms", "fraction")
    rows = [{"entry": entries[row["way"]], **{key: row[key] for key in keys}} for row in timed]
    result = {"family": found.family, "kernel": found.kernel, "size": found.size, "in_use": used}
    return result | {"entries": rows, "left_out": len(waiting), "rejected": rejected.failures}


def grid(**values: tuple[int, ...]) -> Iterator[Entry]:
    """Every combination."""
    names = list(values)
    found: list[Entry] = [{}]
    for name in names:
        found = [own | {name: value} for own in found for value in values[name]]
    yield from found


def linear(bench: Bench, rows: int) -> Candidates:
    """The shape that reads most: the MLP's gates."""
    config = next(iter(bench.plan.models.values()))
    outputs, inputs, activation = linear_shapes(config)["gate_up"]
    x = torch.randn(rows, inputs, device=bench.device).to(bench.dtype)
    weight = (torch.randn(outputs, inputs, device=bench.device) * inputs**-0.5).to(bench.dtype)
    weights, keep = cold(weight, bench.cases.buffer_bytes), torch.ones(rows, dtype=torch.bool, device=bench.device)
    few = {"BLOCK_N": (32,), "BLOCK_K_BYTES": (64, 128), "num_warps": (4,), "num_stages": (1,)}
    many = {"BLOCK_N": (16, 32, 64), "BLOCK_K_BYTES": (256, 512), "num_warps": (4,), "num_stages": (4,)}
    entries = tuple(grid(**(few if bench.plan.rehearsal else many)))

    def call(turn: int) -> torch.Tensor:
        return bypass_linear(x, weights[turn % len(weights)], keep, activation=activation, impl="triton")

    return Candidates("layer_skip", "bypass_linear", max(16, rows), entries, weight.nbytes, call)


def attention(bench: Bench, rows: int) -> Candidates:
    plan, device = bench.plan, bench.device
    config, context = next(iter(plan.models.values())), plan.contexts[-1]
    length, heads = context + rows, (config.num_kv_heads, config.head_dim)
    pools = [torch.randn(length, *heads, device=device).to(bench.dtype) for _ in range(2)]
    keys, values = (cold(pool, bench.cases.buffer_bytes // 2) for pool in pools)
    q = torch.randn(rows, config.num_heads, config.head_dim, device=device).to(bench.dtype)
    slots = torch.randperm(length, device=device).int().unsqueeze(0)
    row_start, context_len = torch.tensor([0, rows], device=device), torch.tensor([context], device=device)
    chain = torch.arange(-1, rows - 1, device=device)
    ancestors = build_tree(chain, row_start, max_rows=rows, impl="triton").ancestors
    block_d = max(16, 1 << (config.head_dim - 1).bit_length())
    kernel = "tree_attention_float32" if bench.dtype == torch.float32 else "tree_attention"
    few = {"MAX_BLOCK_M": (16,), "BLOCK_N": (16, 32), "num_warps": (4,), "num_stages": (1,)}
    many = {"MAX_BLOCK_M": (64,), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2,)}
    entries = tuple(grid(**(few if plan.rehearsal else many)))

    def call(turn: int) -> torch.Tensor:
        pools = keys[turn % len(keys)], values[turn % len(values)]
        places = (slots, context_len, row_start, ancestors)
        return tree_attention(q, *pools, *places, scale=config.score_scale, impl="triton", check=False)

    num_bytes = pools[0].nbytes + pools[1].nbytes
    return Candidates("tree_verify", kernel, block_d, entries, num_bytes, call)


def logits(bench: Bench, op: str) -> Candidates:
    """The ops that read rows of logits; all drafted tokens are accepted."""
    plan, device = bench.plan, bench.device
    rows, width = plan.logit_rows[0], plan.vocabularies[-1]
    row = 2 * torch.randn(rows, width, device=device)
    full, draft = row.to(bench.dtype), (row + 0.1 * torch.randn(rows, width, device=device)).to(bench.dtype)
    tokens = torch.cat([torch.zeros_like(full[:1, 0], dtype=torch.long), full[:-1].argmax(-1)]).int()
    coins = torch.full((rows,), 1e-9, dtype=torch.float64, device=device)
    row_start, one = torch.tensor([0, rows], device=device), torch.ones(1, device=device)
    tree = build_tree(torch.arange(-1, rows - 1, device=device), row_start, max_rows=rows, impl="triton")
    gate = Gate("ratio", 0.6 * one, 0.3 * one)
    targets, drafts = cold(full, bench.cases.buffer_bytes // 2), cold(draft, bench.cases.buffer_bytes // 2)
    pair = {"temperature": one, "impl": "triton", "check": False}
    ones = torch.ones(rows, device=device)

    def call(turn: int) -> Any:
        target, draft = targets[turn % len(targets)], drafts[turn % len(drafts)]
        if op == "acceptance_stats":
            return acceptance_stats(draft, target, tokens, temperature=ones, impl="triton", check=False)
        if op == "accept_chain":
            return accept_chain(tokens, target, coins, row_start, draft_logits=draft, **pair)
        if op == "gate_tiers":
            return gate_tiers(tokens, target, coins, row_start, gate=gate, **pair)
        return verify_tree(tree, tokens, target, coins, row_start, **pair)

    kernels = {"gate_tiers": ("acceptance", "gate_tiers"), "verify_tree": ("tree_verify", "verify_tree")}
    family, kernel = kernels.get(op, ("acceptance", "rows"))
    sizes = {"BLOCK": (32, 64), "num_warps": (4,)}
    if not plan.rehearsal:
        sizes = {"BLOCK": (1024, 2048, 4096), "num_warps": (4, 8)}
    num_bytes = rows * full[0].nbytes * (1 if op in kernels else 2)
    return Candidates(family, kernel, width, tuple(grid(**sizes)), num_bytes, call)
