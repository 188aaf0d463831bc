"""The one loop: draft, verify with the slim tier where there is one, verify with the full model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from viasd.decode.draft_length import Costs, DraftLength
from viasd.decode.gate import REGIONS
from viasd.decode.request import Request, Result, Speculation, Tier, check_request
from viasd.decode.sequence import Proposed, SequenceState
from viasd.decode.verification import Coins, Verification, coins_for, token_probs, verify
from viasd.drafters import Draft, DraftContext, Drafter, Verdict
from viasd.drafters.base import draft_logits
from viasd.errors import InvalidInput
from viasd.models.base import Model, prefill, row_starts
from viasd.routing import Route
from viasd.sampling import mask_rows
from viasd_kernels import FATAL, Region, accept_chain, uniforms

_request_ids = itertools.count()


@dataclass(frozen=True)
class Progress:
    """Tokens that one request gained for good; ``index`` is its place in the call."""

    index: int
    tokens: list[int]
    tiers: list[Tier]


class DecodeRun:
    """Decodes some requests together, exactly: each output is distributed as the full model's, whatever its mates.

    A cycle: the drafter proposes; with a ``route`` the slim tier verifies the proposal by exact speculative sampling,
    and what it lets pass is pending, distributed as the slim tier's own output; the full model then verifies what is
    pending, when the gate, ``max_pending`` or the end asks for it. Without a route it verifies the proposal itself.
    Source: VIA-SD, arXiv:2606.12243, with the verification made lossless at both tiers.

    Args:
        model: the target.
        requests: at least one; prompts must fit the model's context.
        drafter: None proposes nothing.
        route: the slim tier's; None decodes in two tiers.
        costs: what ``speculation.adaptive`` weighs the draft length by; None always drafts up to ``gamma``.
        coins: ``coins(seeds [B], draws [B], n) -> [B, n]`` float64 in [0, 1).

    Raises:
        InvalidInput, RouteMismatch, UnsupportedModel: a request or a route that the model cannot take.
    """

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        *,
        drafter: Drafter | None = None,
        route: Route | None = None,
        speculation: Speculation | None = None,
        costs: Costs | None = None,
        coins: Coins = uniforms,
    ) -> None:
        for request in requests:
            check_request(request, model.vocab_size, model.max_positions)
        if route:
            model.check_route(route)
        self.model = model
        self.drafter = drafter.start() if drafter else None
        self.route = route
        self.speculation = speculation or Speculation()
        self.coins = coins
        self.cache = model.new_cache()
        self.capture_layers = self.drafter.capture_layers if self.drafter else ()
        self.sequences = [SequenceState(request, next(_request_ids), model.max_positions) for request in requests]
        if self.drafter and costs and self.speculation.adaptive:
            for sequence in self.sequences:
                sequence.draft_length = DraftLength(costs, self.drafter.expected_acceptance)

    @property
    def results(self) -> list[Result]:
        """What each request has generated so far."""
        return [sequence.result for sequence in self.sequences]

    def cycles(self) -> Iterator[list[Progress]]:
        """Decode to the end; after each cycle, what became final in it."""
        for sequence in self.sequences:
            self._prefill(sequence)
        while active := [sequence for sequence in self.sequences if sequence.result.finish_reason is None]:
            started = time.perf_counter()
            before = [len(sequence.result.tokens) for sequence in self.sequences]
            self._cycle(active)
            finished = [sequence for sequence in active if sequence.result.finish_reason is not None]
            self._close(finished)
            for sequence in active:
                sequence.result.stats.decode_ms += 1e3 * (time.perf_counter() - started)
            yield [
                Progress(i, sequence.result.tokens[had:], sequence.result.tiers[had:])
                for i, (sequence, had) in enumerate(zip(self.sequences, before, strict=True))
                if len(sequence.result.tokens) > had
            ]

    def _prefill(self, sequence: SequenceState) -> None:
        """Write the full model's keys of the prompt but its last token, which is the first pass's root."""
        started = time.perf_counter()
        prefill(self.model, self.cache, sequence.tokens[:-1], sequence.slots)
        sequence.result.stats.prefill_ms = 1e3 * (time.perf_counter() - started)

    def _cycle(self, active: list[SequenceState]) -> None:
        draft = self._propose(active)
        proposals: list[list[Proposed]]
        if self.route is None:
            verification = self._verify("full", active, draft)
            proposals = self._drafted(active, draft, verification)
            self._observe(active, draft, verification)
        else:
            slim = self._verify("slim", active, draft)
            escalating = self._join_pending(active, draft, slim)
            self._observe(active, draft, slim)
            active = [sequence for sequence in active if sequence.id in escalating]
            if not active:
                return
            proposals = [sequence.recall_pending(self.cache.pool) for sequence in active]
            draft = _pending_draft(active, proposals)
            verification = self._verify("full", active, draft)
        self._commit(active, draft, proposals, verification)

    def _propose(self, active: list[SequenceState]) -> Draft:
        if self.drafter is None:
            return Draft([[sequence.tokens[-1]] for sequence in active])
        started = time.perf_counter()
        context = DraftContext(
            request_ids=[sequence.id for sequence in active],
            tokens=[sequence.tokens for sequence in active],
            max_tokens=[self._max_tokens(self.drafter, sequence) for sequence in active],
            sampling=[sequence.sampling for sequence in active],
            cache=self.cache,
            slots=[sequence.slots for sequence in active],
            captured=[sequence.captured for sequence in active],
            draw=lambda indices, logits: self._draw([active[i] for i in indices], logits),
        )
        draft = self.drafter.propose(context)
        _check_draft(self.drafter.name, draft, context, self.model.vocab_size)
        for sequence in active:
            sequence.result.stats.draft_ms += 1e3 * (time.perf_counter() - started)
        return draft

    def _max_tokens(self, drafter: Drafter, sequence: SequenceState) -> int:
        """How many tokens may be drafted, decided before any is drawn and by this sequence's own past alone."""
        # One more token than was drafted is emitted: the last verifier's own.
        limit = min(self.speculation.gamma, sequence.room - 1)
        if sequence.draft_length is None:
            return limit
        levels = drafter.levels(sequence.tokens, limit)
        chosen = sequence.draft_length.choose(levels)
        sequence.result.stats.num_paused += bool(levels) and not chosen
        return chosen

    def _draw(self, sequences: list[SequenceState], logits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """A draft pass's draw for each sequence: ids (-1 where the row is broken) and the masked logits behind them."""
        row_start = list(range(len(sequences) + 1))
        logits = logits[:, : self.model.vocab_size]
        logits = mask_rows(logits, [sequence.sampling for sequence in sequences], row_start)
        for sequence in sequences:
            sequence.result.stats.num_draft_passes += 1
        verdict = accept_chain(
            torch.zeros(len(sequences), dtype=torch.int64, device=logits.device),
            logits,
            coins_for(sequences, row_start, self.coins, logits.device),
            torch.tensor(row_start, device=logits.device),
            temperature=torch.tensor([sequence.sampling.temperature for sequence in sequences], device=logits.device),
            check=False,
        )
        return verdict.next_token.tolist(), logits

    def _verify(self, tier: Tier, sequences: list[SequenceState], draft: Draft) -> Verification:
        started = time.perf_counter()
        route = self.route if tier == "slim" else None
        verification = verify(
            self.model, self.cache, sequences, draft, self.coins, route=route, capture_layers=self.capture_layers
        )
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        for sequence in sequences:
            stats = sequence.result.stats
            if tier == "slim":
                stats.num_slim_passes += 1
                stats.slim_ms += elapsed_ms
            else:
                stats.num_full_passes += 1
                stats.full_ms += elapsed_ms
        return verification

    def _drafted(
        self, sequences: list[SequenceState], draft: Draft, verification: Verification
    ) -> list[list[Proposed]]:
        """The accepted drafted tokens, each with its probability in the draft."""
        tokens = [[draft.row_tokens[b][row] for row in path] for b, path in enumerate(verification.paths)]
        if draft.logits is None:
            return [[Proposed(token, "draft", 1.0) for token in own] for own in tokens]
        probs = iter(
            token_probs(
                draft.logits,
                [row for b in range(len(sequences)) for row in verification.judges(b)[:-1]],
                [token for own in tokens for token in own],
                [s.stats_temperature for s, own in zip(sequences, tokens, strict=True) for _ in own],
            )
        )
        return [[Proposed(token, "draft", next(probs)) for token in own] for own in tokens]

    def _join_pending(self, sequences: list[SequenceState], draft: Draft, slim: Verification) -> set[int]:
        """Append what the slim tier let pass to the pending tokens; the ids of the requests that need a full pass."""
        drafted = self._drafted(sequences, draft, slim)
        last_rows = [slim.judges(b)[-1] for b in range(len(sequences))]
        drew = [b for b, token in enumerate(slim.next_token) if token >= 0]
        own_probs = token_probs(
            slim.logits,
            [last_rows[b] for b in drew],
            [slim.next_token[b] for b in drew],
            [sequences[b].stats_temperature for b in drew],
        )
        slim_drawn = {b: Proposed(slim.next_token[b], "slim", prob) for b, prob in zip(drew, own_probs, strict=True)}
        judged = [row for b in range(len(sequences)) for row in slim.judges(b)]
        recorded = iter(slim.logits[torch.tensor(judged, device=slim.logits.device)])
        in_region_c = self._count_regions(sequences, draft, slim, drafted)
        escalating = set()
        for b, sequence in enumerate(sequences):
            joining = drafted[b] + ([slim_drawn[b]] if b in slim_drawn else [])
            kept = sequence.keep([proposed.token for proposed in joining])
            rows = [next(recorded) for _ in slim.judges(b)]
            for proposed, row in zip(joining[:kept], rows, strict=False):
                sequence.pending.append(replace(proposed, row=None if sequence.greedy else row))
                sequence.tokens.append(proposed.token)
            sequence.trim(self.cache.pool)
            self._count_chain(sequence, draft, b, len(drafted[b]), kept)
            full = len(sequence.pending) >= self.speculation.max_pending
            if b in in_region_c or full or sequence.ended or slim.status[b] & FATAL:
                escalating.add(sequence.id)
        if self.speculation.co_escalate and escalating:
            return {sequence.id for sequence in sequences}
        return escalating

    def _count_regions(
        self, sequences: list[SequenceState], draft: Draft, slim: Verification, drafted: list[list[Proposed]]
    ) -> set[int]:
        """Count the regions of the accepted drafted tokens; the sequences with one in region C."""
        where = [(b, row) for b in range(len(sequences)) for row in slim.judges(b)[:-1]]
        if not where:
            return set()
        rows = torch.tensor([row for _, row in where], device=slim.logits.device)
        tokens = torch.tensor([p.token for own in drafted for p in own], device=slim.logits.device)
        # A greedy request's draft counts as one-hot, whether or not a mate made the drafter report a distribution.
        one_hot = torch.tensor([sequences[b].greedy for b, _ in where], device=slim.logits.device)
        proposal = None if draft.logits is None else draft.logits[rows]
        regions = self.speculation.gate.regions(tokens, slim.logits[rows], proposal, one_hot).tolist()
        for (b, _), region in zip(where, regions, strict=True):
            sequences[b].result.stats.regions[REGIONS[Region(region)]] += 1
        return {b for (b, _), region in zip(where, regions, strict=True) if region == Region.ESCALATE}

    def _commit(
        self,
        sequences: list[SequenceState],
        draft: Draft,
        proposals: list[list[Proposed]],
        full: Verification,
    ) -> None:
        """Append what the full model let pass, and the token it drew, for good."""
        accepted = [proposals[b][: len(path)] for b, path in enumerate(full.paths)]
        probs = iter(
            token_probs(
                full.logits,
                [row for b in range(len(sequences)) for row in full.judges(b)[:-1]],
                [p.token for own in accepted for p in own],
                [s.stats_temperature for s, own in zip(sequences, accepted, strict=True) for _ in own],
            )
        )
        for b, sequence in enumerate(sequences):
            overshoot = [proposed.prob - next(probs) for proposed in accepted[b]]
            tokens = [proposed.token for proposed in accepted[b]]
            tiers: list[Tier] = [proposed.tier for proposed in accepted[b]]
            if full.next_token[b] >= 0:
                tokens.append(full.next_token[b])
                tiers.append("full")
            kept = sequence.keep(tokens)
            sequence.commit(tokens[:kept], tiers[:kept])
            sequence.trim(self.cache.pool)
            sequence.result.stats.overshoot.extend(overshoot[:kept])
            if self.route is None:
                self._count_chain(sequence, draft, b, len(accepted[b]), kept)
            else:
                _count_pending(sequence, proposals[b], len(accepted[b]))
            if sequence.result.finish_reason is None and full.status[b] & FATAL:
                sequence.result.finish_reason = "error"
                sequence.result.error = f"the full model's logits are broken: {full.status[b]!r}"

    def _count_chain(self, sequence: SequenceState, draft: Draft, b: int, num_accepted: int, kept: int) -> None:
        """Count a verdict on the draft; where the output ended inside it, the rest of the draft does not exist."""
        num_drafted = max(draft.depths(b))
        if sequence.ended or sequence.result.finish_reason is not None:
            num_drafted = min(num_drafted, kept)
        sequence.result.stats.count_chain(num_drafted, min(num_accepted, num_drafted))

    def _observe(self, sequences: list[SequenceState], draft: Draft, verification: Verification) -> None:
        if self.drafter is None:
            return
        for b, sequence in enumerate(sequences):
            if sequence.draft_length:
                sequence.draft_length.observe(max(draft.depths(b)), len(verification.paths[b]))
        accepted = [[draft.row_tokens[b][row] for row in path] for b, path in enumerate(verification.paths)]
        self.drafter.observe(Verdict([s.id for s in sequences], accepted, verification.next_token))

    def _close(self, finished: list[SequenceState]) -> None:
        for sequence in finished:
            self.cache.pool.give(sequence.slots)
            sequence.slots.clear()
            sequence.pending.clear()
        if finished and self.drafter:
            self.drafter.close([sequence.id for sequence in finished])


def _pending_draft(sequences: list[SequenceState], pending: list[list[Proposed]]) -> Draft:
    """Everything that waits for the full model, as a draft whose proposal is the slim tier's own rows."""
    row_tokens = [
        [sequence.tokens[-1], *(p.token for p in own)] for sequence, own in zip(sequences, pending, strict=True)
    ]
    row_start = row_starts([len(own) for own in row_tokens])
    rows = [
        (row_start[b] + i, proposed.row)
        for b, own in enumerate(pending)
        for i, proposed in enumerate(own)
        if proposed.row is not None
    ]
    return Draft(row_tokens, draft_logits(row_start[-1], rows))


def _count_pending(sequence: SequenceState, pending: list[Proposed], num_accepted: int) -> None:
    stats = sequence.result.stats
    stats.num_pending_checked += min(len(pending), num_accepted + 1)
    stats.num_pending_accepted += num_accepted
    rejected = pending[num_accepted:]
    stats.num_changed += bool(rejected) and rejected[0].tier == "draft"
    stats.num_discarded += sum(proposed.tier == "draft" for proposed in rejected[1:])


def _check_draft(name: str, draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise ``InvalidInput`` for a draft that would silently change what is decoded."""
    if len(draft.row_tokens) != len(context.tokens) or (draft.parents and len(draft.parents) != len(context.tokens)):
        raise InvalidInput(f"drafter {name}: expected {len(context.tokens)} drafts, got {len(draft.row_tokens)}")
    for b, tokens in enumerate(draft.row_tokens):
        if not tokens or tokens[0] != context.tokens[b][-1]:
            raise InvalidInput(f"drafter {name}: a draft starts with the newest token, got {tokens[:1]}")
        if not all(0 <= token < vocab_size for token in tokens):
            raise InvalidInput(f"drafter {name}: ids must lie in [0, {vocab_size}), got {tokens}")
        depths = draft.depths(b)
        if len(depths) != len(tokens) or max(depths) > max(context.max_tokens[b], 0):
            raise InvalidInput(
                f"drafter {name}: at most {context.max_tokens[b]} tokens in a row may be drafted, parents before "
                f"children, one parent per row; got {len(tokens) - 1} drafted tokens of depths {depths}"
            )
