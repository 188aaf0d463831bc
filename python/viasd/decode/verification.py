"""What a pass makes of a draft: the exact rule, and the tiered one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from viasd.decode.gate import Gate
from viasd.decode.passes import Coins, Pass, coins_for, token_probs
from viasd.decode.request import Tier
from viasd.decode.sequence import Proposed, SequenceState
from viasd.errors import InvalidInput
from viasd.models.base import row_starts
from viasd_kernels import Gate as KernelGate
from viasd_kernels import Region, Status, accept_chain, build_tree, gate_tiers, verify_tree


@dataclass(frozen=True)
class Verification:
    """What was decided about a pass's B sequences.

    Args:
        rows: the pass.
        paths: B lists: the accepted drafted rows in order, as indices within the sequence.
        next_token: [B] the token drawn after the last accepted row; -1 where there is none.
        status: [B] what was found wrong.
        regions: B lists: of the drafted rows that the gate walked (under the exact rule: of the accepted ones, where
            a gate was given).
        escalate: [B] whether the gate left the rest of the draft to the full model.
    """

    rows: Pass
    paths: list[list[int]]
    next_token: list[int]
    status: list[Status]
    regions: list[list[Region]]
    escalate: list[bool]

    def judges(self, b: int) -> list[int]:
        """Rows whose distributions judged sequence b's accepted tokens, then the one its next token was drawn from."""
        return [self.rows.row_start[b] + row for row in (0, *self.paths[b])]

    def accepted(self, sequences: Sequence[SequenceState]) -> list[list[Proposed]]:
        """The accepted drafted tokens, each with its probability in the draft."""
        draft = self.rows.draft
        tokens = [[draft.row_tokens[b][row] for row in path] for b, path in enumerate(self.paths)]
        if draft.logits is None:
            found = torch.ones(sum(map(len, tokens)), device=self.rows.logits.device)
        else:
            found = token_probs(
                draft.logits,
                [row for b in range(len(sequences)) for row in self.judges(b)[:-1]],
                [token for own in tokens for token in own],
                [s.stats_temperature for s, own in zip(sequences, tokens, strict=True) for _ in own],
            )
        probs = iter(found.unbind())
        return [[Proposed(token, "draft", next(probs)) for token in own] for own in tokens]

    def drawn(self, sequences: Sequence[SequenceState], tier: Tier) -> list[list[Proposed]]:
        """Each sequence's next token, if there is one, with its probability in the tier that drew it."""
        drew = [b for b, token in enumerate(self.next_token) if token >= 0]
        probs = token_probs(
            self.rows.logits,
            [self.judges(b)[-1] for b in drew],
            [self.next_token[b] for b in drew],
            [sequences[b].stats_temperature for b in drew],
        )
        drawn = {b: [Proposed(self.next_token[b], tier, prob)] for b, prob in zip(drew, probs.unbind(), strict=True)}
        return [drawn.get(b, []) for b in range(len(sequences))]


def judge(
    sequences: Sequence[SequenceState],
    rows: Pass,
    coins: Coins,
    num_trusted: Sequence[int] | None = None,
    gate: Gate | None = None,
) -> Verification:
    """The exact verdict on a draft from its rows' logits; the first ``num_trusted[b]`` drafted rows stand anyway.

    ``gate`` says in which regions the accepted tokens lie; it decides nothing.
    """
    num_trusted = num_trusted or [0] * len(sequences)
    logits, draft_logits = rows.logits, rows.draft.logits
    if any(num_trusted):
        judging = [
            range(first + skip, end) for skip, (first, end) in zip(num_trusted, pairwise(rows.row_start), strict=True)
        ]
        index = torch.tensor([row for own in judging for row in own], device=logits.device)
        logits, draft_logits = logits[index], None if draft_logits is None else draft_logits[index]
    row_tokens = [tokens[skip:] for tokens, skip in zip(rows.draft.row_tokens, num_trusted, strict=True)]
    row_start = row_starts(map(len, row_tokens))
    device = logits.device
    tokens = torch.tensor([token for own in row_tokens for token in own], device=device)
    start = torch.tensor(row_start, device=device)
    temperature = torch.tensor([sequence.sampling.temperature for sequence in sequences], device=device)
    uniforms = coins_for(sequences, row_start, coins, device)
    in_regions = torch.zeros(0, device=device) if gate is None else _drafted_regions(sequences, rows, gate)
    if rows.draft.parents is None:
        chain = accept_chain(
            tokens, logits, uniforms, start, temperature=temperature, draft_logits=draft_logits, check=False
        )
        num_accepted, next_token, status, walked = _read(*chain, in_regions)
        paths = [list(range(1, skip + count + 1)) for skip, count in zip(num_trusted, num_accepted, strict=True)]
    else:
        parents = torch.tensor([p for own in rows.draft.parents for p in own], device=device, dtype=torch.int32)
        verdict = verify_tree(
            build_tree(parents, start, max_rows=max(map(len, row_tokens)), check=False),
            tokens,
            logits,
            uniforms,
            start,
            temperature=temperature,
            draft_logits=draft_logits,
            # Greedy requests need no distribution, whatever the tree was drawn from.
            proposal=rows.draft.proposal if draft_logits is not None else "deterministic",
            check=False,
        )
        path, num_accepted, next_token, status, walked = _read(*verdict, in_regions)
        paths = [path[first + 1 : first + 1 + count] for first, count in zip(row_start[:-1], num_accepted, strict=True)]
    regions: list[list[Region]] = [[] for _ in sequences]
    if gate is not None:
        regions = [
            [Region(walked[first + row - b - 1]) for row in path]  # the b + 1 roots up to there have none
            for b, (first, path) in enumerate(zip(rows.row_start[:-1], paths, strict=True))
        ]
    return Verification(rows, paths, next_token, [Status(bits) for bits in status], regions, [False] * len(sequences))


