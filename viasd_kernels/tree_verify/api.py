"""The public tree ops: check the arguments, choose an implementation, call it."""

from typing import Optional

import torch

from ..checks import (
    INDEX_DTYPES,
    LOGIT_DTYPES,
    PANEL_DTYPES,
    check_row_start,
    check_tensor,
    implementations,
    resolve_impl,
)
from ..status import FATAL, Status, raise_for_status
from .op import build_tree_op, compact_kv_op, tree_attention_op, verify_tree_op
from .structs import PROPOSALS, Tree, TreeVerdict


def build_tree(
    parents: torch.Tensor, row_start: torch.Tensor, *, max_rows: int, impl: str = "auto", check: bool = True
) -> Tree:
    """Turn each row's parent into the links and ancestor bits that the other tree ops read.

    depth(root) = 0, depth(r) = depth(parent(r)) + 1; ancestors(r) = ancestors(parent(r)) with the parent added.
    Siblings are linked in row order, which must be the order in which they were drawn. ``first_child`` and
    ``next_sibling`` are the arrays SGLang calls ``retrive_next_token`` and ``retrive_next_sibling``. A row that does
    not come after its parent (orphans, cycles, forward references), a row past ``max_rows`` and all descendants of
    such rows are pruned: depth -1, no links, no ancestors.

    Args:
        parents: [R] int32 or int64, the parent's number within its own sequence; 0 is the sequence's first row, the
            root, whose own entry is -1.
        row_start: [B+1] int32 or int64: sequence b has the rows row_start[b] to row_start[b+1].
        max_rows: the most rows a sequence may have; W = ceil(max_rows / 64).
        impl: "auto", "reference", "native" (C++ on CPUs, CUDA C++ on NVIDIA GPUs) or "triton".
        check: whether to raise for pruned rows and wrong ``row_start`` (synchronises).

    Returns:
        Tree(ancestors [R, W] int64 bit words, depth [R] int32, first_child [R] int32, next_sibling [R] int32), local
        row numbers, -1 for none.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape; with ``check`` also a row that would be pruned,
            a root whose parent is not -1, a sequence longer than ``max_rows``.

    Integers only: exact, and not differentiable.
    """
    op = "build_tree"
    check_tensor(op, "parents", parents, [None], INDEX_DTYPES, parents.device)
    check_tensor(op, "row_start", row_start, [None], INDEX_DTYPES, parents.device)
    if max_rows < 1:
        raise ValueError(f"{op}: max_rows must be >= 1, got {max_rows}")
    if check:
        check_row_start(op, row_start, parents.shape[0])
    available = implementations(parents.device, triton_dtype=True, cuda_dtype=True)
    tree = Tree(*build_tree_op(parents, row_start, max_rows, resolve_impl(op, impl, parents.device, available)))
    if check:
        _raise_for_parents(op, parents, row_start, tree.depth, max_rows)
    return tree


def _raise_for_parents(
    op: str, parents: torch.Tensor, row_start: torch.Tensor, depth: torch.Tensor, max_rows: int
) -> None:
    longest = int(row_start.diff().max()) if row_start.shape[0] > 1 else 0
    if longest > max_rows:
        raise ValueError(f"{op}: sequences must have at most max_rows = {max_rows} rows, got {longest}")
    roots = row_start[:-1][row_start.diff() > 0].long()
    if bool((parents[roots] != -1).any()):
        raise ValueError(f"{op}: the parent of a sequence's first row must be -1, got {parents[roots].tolist()}")
    pruned = (depth < 0).nonzero()
    if pruned.numel():
        row = int(pruned[0])  # the first one is at fault itself; others may only descend from it
        sequence = int((row_start <= row).sum()) - 1
        local = row - int(row_start[sequence])
        raise ValueError(
            f"{op}: the parent of row {local} of sequence {sequence} must be in [0, {local}), got {int(parents[row])}"
        )


