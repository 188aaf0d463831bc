"""The public functions: check arguments, resolve the implementation, call the op."""

from math import isfinite
from typing import Optional

import torch

from ..checks import INDEX_DTYPES, LOGIT_DTYPES, check_row_start, check_tensor, implementations, resolve_impl
from ..status import FATAL, raise_for_status
from . import op
from .structs import ChainVerdict, Gate, GateVerdict, Stats

REAL_DTYPES = (torch.float32, torch.float64)


def acceptance_stats(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: torch.Tensor,
    alpha: float = 0.5,
    beta: float = 0.3,
    undershoot: bool = False,
    impl: str = "auto",
    check: bool = True,
) -> Stats:
    """Divergences, log-probabilities and entropies of a draft row p and a target row q, in one fused op.

    Per row, with p = softmax(draft / T), q = softmax(target / T), v the row's token::

        kl_draft_target = KL(p || q)      kl_target_draft = KL(q || p)      tv = 1/2 sum |p - q|
        rkl = sum p * relu(log(1 - alpha) + log p - log q) + sum q * relu(log(beta) + log p - log q)
        ratio = q(v) / max q

    ``rkl`` is VIA-SD's cost R^KL_{alpha,beta}(q || p), arXiv:2606.12243, as reported in public notes (the sign inside
    its second term is not confirmed: ``undershoot=True`` takes log q - log p there).

    Args:
        draft_logits: [R, Vd] float32, float16, bfloat16 or float64, before temperature, masks as -inf; Vd <= V, ids
            from Vd on have p = 0.
        target_logits: [R, V], likewise; last dimension contiguous, any outer stride.
        tokens: [R] int32 or int64; tokens[r] is judged under row r itself. -1: no token, ``ratio``, ``draft_logprob``
            and ``target_logprob`` are NaN there.
        temperature: [R] float32 or float64, >= 0; 0 counts as 1.
        alpha: 0 <= alpha < 1. beta: > 0.
        undershoot: the other sign in the second term of ``rkl``.
        impl: "auto", "reference", "triton" or "native"; only "auto" falls back.
        check: verify ids and temperatures (synchronises). Without it an id outside [-1, V) counts as -1.

    Returns:
        ``Stats`` of [R] float32 (float64 for float64 logits; logarithms in nats), ``target_argmax`` int32. NaN where a
        needed row holds NaN or +inf or is all -inf; ``target_argmax`` is -1 there.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value. NotImplementedError: ``impl``.

    Numerics: accumulation in float32 (float64 for float64 logits); rounding can leave a divergence of equal rows a few
    1e-7 below 0. 0 * log 0 = 0; p > 0 where q is masked gives +inf. Ties of the argmax go to the lower id. Not
    differentiable.
    """
    name = "acceptance_stats"
    device = _check_logits(name, "target_logits", target_logits, draft_logits)
    rows, vocabulary = target_logits.shape
    check_tensor(name, "tokens", tokens, (rows,), INDEX_DTYPES, device)
    check_tensor(name, "temperature", temperature, (rows,), REAL_DTYPES, device)
    if not 0 <= alpha < 1:
        raise ValueError(f"{name}: alpha must be in [0, 1), got {alpha}")
    if not (beta > 0 and isfinite(beta)):
        raise ValueError(f"{name}: beta must be finite and > 0, got {beta}")
    impl = _resolve(name, impl, draft_logits, target_logits)
    if check:
        _check_temperature(name, temperature)
        outside = ((tokens < -1) | (tokens >= vocabulary)).nonzero()
        if outside.numel():
            row = int(outside[0])
            raise ValueError(f"{name}: tokens must be in [-1, {vocabulary}), got {int(tokens[row])} in row {row}")
    return op.unpack_stats(
        *op.acceptance_stats(draft_logits, target_logits, tokens, temperature, alpha, beta, undershoot, impl)
    )


