"""The specification of the three ops, in plain PyTorch on any device.

Vectorised over sequences: the only loops run over depth, from the root to the end of the longest block. Accumulation is
float32, float64 for float64 logits; running sums for sampling are float64.
"""

from math import inf, log, nan
from typing import Optional, Tuple

import torch

from ..sampling import draw_from_weights
from ..status import FATAL, Status
from .structs import ChainVerdict, GateVerdict, Region, Stats


def accumulation_dtype(*logits: Optional[torch.Tensor]) -> torch.dtype:
    """float64 when any of the logits is, else float32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in logits)
    return torch.float64 if wide else torch.float32


def take_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """table[rows], copied row by row: several times faster than indexing where rows are short."""
    return table.index_select(0, rows)


def scale_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - row maximum) / temperature in the temperature's dtype; temperature 0 counts as 1.

    The maximum goes first: then no temperature, however small, can overflow.
    """
    logits = logits.to(temperature.dtype)
    temperature = torch.where(temperature == 0, 1, temperature)
    return (logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(-1)


def probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature); NaN for a row that is not a distribution."""
    weights = scale_logits(logits, temperature).exp()
    return weights / weights.sum(-1, keepdim=True)


def log_normalised(scaled: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of logits whose row maximum is 0. ``sum`` adds pairwise: closer than ``log_softmax`` does."""
    return scaled - scaled.exp().sum(-1, keepdim=True).log()


def is_distribution(logits: torch.Tensor) -> torch.Tensor:
    """[...] bool: no NaN, no +inf, not all -inf. The row's maximum tells all three."""
    return logits.amax(-1).isfinite()


def target_status(logits: torch.Tensor) -> torch.Tensor:
    """[...] int32: the fatal bit of each target row, 0 for a distribution."""
    peak = logits.amax(-1)
    found = torch.where(peak == -inf, int(Status.TARGET_EMPTY), int(Status.TARGET_NOT_FINITE))
    return torch.where(peak.isfinite(), 0, found).int()


def _at(table: torch.Tensor, tokens: torch.Tensor, otherwise: float) -> torch.Tensor:
    """table[row, tokens[row]], and ``otherwise`` for ids outside the table."""
    width = table.shape[-1]
    found = table.gather(-1, tokens.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((tokens >= 0) & (tokens < width), found, otherwise)


# ---------------------------------------------------------------------------------------------------- statistics


def acceptance_stats(
    draft_logits: Optional[torch.Tensor],
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: torch.Tensor,
    alpha: float = 0.5,
    beta: float = 0.3,
    undershoot: bool = False,
) -> Stats:
    """As the public function; without draft logits (the gate's ratio criterion) what needs them is NaN."""
    temperature = temperature.to(accumulation_dtype(draft_logits, target_logits))
    tokens = tokens.long()
    scaled = scale_logits(target_logits, temperature)
    log_q = log_normalised(scaled)
    q = log_q.exp()
    valid = is_distribution(target_logits)
    # +inf elsewhere in the row makes a finite logit's ratio 0, not NaN.
    ratio = torch.where(valid, _at(scaled.exp(), tokens, nan), nan)
    missing = torch.full_like(temperature, nan)
    kl_draft_target = kl_target_draft = tv = rkl = draft_logprob = draft_entropy = missing
    if draft_logits is not None:
        log_p = _padded(log_normalised(scale_logits(draft_logits, temperature)), target_logits.shape[-1])
        p = log_p.exp()
        # Infinite where one of the two masks the token, NaN where both do: there both weights are 0.
        log_ratio = log_p - log_q
        kl_draft_target = _weighted_sum(p, log_ratio)
        kl_target_draft = _weighted_sum(q, -log_ratio)
        tv = (p - q).abs().sum(-1) / 2
        second = -log_ratio if undershoot else log_ratio
        rkl = _weighted_sum(p, (log(1 - alpha) + log_ratio).relu()) + _weighted_sum(q, (log(beta) + second).relu())
        draft_logprob = _at(log_p, tokens, nan)
        draft_entropy = -_weighted_sum(p, log_p)
    return Stats(
        kl_draft_target=kl_draft_target,
        kl_target_draft=kl_target_draft,
        tv=tv,
        rkl=rkl,
        ratio=ratio,
        draft_logprob=draft_logprob,
        target_logprob=_at(log_q, tokens, nan),
        target_argmax=torch.where(valid, target_logits.argmax(-1), -1).int(),
        draft_entropy=draft_entropy,
        target_entropy=-_weighted_sum(q, log_q),
    )


def _padded(log_p: torch.Tensor, width: int) -> torch.Tensor:
    """Log-probabilities over a wider vocabulary: -inf beyond their own, NaN where the row is NaN."""
    beyond = torch.where(log_p[..., :1].isnan(), nan, -inf).to(log_p.dtype)
    return torch.cat([log_p, beyond.expand(*log_p.shape[:-1], width - log_p.shape[-1])], -1)


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """sum of weights * values with 0 * anything = 0; a NaN weight stays NaN."""
    return torch.where(weights == 0, 0, weights * values).sum(-1)


# ---------------------------------------------------------------------------------------------------- the chain


def accept_chain(
    row_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    *,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor] = None,
) -> ChainVerdict:
    """As the public function: walk all chains one depth at a time, then draw every final token at once."""
    temperature = temperature.to(accumulation_dtype(draft_logits, target_logits))
    starts, lengths = row_start[:-1], row_start.diff()
    num_accepted = torch.zeros_like(starts)
    rejected_token = torch.full_like(starts, -1)  # the token that leaves a residual behind, -1 for none
    status = torch.zeros_like(starts, dtype=torch.int32)

    walking = lengths.nonzero().squeeze(1)
    for depth in range(1, int(lengths.max()) if lengths.numel() else 0):
        walking = walking[lengths[walking] > depth]
        rows = starts[walking] + depth
        in_block = row_tokens[rows] != -1
        walking, rows = walking[in_block], rows[in_block]
        if not walking.numel():
            break
        tokens = row_tokens[rows].long()
        accepted, found = _judge(
            tokens,
            uniforms[rows],
            take_rows(target_logits, rows - 1),
            None if draft_logits is None else take_rows(draft_logits, rows - 1),
            temperature[walking],
        )
        status[walking] |= found
        num_accepted[walking] += accepted
        # A rejection for a stated reason takes its token from the target row, an ordinary one from the residual.
        rejected_token[walking] = torch.where(accepted | (found != 0), -1, tokens)
        walking = walking[accepted]

    next_token = torch.full_like(status, -1)
    final = ((lengths > 0) & ((status & int(FATAL)) == 0)).nonzero().squeeze(1)
    rows = (starts + num_accepted)[final]
    ids, found = _draw_final(
        take_rows(target_logits, rows),
        None if draft_logits is None else take_rows(draft_logits, rows),
        uniforms[starts[final]],
        temperature[final],
        rejected_token[final],
    )
    next_token[final] = ids.int()
    status[final] |= found
    return ChainVerdict(num_accepted.int(), next_token, status)