def tree_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    row_start: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    scale: float,
    soft_cap: Optional[float] = None,
    window: Optional[int] = None,
    impl: str = "auto",
    check: bool = True,
) -> torch.Tensor:
    """Attend from every tree row to its sequence's context, its ancestors and itself.

    out(r) = sum_j softmax_j(cap(scale * q(r) . k(j))) v(j) over the visible j, with cap(s) = soft_cap * tanh(s /
    soft_cap). Query head h reads key head h // (H / H_kv). The mask is that of tree attention in SpecInfer (Miao et
    al., 2023).

    Args:
        q: [R, H, Dh] float32, float16, bfloat16 or float64.
        k_pool: [num_slots, H_kv, Dh], same dtype; the rows' own keys are already in it.
        v_pool: [num_slots, H_kv, Dh], same dtype.
        slots: [B, max_len] int32 or int64: where sequence b's keys lie: first its context in order of position, then
            its rows in row order. Entries past both are not read.
        context_len: [B] int32 or int64, positions before the sequence's first row.
        row_start: [B+1] int32 or int64.
        ancestors: [R, W] int64 bit words from ``build_tree``. A pruned row sees its context and itself.
        scale: factor of the scores, usually Dh ** -0.5.
        soft_cap: scores are squashed to (-soft_cap, soft_cap); None leaves them.
        window: a row at position p sees positions above p - window; row r is at context_len + depth(r). None: all.
        impl: "auto", "reference", "native" (CPU, float32 and bfloat16) or "triton" (all but float64).
        check: whether to raise for wrong ``row_start``, ``context_len`` and slots (synchronises).

    Returns:
        [R, H, Dh], dtype of ``q``.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape or range.
        NotImplementedError: an implementation that does not exist on this device.

    Accumulates in float32 (float64 for float64). Not differentiable.
    """
    op = "tree_attention"
    device = q.device
    check_tensor(op, "q", q, [None, None, None], LOGIT_DTYPES, device)
    num_rows, num_heads, head_dim = q.shape
    check_tensor(op, "k_pool", k_pool, [None, None, head_dim], [q.dtype], device)
    check_tensor(op, "v_pool", v_pool, list(k_pool.shape), [q.dtype], device)
    check_tensor(op, "slots", slots, [None, None], INDEX_DTYPES, device)
    check_tensor(op, "context_len", context_len, [slots.shape[0]], INDEX_DTYPES, device)
    check_tensor(op, "row_start", row_start, [slots.shape[0] + 1], INDEX_DTYPES, device)
    check_tensor(op, "ancestors", ancestors, [num_rows, None], [torch.int64], device)
    if k_pool.shape[1] < 1 or num_heads % k_pool.shape[1]:
        raise ValueError(f"{op}: k_pool must have a number of heads that divides {num_heads}, got {k_pool.shape[1]}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{op}: soft_cap must be above 0 or None, got {soft_cap}")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be >= 1 or None, got {window}")
    available = implementations(device, q.dtype in PANEL_DTYPES, triton_dtype=q.dtype != torch.float64)
    chosen = resolve_impl(op, impl, device, available)
    if check:
        check_row_start(op, row_start, num_rows)
        _check_slots(op, slots, context_len, row_start, ancestors, k_pool.shape[0])
    return tree_attention_op(
        q, k_pool, v_pool, slots, context_len, row_start, ancestors, scale, soft_cap, window, chosen
    )


