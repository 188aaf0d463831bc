"""vLLM's rejection samplers over ``accept_chain``: the arguments and outputs of 0.33, for both model runners.

Both verify chains and are lossless: accept x with probability min(1, q(x) / p(x)), else draw from what q has left. What
vLLM offers beside that in the same functions and what would change the law (synthetic acceptance rates, FLy, block
verification, watermarks) is refused with ``NotImplementedError``. Nothing here synchronises.
"""

from typing import Any, List, Optional, Tuple

import torch

from ..acceptance import ChainVerdict, accept_chain
from ..checks import INDEX_DTYPES, LOGIT_DTYPES, check_tensor
from ..sampling import uniforms

# vLLM draws numbers of its own by (seed, position), some with the same function: this bit, which no position has, keeps
# our coins apart from them.
COIN_DOMAIN = 1 << 62


def rejection_sample(
    target_logits: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Optional[torch.Tensor] = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: Optional[torch.Tensor] = None,
    watermarking: Optional[torch.Tensor] = None,
    watermarking_skip_mask: Optional[torch.Tensor] = None,
    watermark_key: Optional[int] = None,
    fly_window_size: int = 0,
    fly_entropy_threshold: float = 0.3,
    fly_entropy_top_k: int = 3,
    *,
    impl: str = "auto",
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Verify drafted chains as vLLM's model runner V2 does: ``accept_chain`` on the same ragged rows.

    Request b has the rows cu_num_logits[b] to cu_num_logits[b + 1], of which row i judges the token of row i + 1, and
    the state ``idx_mapping[b]`` in ``draft_logits``, ``temperature`` and ``seed``. Coins come from ``uniforms`` by seed
    and position of the request's first row, so its tokens do not depend on the others in the batch.

    Args:
        target_logits: [n, V], after temperature and masks.
        draft_logits: [states, K, Vd], before temperature: what the request's K-th token was drawn from, divided by its
            temperature here. Columns from V on are not read, ids from Vd on have probability 0. None: one-hot.
        draft_sampled: [n] int32 or int64; the first row of a request is not read. A negative one ends the request's
            draft: the token comes from the target row, as in vLLM.
        cu_num_logits: [B + 1] int32 or int64.
        pos: [n] int32 or int64, positions; each request's first is read.
        idx_mapping: [B] int32 or int64.
        expanded_idx_mapping: [n], not read: it says what ``idx_mapping`` and ``cu_num_logits`` say.
        expanded_local_pos: [n], not read, likewise.
        temperature: [states] float32; 0 is greedy.
        seed: [states] int64.
        num_speculative_steps: K, the most drafted tokens of a request.
        use_fp64: not read: sums are float64 always.
        impl: of ``accept_chain``.
        synthetic_conditional_rates, use_block_verification, contexts, watermarking, watermarking_skip_mask,
            watermark_key, fly_window_size: refused unless off; fly_entropy_threshold and fly_entropy_top_k belong to
            the last.

    Returns:
        (sampled [B, K + 1] int64: the accepted tokens, then one more, then -1; num_sampled [B] int32, that one
        included). After a target row without a distribution (NaN, +inf or all -inf) there is no token more, nor for a
        request without rows.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape. NotImplementedError: see above, and ``impl``.

    The rows of ``draft_logits`` are copied, once, in float32.
    """
    op, device = "rejection_sample", target_logits.device
    _refuse(
        op,
        synthetic_conditional_rates=synthetic_conditional_rates is not None,
        use_block_verification=use_block_verification,
        contexts=contexts is not None,
        watermarking=watermarking is not None,
        watermarking_skip_mask=watermarking_skip_mask is not None,
        watermark_key=watermark_key is not None,
        fly_window_size=bool(fly_window_size),
    )
    check_tensor(op, "target_logits", target_logits, [None, None], LOGIT_DTYPES, device)
    num_rows, vocabulary = target_logits.shape
    check_tensor(op, "draft_sampled", draft_sampled, [num_rows], INDEX_DTYPES, device)
    check_tensor(op, "cu_num_logits", cu_num_logits, [None], INDEX_DTYPES, device)
    check_tensor(op, "pos", pos, [num_rows], INDEX_DTYPES, device)
    check_tensor(op, "idx_mapping", idx_mapping, [cu_num_logits.shape[0] - 1], INDEX_DTYPES, device)
    check_tensor(op, "temperature", temperature, [None], [torch.float32], device)
    check_tensor(op, "seed", seed, [temperature.shape[0]], [torch.int64], device)
    row_start, state = cu_num_logits.long(), idx_mapping.long()
    if not num_rows or not state.numel():
        nothing = draft_sampled.new_full((state.numel(), num_speculative_steps + 1), -1, dtype=torch.int64)
        return nothing, nothing.new_zeros(state.numel(), dtype=torch.int32)
    row = torch.arange(num_rows, device=device)
    request = torch.searchsorted(row_start[1:], row, right=True).clamp(max=state.shape[0] - 1)
    local = (row - row_start[request]).clamp(max=num_speculative_steps)
    draft = None
    if draft_logits is not None and num_speculative_steps:
        states = temperature.shape[0]
        check_tensor(op, "draft_logits", draft_logits, [states, num_speculative_steps, None], LOGIT_DTYPES, device)
        scale = torch.where(temperature > 0, temperature, 1)[state[request]].unsqueeze(1)
        step = local.clamp(max=num_speculative_steps - 1)  # a last row has no draft, and is not asked for one
        draft = draft_logits[..., :vocabulary][state[request], step].float() / scale
    first = row_start[:-1].clamp(max=num_rows - 1)
    coins = uniforms(seed[state], pos[first].long() + COIN_DOMAIN, num_speculative_steps + 1)
    tokens = draft_sampled.long().clamp(min=-1)
    verdict = accept_chain(
        tokens,
        target_logits,
        coins[request, local],
        row_start,
        temperature=(temperature[state] > 0).float(),  # the logits are scaled already
        draft_logits=draft,
        impl=impl,
        check=False,
    )
    sampled = _emitted(tokens, row_start, verdict, num_speculative_steps + 1)
    return sampled, (verdict.num_accepted + (verdict.next_token >= 0)).int()


def rejection_sample_v1(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: List[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: Optional[torch.Tensor],
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: Optional[torch.Tensor] = None,
    use_fp64_gumbel: bool = False,
    fly_window_size: Optional[int] = None,
    fly_entropy_threshold: Optional[float] = None,
    fly_entropy_top_k: int = 3,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Verify drafted chains as vLLM's model runner V1 does (its ``rejection_sample``): ``accept_chain``, bonus given.

    Args:
        draft_token_ids: [n] int32 or int64, all requests' drafted tokens; -1 ends a request's draft.
        num_draft_tokens: how many each request has.
        max_spec_len: the most that one has.
        cu_num_draft_tokens: [B] int32 or int64, their running sum.
        draft_probs: [n, V] probabilities that the tokens were drawn from. None: one-hot.
        target_logits: [n, V], after temperature and masks; row i judges token i.
        bonus_token_ids: [B, 1] int32 or int64, emitted where all of a request's tokens were accepted.
        sampling_metadata: has ``temperature [B]`` (0 is greedy, and what is below; None if ``all_greedy``),
            ``all_greedy`` and ``generators``, a dict from request to torch.Generator. A request with drafted tokens and
            a generator takes its coins from it, one more than it has tokens; others from torch's own.
        use_fp64_gumbel: not read: sums are float64 always.
        impl: of ``accept_chain``.
        synthetic_mode, synthetic_conditional_rates, fly_window_size: refused unless off; fly_entropy_threshold and
            fly_entropy_top_k belong to the last.

    Returns:
        [B, max_spec_len + 1] int32: the accepted tokens, then the recovered or the bonus one, then -1. After a target
        row without a distribution there is no token more.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape. NotImplementedError: see above, and ``impl``.

    The logits and probabilities are copied, once: requests get one row more, for the token after the last drafted one.
    """
    op, device = "rejection_sample_v1", target_logits.device
    _refuse(
        op,
        synthetic_mode=synthetic_mode,
        synthetic_conditional_rates=synthetic_conditional_rates is not None,
        fly_window_size=fly_window_size is not None,
    )
    num_tokens, batch = draft_token_ids.shape[0], len(num_draft_tokens)
    check_tensor(op, "draft_token_ids", draft_token_ids, [num_tokens], INDEX_DTYPES, device)
    check_tensor(op, "cu_num_draft_tokens", cu_num_draft_tokens, [batch], INDEX_DTYPES, device)
    check_tensor(op, "target_logits", target_logits, [num_tokens, None], LOGIT_DTYPES, device)
    check_tensor(op, "bonus_token_ids", bonus_token_ids, [batch, 1], INDEX_DTYPES, device)
    if draft_probs is not None:
        check_tensor(op, "draft_probs", draft_probs, list(target_logits.shape), LOGIT_DTYPES, device)
    row_start = torch.nn.functional.pad(cu_num_draft_tokens.long(), (1, 0)) + torch.arange(batch + 1, device=device)
    token = torch.arange(num_tokens, device=device)
    rows = token + torch.searchsorted(cu_num_draft_tokens, token.to(cu_num_draft_tokens.dtype), right=True)
    tokens = draft_token_ids.new_full((num_tokens + batch,), -1, dtype=torch.int64)
    tokens[rows + 1] = draft_token_ids.long()

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(num_tokens + batch, values.shape[1]).index_copy(0, rows, values)

    greedy = sampling_metadata.all_greedy
    temperature = sampling_metadata.temperature
    verdict = accept_chain(
        tokens,
        spread(target_logits),
        _coins(num_draft_tokens, {} if greedy else sampling_metadata.generators, device),
        row_start,
        temperature=torch.zeros(batch, device=device) if greedy else (temperature > 0).float(),
        draft_logits=None if draft_probs is None or greedy else spread(draft_probs.log()),
        impl=impl,
        check=False,
    )
    all_accepted = verdict.num_accepted == row_start.diff() - 1
    next_token = torch.where(all_accepted, bonus_token_ids.squeeze(1).int(), verdict.next_token)
    return _emitted(tokens, row_start, verdict._replace(next_token=next_token), max_spec_len + 1).int()


def _coins(num_draft_tokens: List[int], generators: Any, device: torch.device) -> torch.Tensor:
    """[n + B] float64: per request one for the token after the draft and one for each drafted token."""
    coins = torch.rand(sum(num_draft_tokens) + len(num_draft_tokens), dtype=torch.float64, device=device)
    first = 0
    for request, count in enumerate(num_draft_tokens):
        if count and request in generators:
            coins[first : first + count + 1].uniform_(generator=generators[request])
        first += count + 1
    return coins


def _emitted(tokens: torch.Tensor, row_start: torch.Tensor, verdict: ChainVerdict, width: int) -> torch.Tensor:
    """[B, width] int64: the accepted tokens, the next one, then -1."""
    place = torch.arange(width, device=tokens.device)
    num_accepted = verdict.num_accepted.unsqueeze(1)
    accepted = tokens[(row_start[:-1].unsqueeze(1) + 1 + place).clamp(max=tokens.shape[0] - 1)]
    following = torch.where(place == num_accepted, verdict.next_token.unsqueeze(1), -1)
    return torch.where(place < num_accepted, accepted, following)


def _refuse(op: str, **asked: bool) -> None:
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"{op}: {name} is not offered: only exact rejection sampling, token by token")