def _judge(
    tokens: torch.Tensor,
    coins: torch.Tensor,
    target: torch.Tensor,
    draft: Optional[torch.Tensor],
    temperature: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Is each token, drawn from its draft row, accepted under its target row? Returns (accepted bool, status bits).

    A fatal finding ends the matter: an id out of range is found before any row is looked at, a bad target row before
    the draft row.
    """
    outside = (tokens < -1) | (tokens >= target.shape[-1])
    found = torch.where(outside, int(Status.TOKEN_OUT_OF_RANGE), target_status(target))
    fatal = found != 0
    greedy = temperature == 0
    accepted = tokens == target.argmax(-1)
    if not bool(greedy.all()):
        q_token = _at(probabilities(target, temperature), tokens, 0.0)
        p_token = torch.ones_like(q_token)
        if draft is not None:
            p_token = _at(probabilities(draft, temperature), tokens, 0.0)
            about_draft = torch.where(p_token == 0, int(Status.DRAFT_ZERO), 0)
            about_draft = torch.where(is_distribution(draft), about_draft, int(Status.DRAFT_INVALID))
            found = torch.where(fatal | greedy, found, about_draft.int())
        accepted = torch.where(greedy, accepted, coins * p_token.double() < q_token.double())
    return accepted & (found == 0), found


def _draw_final(
    target: torch.Tensor,
    draft: Optional[torch.Tensor],
    coins: torch.Tensor,
    temperature: torch.Tensor,
    rejected_token: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The token after the last accepted row: recovered where a token was rejected, else the bonus; and status bits."""
    found = target_status(target)
    ids = target.argmax(-1)
    sampled = temperature > 0
    if bool(sampled.any()):
        weights = probabilities(target, temperature)
        recovering = (sampled & (rejected_token >= 0)).nonzero().squeeze(1)
        q = weights[recovering]
        if draft is None:
            residual = q.scatter(-1, rejected_token[recovering].unsqueeze(-1), 0.0)
        else:
            residual = q.clone()
            residual[:, : draft.shape[-1]] -= probabilities(draft[recovering], temperature[recovering])
            residual.clamp_(min=0)
        empty = ~(residual > 0).any(-1)
        weights[recovering] = torch.where(empty.unsqueeze(-1), q, residual)
        found[recovering] |= torch.where(empty, int(Status.RESIDUAL_EMPTY), 0).int()
        ids = torch.where(sampled, draw_from_weights(weights, coins), ids)
    return torch.where((found & int(FATAL)) == 0, ids, -1), found


# ---------------------------------------------------------------------------------------------------- the gate


def gate_tiers(
    row_tokens: torch.Tensor,
    slim_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    *,
    criterion: str,
    accept: torch.Tensor,
    escalate: torch.Tensor,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor] = None,
) -> GateVerdict:
    """As the public function, with the gate's three parts spelled out."""
    dtype = accumulation_dtype(draft_logits, slim_logits)
    accept, escalate, temperature = accept.to(dtype), escalate.to(dtype), temperature.to(dtype)
    starts, lengths = row_start[:-1], row_start.diff()
    tokens = torch.full_like(row_tokens, -1, dtype=torch.int32)
    regions = torch.full_like(tokens, int(Region.NOT_WALKED), dtype=torch.int8)
    stats = _unjudged(tokens, dtype)
    status = torch.zeros_like(starts, dtype=torch.int32)
    escalated = torch.zeros_like(status, dtype=torch.bool)
    num_kept = torch.zeros_like(starts)
    whole = lengths > 0  # every row of the block so far was kept

    walking = lengths.nonzero().squeeze(1)
    for depth in range(1, int(lengths.max()) if lengths.numel() else 0):
        walking = walking[lengths[walking] > depth]
        rows = starts[walking] + depth
        in_block = row_tokens[rows] != -1
        walking, rows = walking[in_block], rows[in_block]
        if not walking.numel():
            break
        drafted = row_tokens[rows].long()
        slim = take_rows(slim_logits, rows - 1)
        draft = None if draft_logits is None else take_rows(draft_logits, rows - 1)
        found, judged = _inspect(drafted, slim, draft, criterion)
        region = _region(judged, found, criterion, accept[walking], escalate[walking])
        emitted = torch.where(region == Region.ACCEPT, drafted, -1)
        again = (region == Region.REGENERATE).nonzero().squeeze(1)
        emitted[again] = _draw(slim[again], uniforms[rows[again]], temperature[walking[again]])

        tokens[rows - 1] = emitted.int()
        regions[rows] = region
        for name in Stats._fields:
            getattr(stats, name)[rows - 1] = getattr(judged, name)
        status[walking] |= found
        escalated[walking] = region == Region.ESCALATE
        kept = (region != Region.ESCALATE) & (emitted == drafted)
        num_kept[walking] += kept
        whole[walking] = kept
        walking = walking[kept]

    final = whole.nonzero().squeeze(1)
    rows = (starts + num_kept)[final]
    last = take_rows(slim_logits, rows)
    found = target_status(last)
    bonus = _draw(last, uniforms[starts[final]], temperature[final])
    tokens[rows] = torch.where(found == 0, bonus, -1).int()
    status[final] |= found
    escalated[final] = found != 0
    running = torch.nn.functional.pad((tokens >= 0).cumsum(0), (1, 0))
    return GateVerdict(tokens, regions, running[row_start].diff().int(), escalated, status, stats)