def _check_slots(
    op: str,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    row_start: torch.Tensor,
    ancestors: torch.Tensor,
    num_slots: int,
) -> None:
    num_rows, lengths = row_start.diff(), context_len + row_start.diff()
    if bool((num_rows > ancestors.shape[1] * 64).any()):
        raise ValueError(
            f"{op}: ancestors must have a bit for each of {int(num_rows.max())} rows, got {ancestors.shape[1]} words"
        )
    if bool((context_len < 0).any()) or bool((lengths > slots.shape[1]).any()):
        raise ValueError(
            f"{op}: context_len must be >= 0 and, with the sequence's rows, at most max_len = {slots.shape[1]}; got "
            f"{context_len.tolist()} with {num_rows.tolist()} rows"
        )
    used = torch.arange(slots.shape[1], device=slots.device) < lengths.unsqueeze(1)
    wrong = slots[used & ((slots < 0) | (slots >= num_slots))]
    if wrong.numel():
        raise ValueError(f"{op}: slots must be in [0, {num_slots}), got {int(wrong[0])}")


def verify_tree(
    tree: Tree,
    row_tokens: torch.Tensor,
    full_logits: Optional[torch.Tensor],
    uniforms: torch.Tensor,
    row_start: torch.Tensor,
    *,
    temperature: torch.Tensor,
    draft_logits: Optional[torch.Tensor] = None,
    proposal: str = "deterministic",
    full_argmax: Optional[torch.Tensor] = None,
    impl: str = "auto",
    check: bool = True,
) -> TreeVerdict:
    """Accept the longest prefix of a drafted tree that keeps the output exactly the full model's.

    At a node with target r = softmax(full_logits / temperature) and proposal d = softmax(draft_logits / temperature),
    each child c is judged in turn:

    - ``"deterministic"``: accept with probability r(c), else r(c) <- 0 and renormalise. Always exact, and the only
      rule for a tree that was chosen, cut, re-sorted or grown by looking at its own tokens' probabilities.
    - ``"without_replacement"``: accept with probability min(1, r(c) / d(c)), else r <- norm(max(0, r - d)), then
      d(c) <- 0 and renormalise. Exact for children drawn from d in row order, without replacement or independently.
    - ``"with_replacement"``: the same, but d stays. Exact for children drawn independently from d only.

    An accepted child is the next node; when none is, ``next_token`` ~ r. Sources: recursive rejection sampling (Jeon
    et al., 2024) and SpecInfer (Miao et al., 2023). d must be the distribution that was really sampled from, after
    any top-k or top-p of the drafter. A child with d(c) = 0 is rejected and changes nothing. An unused or pruned row
    may not stand for a drawn ``"without_replacement"`` child that has later siblings: cut siblings from the end.

    At temperature 0 the walk goes to the lowest-numbered child equal to the target's argmax; coins and draft logits
    are not read.

    Args:
        tree: from ``build_tree``; its ancestors are not read.
        row_tokens: [R] int32 or int64. -1 marks an unused row: never followed, nor is what descends from it. The
            root's own entry is not read.
        full_logits: [R, V] float32, float16, bfloat16 or float64, before temperature: row r is the distribution after
            row r's token. May be None with ``full_argmax`` if all temperatures are 0.
        uniforms: [R] float64 in [0, 1): a drafted row's coin decides its acceptance, the root's draws ``next_token``.
        row_start: [B+1] int32 or int64.
        temperature: [B] float32 or float64, finite and >= 0; 0 is greedy.
        draft_logits: [R, Vd] with Vd <= V, before temperature: row r is the proposal its children were drawn from.
            Ids >= Vd have d = 0. Needed by the last two rules, refused by the first.
        proposal: "deterministic", "without_replacement" or "with_replacement".
        full_argmax: [R] int32 or int64: the target's argmax per row; greedy sequences then read no logits.
        impl: "auto", "reference", "native" (C++ on CPUs, CUDA C++ on NVIDIA GPUs; no float64 logits there) or "triton"
            (no float64 logits).
        check: whether to raise for wrong values and for a status that is fatal or TREE_PRUNED (synchronises).

    Returns:
        TreeVerdict(path [R] int32, num_accepted [B] int32, next_token [B] int32, status [B] int32). At row_start[b] +
        j, path holds 0 (the root), then the accepted rows in order, then -1. ``next_token`` is -1 after a fatal status
        and for a sequence without rows.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape or range; a status, see ``check``.

    Status: fatal are TARGET_NOT_FINITE and TARGET_EMPTY for a row on the accepted path, and TOKEN_OUT_OF_RANGE for a
    ``full_argmax`` on it outside [0, V); a sampled sequence without ``full_logits`` has TARGET_EMPTY. TREE_PRUNED: a
    row with a token that the tree does not hold or that is outside [-1, V), anywhere in the sequence. Informational:
    DRAFT_INVALID, DRAFT_ZERO, RESIDUAL_EMPTY. -inf logits are masked tokens and never emitted.

    Probabilities are float32 (float64 when any logits are float64), sums float64; ties go to the lower id. Not
    differentiable.
    """
    op = "verify_tree"
    device = row_tokens.device
    check_tensor(op, "row_tokens", row_tokens, [None], INDEX_DTYPES, device)
    check_tensor(op, "row_start", row_start, [None], INDEX_DTYPES, device)
    num_rows, num_sequences = row_tokens.shape[0], row_start.shape[0] - 1
    for name in ("depth", "first_child", "next_sibling"):
        check_tensor(op, f"tree.{name}", getattr(tree, name), [num_rows], [torch.int32], device)
    check_tensor(op, "uniforms", uniforms, [num_rows], [torch.float64], device)
    check_tensor(op, "temperature", temperature, [num_sequences], [torch.float32, torch.float64], device)
    if full_argmax is not None:
        check_tensor(op, "full_argmax", full_argmax, [num_rows], INDEX_DTYPES, device)
    _check_logits(op, full_logits, draft_logits, full_argmax, proposal, num_rows, device)
    narrow = all(own is None or own.dtype != torch.float64 for own in (full_logits, draft_logits))
    chosen = resolve_impl(op, impl, device, implementations(device, triton_dtype=narrow, cuda_dtype=narrow))
    if check:
        check_row_start(op, row_start, num_rows)
        _check_values(op, uniforms, temperature, full_logits)
    verdict = TreeVerdict(
        *verify_tree_op(
            tree.depth,
            tree.first_child,
            tree.next_sibling,
            row_tokens,
            full_logits,
            uniforms,
            row_start,
            temperature,
            draft_logits,
            proposal,
            full_argmax,
            chosen,
        )
    )
    if check:
        raise_for_status(op, verdict.status, FATAL | Status.TREE_PRUNED)
    return verdict