def accept_chain(
    row_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    *,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor] = None,
    impl: str = "auto",
    check: bool = True,
) -> ChainVerdict:
    """Lossless verification of drafted chains, straight from logits: what is emitted is distributed as the target.

    Speculative sampling (arXiv:2211.17192, arXiv:2302.01318). Drafted row r with token x is accepted iff all before it
    were and ``uniforms[r] * p(x) < q(x)``, with p and q the draft and target rows r - 1, that is with probability
    min(1, q(x) / p(x)). At the first rejection ``next_token ~ norm(max(0, q - p))``; without one it is the bonus,
    drawn from the last target row of the block. Both are drawn with the root row's coin. At temperature 0 x is
    accepted iff it is the target's argmax; draft rows and coins are not read.

    **The proposal must be the distribution that the tokens were actually sampled from**: the drafter's logits after
    its own top-k, top-p and masks (as -inf) and, divided by the sequence's temperature in here, at that temperature.
    Any other biases the output. A greedy or otherwise deterministic drafter passes ``draft_logits=None``.

    Args:
        row_tokens: [R] int32 or int64, all sequences' rows one after another. A sequence's first row is its root
            (whose id is not read), the others are drafted; -1 ends the block, whatever follows.
        target_logits: [R, V] float32, float16, bfloat16 or float64, before temperature, masks as -inf; row r is the
            distribution after row r's token. Last dimension contiguous, any outer stride.
        uniforms: [R] float64 in [0, 1), independent of each other and of how the tokens were drawn.
        row_start: [B+1] int64, from 0 to R; a sequence may have one row or none.
        temperature: [B] float32 or float64, >= 0.
        draft_logits: [R, Vd] like the target's, Vd <= V (ids from Vd on have p = 0); row r is the proposal from which
            row r + 1 was drawn. None: p is one-hot on the drafted token.
        impl: "auto", "reference", "triton" or "native"; only "auto" falls back.
        check: verify row_start and temperatures and raise for fatal findings (synchronises).

    Returns:
        ``ChainVerdict(num_accepted, next_token, status)``, [B] int32. ``num_accepted`` does not count the final token.
        ``next_token`` is -1 for a sequence without rows and after a fatal finding; what was accepted before stays.
        ``status``: fatal bits (NaN, +inf or all -inf in a target row, an id < -1 or >= V) and informational ones (an
        unusable draft row or p(x) = 0: rejected, token from the target row; an empty residual: likewise). Only rows
        that the walk reaches are looked at; of a row's findings the first fatal one is reported.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value. With ``check``, ValueError for a
        fatal finding. NotImplementedError: ``impl``.

    Numerics: p, q and the residual in float32 (float64 when any logits are float64), the comparison and the running
    sums in float64; temperature divides (logits - row maximum). Ties go to the lower id; a masked token is never
    emitted, at any coin. Not differentiable.
    """
    name = "accept_chain"
    device = _check_logits(name, "target_logits", target_logits, draft_logits)
    _check_rows(name, row_tokens, uniforms, row_start, temperature, target_logits.shape[0], device)
    impl = _resolve(name, impl, draft_logits, target_logits, cuda=True)
    if check:
        check_row_start(name, row_start, target_logits.shape[0])
        _check_temperature(name, temperature)
    verdict = ChainVerdict(
        *op.accept_chain(row_tokens, target_logits, uniforms, row_start, temperature, draft_logits, impl)
    )
    if check:
        raise_for_status(name, verdict.status, FATAL)
    return verdict


