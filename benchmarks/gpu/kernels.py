"""Each kernel beside the plain expression, torch.compile of it, and other projects' kernels where there are any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import benchmark_acceptance
import benchmark_tree_verify
import bypass_cases
from gpu.bench import Bench
from gpu.record import Part
from timing import Cases


def parts(bench: Bench) -> list[Part]:
    """The cases that targets speak of come first. Some come again, with what takes its time: torch.compile, and other
    projects' kernels, which may be compiled at their first call."""
    plan, dtype = bench.plan, bench.plan.dtype
    config = next(iter(plan.models.values()))
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    shapes = bypass_cases.linear_shapes(config)
    cases: dict[str, Callable[[Cases], None]] = {}
    for rows in plan.norm_rows:
        cases[f"bypass_norm, {rows} rows"] = _norm(rows, config.hidden_size, dtype)
    for rows in plan.linear_rows:
        cases[f"bypass_linear, gate_up, {rows} rows"] = _linear("gate_up", shapes["gate_up"], rows, dtype)
    logits = [(rows, width) for width in plan.vocabularies for rows in plan.logit_rows]
    for rows, width in reversed(logits):
        cases[f"acceptance, {rows} x {width}"] = _acceptance(rows, width, dtype)
    cases["verify_tree, greedy"] = lambda c: benchmark_tree_verify.measure_greedy_batch(c, *plan.greedy_batch)
    for context in plan.contexts:
        for rows in plan.attention_rows:
            cases[f"tree_attention, {rows} rows, context {context}"] = _attention(rows, context, dtype, heads)
    rows, width = logits[0]
    context = plan.contexts[0]
    cases[f"verify_tree, {rows} x {width}"] = lambda c: benchmark_tree_verify.measure_verify(c, rows, width, dtype)
    cases[f"build_tree, {rows} rows"] = lambda c: benchmark_tree_verify.measure_build(c, rows)
    compact = benchmark_tree_verify.measure_compact
    cases[f"compact_kv, {rows} rows"] = lambda c: compact(c, rows, context, dtype, heads)
    for name in ("qkv", "attention_out", "mlp_out", "head"):
        cases[f"bypass_linear, {name}, {rows} rows"] = _linear(name, shapes[name], rows, dtype)
    again = [
        f"bypass_norm, {plan.norm_rows[-1]} rows",
        "acceptance, {} x {}".format(*logits[-1]),
        f"tree_attention, {plan.attention_rows[0]} rows, context {context}",
        f"bypass_linear, mlp_out, {rows} rows",
        "verify_tree, greedy",
    ]
    found = [Part(f"kernels/{name}", lambda bench, run=run: measured(bench, run, None)) for name, run in cases.items()]
    compiler = "eager" if plan.rehearsal else "inductor"
    return found + [
        Part(f"kernels/beside others: {name}", lambda bench, run=cases[name]: measured(bench, run, compiler))
        for name in again
    ]


def _norm(rows: int, width: int, dtype: str) -> Callable[[Cases], None]:
    return lambda cases: bypass_cases.measure_norm(cases, rows, width, dtype)


def _linear(name: str, shape: Any, rows: int, dtype: str) -> Callable[[Cases], None]:
    return lambda cases: bypass_cases.measure_linear(cases, name, shape, rows, dtype)


def _acceptance(rows: int, width: int, dtype: str) -> Callable[[Cases], None]:
    return lambda cases: benchmark_acceptance.measure(cases, rows, width, dtype)


def _attention(rows: int, context: int, dtype: str, heads: tuple[int, int, int]) -> Callable[[Cases], None]:
    return lambda cases: benchmark_tree_verify.measure_attention(cases, rows, context, dtype, heads)


def measured(bench: Bench, run: Callable[[Cases], None], compiler: str | None) -> list[dict[str, Any]]:
    """The rows that a benchmark adds; with a compiler, those of other projects too."""
    cases = bench.cases
    cases.compiler, cases.peers, before = compiler, compiler is not None, len(cases.rows)
    run(cases)
    cases.add_fractions()
    return cases.rows[before:]