def _unjudged(rows: torch.Tensor, dtype: torch.dtype) -> Stats:
    """Statistics of rows under which nothing was judged: NaN, target_argmax -1."""
    fields = {name: torch.full_like(rows, nan, dtype=dtype) for name in Stats._fields}
    fields["target_argmax"] = torch.full_like(rows, -1)
    return Stats(**fields)


def _inspect(
    tokens: torch.Tensor, slim: torch.Tensor, draft: Optional[torch.Tensor], criterion: str
) -> Tuple[torch.Tensor, Stats]:
    """Status bits and statistics (temperature 1) of drafted tokens under the rows before them."""
    outside = (tokens < -1) | (tokens >= slim.shape[-1])
    found = torch.where(outside, int(Status.TOKEN_OUT_OF_RANGE), target_status(slim))
    if draft is not None and criterion != "ratio":
        about_draft = torch.where(is_distribution(draft), 0, int(Status.DRAFT_INVALID)).int()
        found = torch.where(found == 0, about_draft, found)
    ones = torch.ones_like(tokens, dtype=accumulation_dtype(draft, slim))
    return found, acceptance_stats(draft, slim, tokens, temperature=ones)


def _region(
    stats: Stats, found: torch.Tensor, criterion: str, accept: torch.Tensor, escalate: torch.Tensor
) -> torch.Tensor:
    """[N] int8 Region: by the criterion, and C for any finding and for a token that the slim row masks."""
    if criterion == "ratio":
        keep, stop = stats.ratio >= accept, stats.ratio < escalate
    else:
        distance = stats.tv if criterion == "tv" else stats.kl_draft_target
        keep, stop = distance <= accept, distance > escalate
    region = torch.where(stop, int(Region.ESCALATE), int(Region.REGENERATE))
    region = torch.where(keep, int(Region.ACCEPT), region)
    forced = (found != 0) | (stats.target_logprob == -inf)
    return torch.where(forced, int(Region.ESCALATE), region).to(torch.int8)


def _draw(logits: torch.Tensor, coins: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """One id per row: argmax at temperature 0, else inverse CDF."""
    sampled = draw_from_weights(probabilities(logits, temperature), coins)
    return torch.where(temperature == 0, logits.argmax(-1), sampled)