def gate_tiers(
    row_tokens: torch.Tensor,
    slim_logits: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    *,
    gate: Gate,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor] = None,
    impl: str = "auto",
    check: bool = True,
) -> GateVerdict:
    """VIA-SD's tiered rule: keep a drafted token, let the slim tier draw it again, or escalate to the full model.

    Each drafted row v is judged by the gate's statistic of slim row q' and draft row p before it, on the logits as
    given (masks included) at temperature 1, arXiv:2606.12243 as reported in public notes::

        "ratio":     A if q'(v) / max q' >= accept,  C if < escalate,  else B
        "tv", "kl":  A if TV(p, q') or KL(p || q') <= accept,  C if > escalate,  else B

    A keeps the token. B draws from the slim row, at the sequence's temperature with the drafted row's coin (argmax at
    temperature 0); the walk goes on if the draw equals the drafted token, else ends with the draw. C emits nothing,
    sets ``escalate`` and ends the walk; q'(v) = 0 is C under every criterion. When the whole block (up to the first
    -1) was kept, one more token comes from its last slim row by the root row's coin, ungated. The output is an
    approximation of the full model's; ``accept_chain`` is the exact rule.

    Args:
        row_tokens: [R] int32 or int64: per sequence a root (whose id is not read), then drafted rows; -1 ends the
            block, whatever follows.
        slim_logits: [R, V] float32, float16, bfloat16 or float64, before temperature, masks as -inf; row r is the
            distribution after row r's token. Last dimension contiguous, any outer stride.
        uniforms: [R] float64 in [0, 1).
        row_start: [B+1] int64, from 0 to R; a sequence may have one row or none.
        gate: the criterion and its thresholds per sequence (nats for "kl").
        temperature: [B] float32 or float64, >= 0.
        draft_logits: [R, Vd], Vd <= V: the proposals, row r that of row r + 1. "tv" and "kl" need them; under "ratio"
            they only serve ``stats``.
        impl: "auto", "reference", "triton" or "native"; only "auto" falls back.
        check: verify row_start and temperatures and raise for fatal findings (synchronises).

    Returns:
        ``GateVerdict``: ``tokens[r]`` [R] int32 is the token emitted after row r (-1: none), ``regions[r]`` [R] int8
        the ``Region`` of drafted row r, ``num_emitted`` [B] int32, ``escalate`` [B] bool, ``status`` [B] int32 and
        ``stats``, per slim row. Fatal findings (NaN, +inf or all -inf in a slim row that the walk reaches, the bonus
        row included; an id < -1 or >= V) count as C; so does, informationally, an unusable draft row under "tv" and
        "kl".

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value; no draft logits for "tv" or
        "kl". With ``check``, ValueError for a fatal finding. NotImplementedError: ``impl``.

    Numerics: as ``acceptance_stats`` and ``accept_chain``; thresholds are rounded to the statistics' dtype. Ties go to
    the lower id; a masked token is never emitted, at any coin. Not differentiable.
    """
    name = "gate_tiers"
    device = _check_logits(name, "slim_logits", slim_logits, draft_logits)
    _check_rows(name, row_tokens, uniforms, row_start, temperature, slim_logits.shape[0], device)
    if not isinstance(gate, Gate):
        raise TypeError(f"{name}: gate must be a Gate, got {type(gate).__name__}")
    for threshold, values in (("gate.accept", gate.accept), ("gate.escalate", gate.escalate)):
        check_tensor(name, threshold, values, temperature.shape, REAL_DTYPES, device)
    if gate.criterion != "ratio" and draft_logits is None:
        raise ValueError(f"{name}: draft_logits must be given for the criterion {gate.criterion!r}, got None")
    impl = _resolve(name, impl, draft_logits, slim_logits)
    if check:
        check_row_start(name, row_start, slim_logits.shape[0])
        _check_temperature(name, temperature)
    tokens, regions, num_emitted, escalate, status, packed, argmax = op.gate_tiers(
        row_tokens,
        slim_logits,
        uniforms,
        row_start,
        gate.criterion,
        gate.accept,
        gate.escalate,
        temperature,
        draft_logits,
        impl,
    )
    if check:
        raise_for_status(name, status, FATAL)
    return GateVerdict(tokens, regions, num_emitted, escalate, status, op.unpack_stats(packed, argmax))


def _check_logits(name: str, argument: str, logits: torch.Tensor, draft_logits: Optional[torch.Tensor]) -> torch.device:
    """Check the logits and return their device, on which everything else must be."""
    check_tensor(name, argument, logits, (None, None), LOGIT_DTYPES, getattr(logits, "device", torch.device("cpu")))
    rows, vocabulary = logits.shape
    if not vocabulary:
        raise ValueError(f"{name}: {argument} must have a vocabulary of 1 or more, got shape {list(logits.shape)}")
    if draft_logits is not None:
        check_tensor(name, "draft_logits", draft_logits, (rows, None), LOGIT_DTYPES, logits.device)
        if not 1 <= draft_logits.shape[1] <= vocabulary:
            raise ValueError(
                f"{name}: draft_logits must have between 1 and {vocabulary} columns, the vocabulary of {argument}, "
                f"got shape {list(draft_logits.shape)}"
            )
    return logits.device


def _check_rows(
    name: str,
    row_tokens: torch.Tensor,
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    temperature: torch.Tensor,
    num_rows: int,
    device: torch.device,
) -> None:
    check_tensor(name, "row_tokens", row_tokens, (num_rows,), INDEX_DTYPES, device)
    check_tensor(name, "uniforms", uniforms, (num_rows,), (torch.float64,), device)
    check_tensor(name, "row_start", row_start, (None,), (torch.int64,), device)
    if not row_start.numel():
        raise ValueError(f"{name}: row_start must have one entry more than there are sequences, got shape [0]")
    check_tensor(name, "temperature", temperature, (row_start.shape[0] - 1,), REAL_DTYPES, device)


def _resolve(name: str, impl: str, *logits: Optional[torch.Tensor], cuda: bool = False) -> str:
    narrow = all(tensor is None or tensor.dtype != torch.float64 for tensor in logits)
    device = next(tensor.device for tensor in logits if tensor is not None)
    return resolve_impl(name, impl, device, implementations(device, triton_dtype=narrow, cuda_dtype=cuda and narrow))


def _check_temperature(name: str, temperature: torch.Tensor) -> None:
    """Synchronises."""
    bad = (~((temperature >= 0) & temperature.isfinite())).nonzero()
    if bad.numel():
        first = int(bad[0])
        raise ValueError(f"{name}: temperature must be finite and >= 0, got {float(temperature[first])} at {first}")
