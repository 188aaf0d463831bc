"""How many tokens to draft: as many as pay, by recent acceptance and measured costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from viasd.drafters import DraftContext, Drafter
from viasd.models.base import Model, Rows, prefill
from viasd.routing import Route
from viasd.sampling import Sampling

ROWS = (1, 2, 4, 8, 16)
CONTEXT_TOKENS = 64  # of a calibrating pass: long enough for a real pass, short enough to cost nothing
REPEATS = 3
RATE = 0.15  # weight of the newest outcome in the acceptance of its level
RECOVERY = 0.02  # how fast an acceptance returns to what was expected of it while nothing is drafted
PATIENCE = 64  # cycles without a draft after which one token is tried against all expectation


@dataclass(frozen=True)
class Costs:
    """Time of a pass of the first verifier by its rows, and of drafting one token.

    Args:
        rows: numbers of rows, ascending; in between the time is interpolated, beyond the last it grows as before it.
        verify_ms: the pass's time for each of them.
        draft_ms: per drafted token.
    """

    rows: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float = 0.0

    def cycle_ms(self, num_drafted: int) -> float:
        """A cycle's time: drafting, and one pass over the root and what was drafted."""
        num_rows = num_drafted + 1
        beyond = 0.0
        if num_rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.verify_ms[-1] - self.verify_ms[-2]) / (self.rows[-1] - self.rows[-2])
            beyond = slope * (num_rows - self.rows[-1])
        return float(np.interp(num_rows, self.rows, self.verify_ms)) + beyond + num_drafted * self.draft_ms


class DraftLength:
    """One sequence's draft length: the k that maximises expected tokens per time.

    k = argmax (1 + sum_{i=1..k} a_1 ... a_i) / cost(k), where a_i is the acceptance expected of the i-th drafted token.
    Drafters sort their tokens into levels by what they know before drawing; each level's acceptance is an
    exponentially weighted mean of its outcomes. While nothing is drafted it drifts back to the drafter's own
    expectation, so that drafting is tried again now and then, with as few tokens as could pay. Where that expectation
    is too low to pay but a perfect drafter would, one token is tried now and then, and on until one is rejected.

    With a slim tier the slim verifier is the first one, and only its time counts: the full model's is nearly
    proportional to the tokens emitted, so the best k for both together is the best for the slim tier.

    Exactness: the length is chosen before anything is drawn, from earlier tokens and verdicts alone.
    """

    def __init__(self, costs: Costs, expected_acceptance: Sequence[float]) -> None:
        self.costs = costs
        self.expected = expected_acceptance
        self.acceptance = list(expected_acceptance)
        self.levels: Sequence[int] = ()
        self.paused = 0

    def choose(self, levels: Sequence[int]) -> int:
        """How many of the tokens with these levels, which the drafter could propose next, should be drafted."""
        reached = expected_tokens = 1.0
        best, best_rate = 0, 1.0 / self.costs.cycle_ms(0)
        for k, level in enumerate(levels, 1):
            reached *= self.acceptance[level]
            expected_tokens += reached
            rate = expected_tokens / self.costs.cycle_ms(k)
            if rate > best_rate:
                best, best_rate = k, rate
        if levels and not best:
            self.paused += 1
            if self.paused > PATIENCE and self._could_pay(len(levels)):
                best = 1
            else:
                for level in set(levels):
                    self.acceptance[level] += RECOVERY * (self.expected[level] - self.acceptance[level])
        self.levels = levels[:best]
        return best

    def _could_pay(self, limit: int) -> bool:
        """Whether drafting would pay if every token were accepted."""
        cycle_ms = self.costs.cycle_ms
        return any((k + 1) / cycle_ms(k) > 1.0 / cycle_ms(0) for k in range(1, limit + 1))

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """What the first verifier made of the draft; tokens after the first rejected one say nothing."""
        if num_accepted < num_drafted:
            self.paused = 0
        for i, level in enumerate(self.levels[: min(num_drafted, num_accepted + 1)]):
            self.acceptance[level] += RATE * ((i < num_accepted) - self.acceptance[level])


class _Passes:
    """A short context, and passes after it that can be timed."""

    def __init__(self, model: Model) -> None:
        self.model, self.cache = model, model.new_cache()
        length = min(CONTEXT_TOKENS, model.max_positions // 2)
        self.tokens = [i % model.vocab_size for i in range(length)]
        self.slots: list[int] = []
        prefill(model, self.cache, [(self.tokens[:-1], self.slots)])

    def fits(self, num_rows: int) -> bool:
        return len(self.tokens) + num_rows <= self.model.max_positions

    def verify(self, num_rows: int, route: Route | None) -> None:
        own = self.cache.pool.take(num_rows)
        first = len(self.tokens) - 1
        rows = Rows(self.tokens[-1:] * num_rows, range(first, first + num_rows), [0, num_rows], own, [self.slots])
        self.model.forward(rows, self.cache, route=route).logits[0, 0].item()  # waits for the device
        self.cache.pool.give(own)


def slim_cost(model: Model, route: Route | None, num_rows: int = 8, pairs: int = 9) -> float:
    """Time of a pass on the route relative to a full pass of as many rows: the median of pairs, one after the other."""
    passes = _Passes(model)
    num_rows = num_rows if passes.fits(num_rows) else 1

    def seconds(route: Route | None) -> float:
        started = time.perf_counter()
        passes.verify(num_rows, route)
        return time.perf_counter() - started

    for own in (route, None):
        seconds(own)  # the first ones may compile or allocate
    return statistics.median(seconds(route) / seconds(None) for _ in range(pairs))


def measure_costs(model: Model, drafter: Drafter, route: Route | None = None) -> Costs:
    """Time a few passes of the first verifier (the slim tier where there is a route) and a few drafts."""
    passes = _Passes(model)
    cache, tokens, slots = passes.cache, passes.tokens, passes.slots
    length = len(tokens)
    sizes = [rows for rows in ROWS if passes.fits(rows)] or [1]
    verify_ms = [_median_ms(lambda size=size: passes.verify(size, route)) for size in sizes]  # type: ignore[misc]
    own_drafter, num_drafted = drafter.start(), min(4, model.max_positions - length)

    def draw(indices: Sequence[int], logits: Any, drafted: Any) -> tuple[list[int], Any]:
        return logits[:, : model.vocab_size].argmax(-1).tolist(), logits

    greedy = Sampling(num_drafted + 1, seed=0, eos_token_ids=())
    context = DraftContext([-1], [tokens], [num_drafted], [greedy], cache, [slots], [{}], draw)
    draft_ms = _median_ms(lambda: own_drafter.propose(context)) / num_drafted
    own_drafter.close([-1])
    # More rows never take less: what says so is noise.
    return Costs(tuple(sizes), tuple(np.maximum.accumulate(verify_ms).tolist()), draft_ms)


def _median_ms(action: Callable[[], Any]) -> float:
    action()  # the first one may compile or allocate
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)
