"""The decode step in real shapes: full and slim, by rows and by sequences, beside the bytes that it must read."""

from __future__ import annotations

from typing import Any

import torch

from gpu.bench import Bench
from gpu.models import bytes_of_step, random_weights, route_pairs, slim_route
from gpu.record import Part
from timing import elapsed_ms, percentiles
from viasd.routing import Route
from viasd_kernels import DecoderConfig, KVPool, SkipDecoder

STEPS, SAMPLES = 4, 8  # steps of a sample, samples of a case


def parts(bench: Bench) -> list[Part]:
    return [
        Part(f"decode/{name}", lambda bench, name=name, config=config: measure_model(bench, name, config))
        for name, config in bench.plan.models.items()
    ]


class Step:
    """A pass of so many rows for each of several sequences with the same length of context, ready to be repeated."""

    def __init__(self, pool: KVPool, sequences: int, rows: int, context: int) -> None:
        length, device = context + rows, pool.keys.device
        starts = [length * b for b in range(sequences)]
        positions = list(range(context, length)) * sequences
        self.row_start = torch.arange(sequences + 1, device=device) * rows
        contexts = [range(start, start + context) for start in starts]
        row_slots = [start + position for start in starts for position in range(context, length)]
        self.kv = pool.place(contexts, row_slots, self.row_start.tolist())
        self.tokens = torch.arange(sequences * rows, device=device) % 7 + 1
        self.positions = torch.tensor(positions, device=device)

    def run(self, decoder: SkipDecoder, route: Route | None) -> torch.Tensor:
        places = (self.tokens, self.positions, self.row_start, self.kv)
        return decoder.forward(*places, route=route_pairs(route), check=False).logits


def step_ms(bench: Bench, decoder: SkipDecoder, step: Step, route: Route | None) -> dict[str, float]:
    """Percentiles of a step's time, where steps follow each other without a wait for the host."""
    steps, samples = (1, 1) if bench.plan.rehearsal else (STEPS, SAMPLES)
    logits = step.run(decoder, route)  # kernels are compiled, the pass is captured
    if not bool(logits.isfinite().all()):
        raise ValueError("step: the logits are not finite")

    def several() -> None:
        for _ in range(steps):
            step.run(decoder, route)

    if not bench.plan.rehearsal:
        several()
    return percentiles([elapsed_ms(several, bench.device) / steps for _ in range(samples)])


def measure_model(bench: Bench, name: str, config: DecoderConfig) -> dict[str, Any]:
    """All cases of one model, as far as the time goes."""
    plan = bench.plan
    bench.clear()
    weights = random_weights(config, bench.dtype, bench.device)
    decoder, eager = (SkipDecoder(weights, config, impl="triton", graphs=graphs) for graphs in (True, False))
    longest = plan.context + max(*plan.step_rows, *plan.eager_rows)
    pool = decoder.new_pool(max(longest, max(plan.batches) * (plan.context + 1)))
    with torch.no_grad():
        pool.keys.normal_(0.0, 1.0)
        pool.values.normal_(0.0, 1.0)
    slim = slim_route(config)
    bench.cases.bandwidth.sample()
    bytes_per_ms = bench.cases.bandwidth.bytes_per_ms("copy")
    kv_bytes = 2 * pool.keys[0, 0].nbytes  # of a position, in one layer
    cases: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "layers": config.num_layers,
        "slim_skip_ratio": slim.skip_ratio,
        "left_out": 0,
        "cases": cases,
    }

    def add(tier: str, way: str, sequences: int, rows: int) -> None:
        if bench.remaining_s <= 0:
            result["left_out"] += 1
            return
        route = slim if tier == "slim" else None
        with bench.attempt(f"{name}, {tier}, {way}, {sequences} x {rows}"):
            step = Step(pool, sequences, rows, plan.context)
            times = step_ms(bench, decoder if way == "graph" else eager, step, route)
            layers = config.num_layers if route is None else sum(route.attention)
            must_read = bytes_of_step(weights, config, route)
            must_read += sequences * (plan.context + rows) * layers * kv_bytes
            floor_ms = must_read / bytes_per_ms
            case = {"tier": tier, "way": way, "sequences": sequences, "rows": rows, "context": plan.context, **times}
            cases.append(case | {"bytes": must_read, "floor_ms": floor_ms, "times_floor": times["p50_ms"] / floor_ms})
            bench.progress(result)

    for rows in plan.step_rows:
        for tier in ("full", "slim"):
            add(tier, "graph", 1, rows)
    for batch in plan.batches:
        if batch > 1:
            for tier in ("full", "slim"):
                add(tier, "graph", batch, 1)
    for rows in plan.eager_rows:
        for tier in ("full", "slim"):
            add(tier, "eager", 1, rows)
    return result