def _check_logits(
    op: str,
    full_logits: Optional[torch.Tensor],
    draft_logits: Optional[torch.Tensor],
    full_argmax: Optional[torch.Tensor],
    proposal: str,
    num_rows: int,
    device: torch.device,
) -> None:
    if proposal not in PROPOSALS:
        raise ValueError(f"{op}: proposal must be one of {', '.join(map(repr, PROPOSALS))}, got {proposal!r}")
    if full_logits is not None:
        check_tensor(op, "full_logits", full_logits, [num_rows, None], LOGIT_DTYPES, device)
        if not 1 <= full_logits.shape[1] < 2**31:
            raise ValueError(f"{op}: full_logits must have 1 to 2**31 - 1 columns, got {full_logits.shape[1]}")
    elif full_argmax is None:
        raise ValueError(f"{op}: full_logits may be None only if full_argmax is given")
    if draft_logits is None:
        if proposal != "deterministic" and full_logits is not None:
            raise ValueError(f"{op}: proposal={proposal!r} needs draft_logits, got None")
        return
    if proposal == "deterministic":
        raise ValueError(f"{op}: draft_logits must be None with proposal='deterministic', which does not use them")
    check_tensor(op, "draft_logits", draft_logits, [num_rows, None], LOGIT_DTYPES, device)
    if full_logits is not None and not 1 <= draft_logits.shape[1] <= full_logits.shape[1]:
        raise ValueError(
            f"{op}: draft_logits must have 1 to V = {full_logits.shape[1]} columns, got {draft_logits.shape[1]}"
        )


