"""Tokens per second of the real decode loop, with a drafter whose acceptance is set by hand.

The model's greedy output is known (see ``set_successors``), so that the drafter can be right as often as it should be,
and every token can be checked. Plain decoding is the same loop, on the same captured passes, without a drafter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from gpu.bench import Bench
from gpu.decode import Step, step_ms
from gpu.models import DecoderModel, full_successor, random_weights, set_successors, slim_route, slim_successor
from gpu.record import Part
from viasd import DecodeRun, Request, Route, Sampling, Speculation
from viasd.drafters import Draft, DraftContext, Drafter
from viasd_kernels import SkipDecoder

TIERS = ("two", "three")


def parts(bench: Bench) -> list[Part]:
    plan = bench.plan
    found = []
    for batch in plan.decode_batches:
        found.append(Part(f"loop/plain, batch {batch}", lambda bench, b=batch: measure(bench, b, None, None)))
        for tiers in TIERS:
            for tokens in plan.tokens_per_pass:
                name = f"loop/{tiers} tiers, {tokens} tokens per pass, batch {batch}"
                found.append(Part(name, lambda bench, b=batch, n=tokens, t=tiers: measure(bench, b, n, t)))
    return found


def acceptance_for(tokens_per_pass: float, gamma: int) -> float:
    """The acceptance a of a drafted token at which a pass yields so many: 1 + a + ... + a^gamma of them."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        too_few = sum(middle**i for i in range(gamma + 1)) < tokens_per_pass
        low, high = (middle, high) if too_few else (low, middle)
    return high


class SetDrafter(Drafter):
    """Knows what its verifier will say, and says so with a given probability, for each token by itself."""

    name = "set by hand"

    def __init__(self, successor: Callable[[int], int], acceptance: float) -> None:
        self.successor, self.acceptance = successor, acceptance

    def start(self) -> SetDrafter:
        fresh = SetDrafter(self.successor, self.acceptance)
        fresh.coins = random.Random(0)
        return fresh

    def propose(self, context: DraftContext) -> Draft:
        drafts = []
        for tokens, limit in zip(context.tokens, context.max_tokens, strict=True):
            draft = [tokens[-1]]
            for _ in range(limit):
                right = self.successor(draft[-1])
                draft.append(right if self.coins.random() < self.acceptance else right + 2)
            drafts.append(draft)
        return Draft(drafts)


def known_model(bench: Bench) -> tuple[DecoderModel, Route]:
    """The first of the plan's models, with successors; made once."""
    if "model" not in bench.shared:
        plan = bench.plan
        bench.clear()
        name, config = next(iter(plan.models.items()))
        route = slim_route(config)
        weights = random_weights(config, bench.dtype, bench.device)
        set_successors(weights, config, route)
        decoder = SkipDecoder(weights, config, impl="triton")
        num_slots = max(plan.decode_batches) * (plan.context + plan.new_tokens + 2 * plan.gamma + 1)
        bench.shared["model"] = DecoderModel(name, decoder, num_slots), route
    return bench.shared["model"]


def measure(bench: Bench, batch: int, tokens_per_pass: float | None, tiers: str | None) -> dict[str, Any]:
    """Once to capture the passes, then timed; the same drafts both times."""
    plan, (model, route) = bench.plan, known_model(bench)
    drafter, acceptance = None, None
    if tokens_per_pass is not None:
        acceptance = acceptance_for(tokens_per_pass, plan.gamma)
        drafter = SetDrafter(full_successor if tiers == "two" else slim_successor, acceptance)
    prompt = [1 + i % (model.vocab_size - 1) for i in range(plan.context - 1)] + [0]
    requests = [Request(prompt, Sampling(plan.new_tokens, seed=0, eos_token_ids=()))] * batch
    options = {
        "drafter": drafter,
        "route": route if tiers == "three" else None,
        "speculation": Speculation(gamma=plan.gamma, adaptive=False),
    }
    for _ in range(1 if plan.rehearsal else 2):
        run = DecodeRun(model, requests, **options)
        cycles = run.cycles()
        next(cycles)  # with the prefill
        bench.synchronize()
        had, started = sum(len(result.tokens) for result in run.results), time.perf_counter()
        num_cycles = sum(1 for _ in cycles)
        bench.synchronize()
        elapsed_s = time.perf_counter() - started
        for result in run.results:
            check_tokens(result.tokens, plan.new_tokens)
    num_tokens = sum(len(result.tokens) for result in run.results) - had
    stats = [result.stats for result in run.results]
    found = {
        "batch": batch,
        "tiers": {None: 1, "two": 2, "three": 3}[tiers],
        "tokens_per_pass_aimed_at": tokens_per_pass,
        "acceptance_set": acceptance,
        "num_tokens": num_tokens,
        "num_cycles": num_cycles,
        "tokens_per_s": num_tokens / elapsed_s,
        "cycle_ms": 1e3 * elapsed_s / max(num_cycles, 1),
        "tokens_per_full_pass": sum(own.tokens_per_full_pass for own in stats) / batch,
        "tokens_per_slim_pass": sum(own.tokens_per_slim_pass for own in stats) / batch,
    }
    return found | outside_passes(bench, model, route, found, stats)


def check_tokens(tokens: list[int], count: int) -> None:
    """Raise ``ValueError`` unless they are the full model's own after token 0."""
    expected = [0]
    for _ in range(count):
        expected.append(full_successor(expected[-1]))
    if tokens != expected[1:]:
        pairs = zip(tokens, expected[1:], strict=False)
        first = next((i for i, (own, right) in enumerate(pairs) if own != right), len(tokens))
        raise ValueError(f"loop: wrong from token {first} of {len(tokens)}: {tokens[: first + 3]}")


def outside_passes(
    bench: Bench, model: DecoderModel, route: Route, found: dict[str, Any], stats: Any
) -> dict[str, Any]:
    """How much of a cycle the passes do not take: the host's work, and the verdict's kernels.

    The passes' own time is that of steps which follow each other. Full passes of three tiers have rows in any number;
    they count as many as the drafts'.
    """
    plan, batch = bench.plan, found["batch"]
    rows = 1 if found["tiers"] == 1 else plan.gamma + 1
    step = Step(model.kv, batch, rows, plan.context)
    full_ms = step_ms(bench, model.decoder, step, None)["p50_ms"]
    passes_ms, slim_ms = full_ms, None
    if found["tiers"] == 3:
        slim_ms = step_ms(bench, model.decoder, step, route)["p50_ms"]
        full_per_slim = sum(own.num_full_passes for own in stats) / sum(own.num_slim_passes for own in stats)
        passes_ms = slim_ms + full_ms * full_per_slim
    outside_ms = found["cycle_ms"] - passes_ms
    return {
        "full_pass_ms": full_ms,
        "slim_pass_ms": slim_ms,
        "outside_passes_ms": outside_ms,
        "outside_passes_share": outside_ms / found["cycle_ms"],
    }
