"""The one loop: draft, verify with the slim tier where there is one, verify with the full model."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from viasd.decode.admission import Admission
from viasd.decode.draft_length import Costs, DraftLength
from viasd.decode.escalation import Escalation, recalled, rest_of_draft, waiting_draft
from viasd.decode.gate import REGIONS, Gate
from viasd.decode.passes import Coins, Pass, apply_settings, coins_for, run_pass, token_probs
from viasd.decode.request import Request, Result, Speculation, Tier, check_request
from viasd.decode.sequence import Proposed, SequenceState
from viasd.decode.verification import Verification, judge, judge_tiered
from viasd.drafters import Draft, DraftContext, Drafter, Verdict
from viasd.drafters.base import check_draft
from viasd.errors import ApproximateOutput, InvalidInput
from viasd.models.base import Model, prefill
from viasd.routing import Route
from viasd_kernels import FATAL, Region, accept_chain, uniforms

_request_ids = itertools.count()


@dataclass(frozen=True)
class Progress:
    """Tokens that one request gained for good; ``index`` is its place in the call."""

    index: int
    tokens: list[int]
    tiers: list[Tier]


class DecodeRun:
    """Decodes requests together; each output depends on its own request alone, never on its batch mates.

    A cycle: the drafter proposes; with a ``route`` the slim tier verifies the proposal, in exact mode by exact
    speculative sampling, so that what is pending is distributed as the slim tier's own output; the full model then
    verifies what is pending, when the gate, ``max_pending`` or the end asks for it. Without a route it verifies the
    proposal itself. In tiered mode the gate decides what is emitted, and the full model takes over where it sends it.
    Source: VIA-SD, arXiv:2606.12243; in exact mode with the verification made lossless at both tiers.

    Requests wait until the cache has room for all that they may write, and start in order.

    Args:
        model: the target.
        requests: at least one; prompts must fit the model's context.
        drafter: None proposes nothing.
        route: the slim tier's; None decodes in two tiers.
        speculation: of requests that bring none of their own.
        costs: what ``speculation.adaptive`` weighs the draft length by; None always drafts up to ``gamma``.
        admission: how many requests are decoded at a time.
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
        admission: Admission | None = None,
        coins: Coins = uniforms,
    ) -> None:
        for request in requests:
            check_request(request, model.vocab_size, model.max_positions)
        if route:
            model.check_route(route)
        self.model = model
        self.requests = requests
        self.drafter = drafter.start() if drafter else None
        self.route = route
        self.coins = coins
        self.cache = model.new_cache()
        self.admission = admission or Admission()
        self.capture_layers = self.drafter.capture_layers if self.drafter else ()
        default = speculation or Speculation()
        self.sequences = [
            SequenceState(request, next(_request_ids), model.max_positions, default) for request in requests
        ]
        for sequence in self.sequences:
            if sequence.tiered and route is None:
                raise InvalidInput("mode='tiered' needs a slim tier: give a route, got None")
            if self.drafter and costs and sequence.speculation.adaptive:
                sequence.draft_length = DraftLength(costs, self.drafter.expected_acceptance)
        if any(sequence.tiered for sequence in self.sequences):
            warnings.warn(ApproximateOutput(), stacklevel=2)

    @property
    def results(self) -> list[Result]:
        """What each request has generated so far."""
        return [sequence.result for sequence in self.sequences]

    def cycles(self) -> Iterator[list[Progress]]:
        """Decode to the end; after each cycle, what became final in it."""
        index = {sequence.id: i for i, sequence in enumerate(self.sequences)}
        max_slots = self.admission.slots(self.model)
        waiting, active = deque(self.sequences), list[SequenceState]()
        while waiting or active:
            admitted = self.admission.admit(waiting, active, max_slots)
            self._prefill(admitted)
            active += admitted
            started = time.perf_counter()
            before = [len(sequence.result.tokens) for sequence in active]
            self._cycle(active)
            self._close([sequence for sequence in active if sequence.finished])
            elapsed_ms = 1e3 * (time.perf_counter() - started)
            progress = []
            for sequence, had in zip(active, before, strict=True):
                result = sequence.result
                result.stats.decode_ms += elapsed_ms
                if len(result.tokens) > had:
                    progress.append(Progress(index[sequence.id], result.tokens[had:], result.tiers[had:]))
            active = [sequence for sequence in active if not sequence.finished]
            yield progress

    def _prefill(self, sequences: list[SequenceState]) -> None:
        """Write the full model's keys of the prompts but their last tokens, which are the first pass's roots."""
        if not sequences:
            return
        started = time.perf_counter()
        prefill(self.model, self.cache, [(sequence.tokens[:-1], sequence.slots) for sequence in sequences])
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        for sequence in sequences:
            sequence.result.stats.prefill_ms = elapsed_ms

    def _cycle(self, active: list[SequenceState]) -> None:
        draft = self._propose(active)
        if self.route is None:
            rows = self._run("full", active, draft)
            verification = self._settle(active, judge(active, rows, self.coins))
            self._observe(active, verification)
            accepted = verification.accepted(active)
            self._commit(
                [Escalation(s, accepted[b], 0, (max(draft.depths(b)), 0)) for b, s in enumerate(active)],
                verification,
            )
            return
        rows = self._run("slim", active, draft)
        escalations: list[Escalation] = []
        for indices in _by_rule(active):
            sequences, own_rows = [active[b] for b in indices], rows.select(indices)
            escalations += (self._tiered if sequences[0].tiered else self._exact)(sequences, own_rows)
        if escalations:
            joining = {escalation.sequence.id for escalation in escalations}
            escalations += [
                recalled(sequence, self.cache.pool)
                for sequence in active
                if sequence.speculation.co_escalate and sequence.id not in joining and not sequence.finished
            ]
            self._escalate(escalations)

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
            draw=lambda indices, logits, drafted: self._draw([active[i] for i in indices], logits, drafted),
        )
        draft = self.drafter.propose(context)
        check_draft(self.drafter.name, draft, context, self.model.vocab_size)
        for sequence in active:
            sequence.result.stats.draft_ms += 1e3 * (time.perf_counter() - started)
        return draft

    def _max_tokens(self, drafter: Drafter, sequence: SequenceState) -> int:
        """How many tokens may be drafted, decided before any is drawn and by this sequence's own past alone."""
        # One more token than was drafted is emitted: the last verifier's own.
        limit = min(sequence.speculation.gamma, sequence.room - 1)
        if sequence.draft_length is None:
            return limit
        levels = drafter.levels(sequence.tokens, limit)
        chosen = sequence.draft_length.choose(levels)
        sequence.result.stats.num_paused += bool(levels) and not chosen
        return chosen

    def _draw(
        self, sequences: list[SequenceState], logits: torch.Tensor, drafted: Sequence[Sequence[int]]
    ) -> tuple[list[int], torch.Tensor]:
        """A draft pass's draw for each sequence: ids (-1 where the row is broken) and the masked logits behind them."""
        row_start = list(range(len(sequences) + 1))
        # Settings see the path that leads to the row: its last token as the row's, the others before it.
        paths = [[*sequence.tokens, *own] for sequence, own in zip(sequences, drafted, strict=True)]
        logits = apply_settings(
            logits[:, : self.model.vocab_size],
            [(sequence, path[:-1]) for sequence, path in zip(sequences, paths, strict=True)],
            [path[-1:] for path in paths],
            None,
            row_start,
        )
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

    def _run(self, tier: Tier, sequences: list[SequenceState], draft: Draft) -> Pass:
        started = time.perf_counter()
        route = self.route if tier == "slim" else None
        rows = run_pass(self.model, self.cache, sequences, draft, route=route, capture_layers=self.capture_layers)
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        for sequence in sequences:
            stats = sequence.result.stats
            if tier == "slim":
                stats.num_slim_passes += 1
                stats.slim_ms += elapsed_ms
            else:
                stats.num_full_passes += 1
                stats.full_ms += elapsed_ms
        return rows

    def _settle(self, sequences: list[SequenceState], verification: Verification) -> Verification:
        verification.rows.settle(sequences, self.cache, verification.paths)
        return verification

    def _exact(self, sequences: list[SequenceState], rows: Pass) -> list[Escalation]:
        """Append what the slim tier let pass, by the exact rule, to the pending tokens; who needs a full pass."""
        slim = self._settle(sequences, judge(sequences, rows, self.coins, gate=sequences[0].speculation.gate))
        drafted, drawn = slim.accepted(sequences), slim.drawn(sequences, "slim")
        judged = [row for b in range(len(sequences)) for row in slim.judges(b)]
        recorded = iter(rows.logits[torch.tensor(judged, device=rows.logits.device)])
        escalations = []
        for b, sequence in enumerate(sequences):
            joining = drafted[b] + drawn[b]
            kept = sequence.keep([proposed.token for proposed in joining])
            own_rows = [next(recorded) for _ in slim.judges(b)]
            for proposed, row in zip(joining[:kept], own_rows, strict=False):
                sequence.pending.append(replace(proposed, row=None if sequence.greedy else row))
                sequence.tokens.append(proposed.token)
            sequence.trim(self.cache.pool)
            for region in slim.regions[b]:
                sequence.result.stats.regions[REGIONS[region]] += 1
            sequence.count_chain(max(rows.draft.depths(b)), len(drafted[b]), kept)
            full = len(sequence.pending) >= sequence.speculation.max_pending
            if Region.ESCALATE in slim.regions[b] or full or sequence.end or slim.status[b] & FATAL:
                escalations.append(recalled(sequence, self.cache.pool))
        self._observe(sequences, slim)
        return escalations

    def _tiered(self, sequences: list[SequenceState], rows: Pass) -> list[Escalation]:
        """Emit what the gate lets pass; who needs a full pass, for the rest of a draft or to refresh the keys."""
        gate = sequences[0].speculation.gate
        slim = self._settle(sequences, judge_tiered(sequences, rows, self.coins, gate))
        drafted, drawn = slim.accepted(sequences), slim.drawn(sequences, "slim")
        escalations = []
        for b, sequence in enumerate(sequences):
            # A token that the gate sent to region B is the slim tier's, even where that drew the draft's own again.
            tiers: list[Tier] = ["draft" if region == Region.ACCEPT else "slim" for region in slim.regions[b]]
            emitted = [replace(own, tier=tier) for own, tier in zip(drafted[b], tiers, strict=False)] + drawn[b]
            num_drafted, num_kept = max(rows.draft.depths(b)), len(drafted[b])
            kept = sequence.keep([proposed.token for proposed in emitted])
            sequence.pending += emitted[:kept]
            sequence.emit(
                [proposed.token for proposed in emitted[:kept]],
                [proposed.tier for proposed in emitted[:kept]],
                rows,
                slim.judges(b)[:kept],
            )
            sequence.trim(self.cache.pool)
            escalates = slim.escalate[b] and not sequence.finished
            for region in slim.regions[b][: kept + escalates]:
                sequence.result.stats.regions[REGIONS[region]] += 1
            if escalates:
                rest = rest_of_draft(sequence, rows, b, num_kept)
                pending = sequence.recall_pending(self.cache.pool)
                escalations.append(Escalation(sequence, pending + rest, len(pending), (num_drafted, num_kept)))
                continue
            sequence.count_chain(num_drafted, num_kept, kept)
            if len(sequence.pending) >= sequence.speculation.max_pending and not sequence.finished:
                escalations.append(recalled(sequence, self.cache.pool))
        self._observe(sequences, slim)
        return escalations

    def _escalate(self, escalations: list[Escalation]) -> None:
        """One full pass over everything that waits for it."""
        sequences = [escalation.sequence for escalation in escalations]
        draft = waiting_draft(escalations, self.model.vocab_size)
        rows = self._run("full", sequences, draft)
        num_trusted = [escalation.num_trusted for escalation in escalations]
        self._commit(escalations, self._settle(sequences, judge(sequences, rows, self.coins, num_trusted)))

    def _commit(self, escalations: list[Escalation], full: Verification) -> None:
        """Append what the full model let pass, and the token it drew, for good."""
        accepted = [e.proposals[: len(path)] for e, path in zip(escalations, full.paths, strict=True)]
        overshoot = _overshoot(escalations, accepted, full)
        for b, escalation in enumerate(escalations):
            sequence, num_trusted = escalation.sequence, escalation.num_trusted
            stats = sequence.result.stats
            sequence.tokens.extend(proposed.token for proposed in accepted[b][:num_trusted])
            new = accepted[b][num_trusted:]
            tokens, tiers = [proposed.token for proposed in new], [proposed.tier for proposed in new]
            if full.next_token[b] >= 0:
                tokens.append(full.next_token[b])
                tiers.append("full")
            kept = sequence.keep(tokens)
            sequence.emit(tokens[:kept], tiers[:kept], full.rows, full.judges(b)[num_trusted:][:kept])
            sequence.num_verified = len(sequence.tokens)
            sequence.trim(self.cache.pool)
            stats.add_overshoot(overshoot[b][: num_trusted + kept])
            if escalation.block:
                num_drafted, num_passed = escalation.block
                sequence.count_chain(num_drafted, num_passed + len(new), num_passed + kept)
            else:
                sequence.count_pending(escalation.proposals[num_trusted:], len(new))
            if not sequence.finished and full.status[b] & FATAL:
                sequence.result.finish_reason = "error"
                sequence.result.error = f"the full model's logits are broken: {full.status[b]!r}"

    def _observe(self, sequences: list[SequenceState], verification: Verification) -> None:
        if self.drafter is None:
            return
        draft = verification.rows.draft
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


def _by_rule(sequences: list[SequenceState]) -> list[list[int]]:
    """Indices of the sequences that one rule of the slim stage judges together."""
    groups: dict[tuple[str, Gate], list[int]] = {}
    for b, sequence in enumerate(sequences):
        groups.setdefault((sequence.speculation.mode, sequence.speculation.gate), []).append(b)
    return list(groups.values())


def _overshoot(
    escalations: list[Escalation], accepted: list[list[Proposed]], full: Verification
) -> Sequence[torch.Tensor]:
    """For each sequence [n]: its accepted tokens' probabilities where they were proposed, minus the full model's."""
    probs = token_probs(
        full.rows.logits,
        [row for b in range(len(escalations)) for row in full.judges(b)[:-1]],
        [proposed.token for own in accepted for proposed in own],
        [e.sequence.stats_temperature for e, own in zip(escalations, accepted, strict=True) for _ in own],
    )
    proposed = [proposed.prob for own in accepted for proposed in own]
    overshoot = torch.stack(proposed) - probs if proposed else probs
    return overshoot.split([len(own) for own in accepted])
