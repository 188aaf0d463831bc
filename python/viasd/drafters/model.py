"""Drafters that run a model token by token: a separate one, or the target itself on a lighter route."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from viasd.drafters.base import Draft, DraftContext, Drafter, draft_logits
from viasd.models.base import PREFILL_ROWS, Model, Rows, prefill, row_starts
from viasd.routing import Route


def draft_chains(
    context: DraftContext,
    model: Model,
    cache: Any,
    slots: Sequence[list[int]],
    max_tokens: Sequence[int],
    route: Route | None = None,
) -> Draft:
    """Draft chains by running ``model`` one token at a time; ``slots[b]`` grows by what is written for sequence b.

    The first pass feeds all of a sequence's tokens that have no slot yet. Vocabularies wider than the target's are cut:
    the draft is then drawn from, and reported as, what is left.
    """
    row_tokens = [[tokens[-1]] for tokens in context.tokens]
    long = [
        (tokens[:-1], own)
        for tokens, own, limit in zip(context.tokens, slots, max_tokens, strict=True)
        if limit > 0 and len(tokens) - len(own) > PREFILL_ROWS
    ]
    prefill(model, cache, long)
    feed = [tokens[len(own) :] for tokens, own in zip(context.tokens, slots, strict=True)]
    drawn: list[tuple[int, int, torch.Tensor]] = []
    limits = list(max_tokens)
    for step in range(max(limits, default=0)):
        active = [b for b, limit in enumerate(limits) if step < limit]
        if not active:
            break
        row_start = row_starts(len(feed[b]) for b in active)
        new_slots = cache.pool.take(row_start[-1])
        rows = Rows(
            tokens=[token for b in active for token in feed[b]],
            positions=[len(slots[b]) + i for b in active for i in range(len(feed[b]))],
            row_start=row_start,
            slots=new_slots,
            context=[list(slots[b]) for b in active],
        )
        output = model.forward(rows, cache, route=route, logits_rows=[end - 1 for end in row_start[1:]])
        tokens, logits = context.draw(active, output.logits, [row_tokens[b][1:] for b in active])
        for i, b in enumerate(active):
            slots[b].extend(new_slots[row_start[i] : row_start[i + 1]])
            if tokens[i] < 0:  # logits that cannot be drawn from: this draft ends here
                limits[b] = 0
                continue
            drawn.append((b, step, logits[i]))
            row_tokens[b].append(tokens[i])
            feed[b] = [tokens[i]]
    if context.all_greedy:
        return Draft(row_tokens)
    first_row = row_starts(len(row) for row in row_tokens)
    return Draft(row_tokens, draft_logits(first_row[-1], [(first_row[b] + step, row) for b, step, row in drawn]))


class SelfDrafter(Drafter):
    """The target on a route of its own, lighter than the slim verifier's; shares the target's weights and cache.

    It reads the keys that the verifiers left and writes its own to scratch slots, given back before verification.
    """

    name = "self"

    def __init__(self, model: Model, route: Route) -> None:
        model.check_route(route)
        self.model = model
        self.route = route

    def propose(self, context: DraftContext) -> Draft:
        slots = [list(own) for own in context.slots]
        draft = draft_chains(context, self.model, context.cache, slots, context.max_tokens, self.route)
        for own, shared in zip(slots, context.slots, strict=True):
            context.cache.pool.give(own[len(shared) :])
        return draft


class ModelDrafter(Drafter):
    """A separate, smaller model with the target's vocabulary; its own cache is cropped to the common prefix."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.name = model.name
        self._cache: Any = None
        self._fed: dict[int, list[int]] = {}
        self._slots: dict[int, list[int]] = {}

    def start(self) -> ModelDrafter:
        fresh = copy.copy(self)
        fresh._cache, fresh._fed, fresh._slots = self.model.new_cache(), {}, {}
        return fresh

    def propose(self, context: DraftContext) -> Draft:
        slots = []
        for request, tokens in zip(context.request_ids, context.tokens, strict=True):
            own, fed = self._slots.setdefault(request, []), self._fed.get(request, [])
            common = next((i for i, pair in enumerate(zip(fed, tokens[:-1], strict=False)) if pair[0] != pair[1]), None)
            common = min(len(fed), len(tokens) - 1) if common is None else common
            self._cache.pool.give(own[common:])
            del own[common:]
            slots.append(own)
        # Past the drafter's own context there is no draft, and decoding goes on without one.
        room = [self.model.max_positions - len(tokens) for tokens in context.tokens]
        limits = [min(pair) for pair in zip(context.max_tokens, room, strict=True)]
        draft = draft_chains(context, self.model, self._cache, slots, limits)
        for request, tokens, row, own in zip(context.request_ids, context.tokens, draft.row_tokens, slots, strict=True):
            self._fed[request] = (tokens + row[1:])[: len(own)]
        return draft

    def close(self, request_ids: Sequence[int]) -> None:
        for request in request_ids:
            self._cache.pool.give(self._slots.pop(request, []))
            self._fed.pop(request, None)
