"""What was to be reached on a GPU, beside what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MANY = 4_000_000  # elements from which a share of the bandwidth can be asked for
OURS = ("triton", "native")


def targets(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each target with the worst of its cases, of each the best implementation; None where nothing was measured."""
    rows = [row for name, part in parts.items() if name.startswith("kernels/") for row in part.get("result") or ()]
    loops = [part["result"] for name, part in parts.items() if name.startswith("loop/") and part.get("result")]

    def large(case: str) -> bool:
        return size(case) >= MANY

    def few_rows(case: str) -> bool:
        return "bypassed" not in case and int(re.findall(r"(\d+) rows", case)[0]) <= 16

    # acceptance_stats reads both rows twice, which is twice what must move.
    stats = [2 * own for own in best(rows, "acceptance_stats", "fraction", large)]
    chain = best(rows, "accept_chain", "fraction", large)
    linear = best(rows, "bypass_linear", "fraction", few_rows)
    bypassed = [1e3 * own for own in best(rows, "bypass_linear", "p50_ms", lambda case: "bypassed" in case)]
    walk = [1e3 * own for own in best(rows, "verify_tree", "p50_ms", lambda case: "64 sequences of 64 rows" in case)]
    exact = [own for own in loops if own["batch"] == 1 and own["tiers"] == 2 and own["tokens_per_pass_aimed_at"] == 3]
    plain = [own["tokens_per_s"] for own in loops if own["batch"] == 1 and own["tiers"] == 1]
    speedup = [own["tokens_per_s"] / speed for own in exact for speed in plain]
    outside = [own["outside_passes_share"] for own in exact]
    return [
        at_least(0.85, "acceptance_stats: bytes moved per time / copy bandwidth, 4M logits or more", stats),
        at_least(0.85, "accept_chain: bytes moved per time / copy bandwidth, 4M logits or more", chain),
        at_least(0.80, "bypass_linear: bytes moved per time / copy bandwidth, at most 16 rows", linear),
        at_most(3.0, "bypass_linear, all rows bypassed: microseconds", bypassed),
        at_most(15.0, "verify_tree, greedy, argmax given, 64 sequences of 64 rows: microseconds", walk),
        at_least(2.5, "exact decoding at 3 tokens per full pass / plain decoding, batch 1", speedup),
        at_most(0.05, "share of a cycle outside of the passes, batch 1, two tiers", outside),
    ]


def best(rows: list[dict[str, Any]], op: str, figure: str, chosen: Callable[[str], bool]) -> list[float]:
    """Of each case that was chosen, the figure of the faster implementation."""
    fastest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["op"] == op and row["way"] in OURS and chosen(row["case"]):
            key = (row["case"], row["dtype"])
            if key not in fastest or row["p50_ms"] < fastest[key]["p50_ms"]:
                fastest[key] = row
    return [row[figure] for row in fastest.values()]


def size(case: str) -> int:
    """Rows times columns, as a case says them."""
    rows, columns = case.replace(",", "").split(" x ")
    return int(rows) * int(columns)


def at_least(limit: float, what: str, measured: list[float]) -> dict[str, Any]:
    worst = min(measured, default=None)
    return {"target": what, "at_least": limit, "measured": worst, "reached": None if worst is None else worst >= limit}


def at_most(limit: float, what: str, measured: list[float]) -> dict[str, Any]:
    worst = max(measured, default=None)
    return {"target": what, "at_most": limit, "measured": worst, "reached": None if worst is None else worst <= limit}