def _read(*tensors: torch.Tensor) -> list[list[int]]:
    """Whole numbers from the device, in one transfer: a GPU waits for the host no more than once a pass."""
    flat = torch.cat([tensor.flatten().long() for tensor in tensors]).tolist()
    ends = list(accumulate((tensor.numel() for tensor in tensors), initial=0))
    return [flat[first:end] for first, end in pairwise(ends)]


def _drafted_regions(sequences: Sequence[SequenceState], rows: Pass, gate: Gate) -> torch.Tensor:
    """[R - B] the regions of all drafted rows, under the rows that judge them."""
    draft = rows.draft
    where = [
        (token, rows.row_start[b] + (row - 1 if draft.parents is None else draft.parents[b][row]), sequences[b].greedy)
        for b, own in enumerate(draft.row_tokens)
        for row, token in enumerate(own)
        if row
    ]
    device = rows.logits.device
    if not where:
        return torch.zeros(0, device=device)
    tokens, judges, greedy = (torch.tensor(values, device=device) for values in zip(*where, strict=True))
    proposal = None if draft.logits is None else draft.logits[judges]
    # A greedy request's draft counts as one-hot, whether or not a mate made the drafter report a distribution.
    return gate.regions(tokens, rows.logits[judges], proposal, greedy)


def judge_tiered(sequences: Sequence[SequenceState], rows: Pass, coins: Coins, gate: Gate) -> Verification:
    """VIA-SD's own verdict on chains from the logits of a slim pass: keep, draw again, or leave to the full model."""
    draft = rows.draft
    if draft.parents is not None:
        raise InvalidInput("mode='tiered' takes chains, but the drafter proposed a tree; use mode='exact'")
    device, num_sequences = rows.logits.device, len(sequences)
    thresholds = {
        name: torch.full((num_sequences,), value, device=device)
        for name, value in (("accept", gate.accept), ("escalate", gate.escalate))
    }
    verdict = gate_tiers(
        torch.tensor([token for own in draft.row_tokens for token in own], device=device),
        rows.logits,
        coins_for(sequences, rows.row_start, coins, device),
        torch.tensor(rows.row_start, device=device),
        gate=KernelGate(gate.criterion, **thresholds),
        temperature=torch.tensor([sequence.sampling.temperature for sequence in sequences], device=device),
        draft_logits=None if gate.criterion == "ratio" else proposal_rows(sequences, rows),
        check=False,
    )
    emitted, walked, status, escalate = _read(verdict.tokens, verdict.regions, verdict.status, verdict.escalate)
    paths, next_token, regions = [], [], []
    for b, own in enumerate(draft.row_tokens):
        first = rows.row_start[b]
        kept = 0
        while kept + 1 < len(own) and emitted[first + kept] == own[kept + 1]:
            kept += 1
        paths.append(list(range(1, kept + 1)))
        next_token.append(emitted[first + kept])
        regions.append([Region(region) for region in walked[first + 1 : first + len(own)] if region >= 0])
    return Verification(rows, paths, next_token, [Status(bits) for bits in status], regions, list(map(bool, escalate)))


def proposal_rows(sequences: Sequence[SequenceState], rows: Pass) -> torch.Tensor:
    """[R, V] the proposals behind chains; one-hot where the draft has none, and where the request is greedy."""
    logits = torch.full_like(rows.logits, -torch.inf)
    for b, sequence in enumerate(sequences):
        first, tokens = rows.row_start[b], rows.draft.row_tokens[b]
        if rows.draft.logits is None or sequence.greedy:
            index = torch.arange(first, first + len(tokens), device=logits.device)
            # The last row proposed nothing and is not read; a token of its own keeps it a distribution.
            logits[index, torch.tensor([*tokens[1:], 0], device=logits.device)] = 0.0
        else:
            own = rows.draft.logits[first : first + len(tokens)]
            logits[first : first + len(tokens), : own.shape[-1]] = own
    return logits