def _check_values(
    op: str, uniforms: torch.Tensor, temperature: torch.Tensor, full_logits: Optional[torch.Tensor]
) -> None:
    if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError(f"{op}: uniforms must be in [0, 1)")
    if not bool(((temperature >= 0) & temperature.isfinite()).all()):
        raise ValueError(f"{op}: temperature must be finite and >= 0, got {temperature.tolist()}")
    if full_logits is None and bool((temperature > 0).any()):
        raise ValueError(f"{op}: full_logits may be None only at temperature 0, got {temperature.tolist()}")


def compact_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    row_start: torch.Tensor,
    start: torch.Tensor,
    *,
    impl: str = "auto",
    check: bool = True,
) -> None:
    """Move the accepted rows' keys and values together, in place, for engines with contiguous caches.

    cache[b, start[b] + j] <- cache[b, start[b] + path[row_start[b] + j]] for j = 0 .. num_accepted[b]. Moves may
    overlap. Everything else in the caches stays.

    Args:
        k: [B, S, H_kv, Dh], any dtype, last dimension contiguous; changed in place.
        v: [B, S, H_kv, Dh], changed in place.
        path: [R] int32 or int64, from ``verify_tree``.
        num_accepted: [B] int32 or int64, from ``verify_tree``.
        row_start: [B+1] int32 or int64.
        start: [B] int32 or int64, the position in the cache of each sequence's first row.
        impl: "auto", "reference", "native" (C++ on CPUs, CUDA C++ on NVIDIA GPUs) or "triton".
        check: whether to raise for values that lead outside a sequence's rows or the cache (synchronises). Nothing is
            ever moved that is not the sequence's: without the check "native" raises on CPUs, and kernels on GPUs leave
            alone the sequences with such moves.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape or range.
        NotImplementedError: an implementation that does not exist on this device.

    Copies bits. Not differentiable.
    """
    op = "compact_kv"
    check_tensor(op, "k", k, [None, None, None, None], [k.dtype], k.device)
    check_tensor(op, "v", v, list(k.shape), [k.dtype], k.device)
    check_tensor(op, "path", path, [None], INDEX_DTYPES, k.device)
    check_tensor(op, "num_accepted", num_accepted, [k.shape[0]], INDEX_DTYPES, k.device)
    check_tensor(op, "row_start", row_start, [k.shape[0] + 1], INDEX_DTYPES, k.device)
    check_tensor(op, "start", start, [k.shape[0]], INDEX_DTYPES, k.device)
    chosen = resolve_impl(op, impl, k.device, implementations(k.device, triton_dtype=True, cuda_dtype=True))
    if check:
        check_row_start(op, row_start, path.shape[0])
        _check_moves(op, path, num_accepted, row_start, start, k.shape[1])
    compact_kv_op(k, v, path, num_accepted, row_start, start, chosen)


def _check_moves(
    op: str,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    row_start: torch.Tensor,
    start: torch.Tensor,
    cache_len: int,
) -> None:
    num_rows = row_start.diff()
    if bool((start < 0).any()) or bool((start + num_rows > cache_len).any()):
        raise ValueError(
            f"{op}: start must be >= 0 and, with the sequence's rows, at most S = {cache_len}; got {start.tolist()} "
            f"with {num_rows.tolist()} rows"
        )
    if bool(((num_accepted < 0) | (num_accepted >= num_rows.clamp(min=1))).any()):
        raise ValueError(f"{op}: num_accepted must be in [0, rows of the sequence), got {num_accepted.tolist()}")
    sequence = torch.repeat_interleave(num_rows)
    place = torch.arange(path.shape[0], device=path.device) - row_start[sequence]
    moved = place <= num_accepted[sequence]
    wrong = path[moved & ((path < 0) | (path >= num_rows[sequence]))]
    if wrong.numel():
        raise ValueError(f"{op}: path must name rows of its sequence, got {int(wrong[0])}")
