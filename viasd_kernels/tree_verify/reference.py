"""The tree ops in plain PyTorch: the specification, on any device, in float64 too."""

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch

from ..sampling import draw_from_weights
from ..status import Status
from .structs import Tree, TreeVerdict


def build_tree(parents: torch.Tensor, row_start: torch.Tensor, *, max_rows: int) -> Tree:
    """Depth, links and ancestor bits of every row; rows whose parent does not precede them are pruned."""
    num_words = (max_rows + 63) // 64
    words: List[List[int]] = []
    depth: List[int] = []
    first_child: List[int] = []
    next_sibling: List[int] = []
    starts, all_parents = row_start.tolist(), parents.tolist()
    for begin, end in _spans(starts):
        last_child: Dict[int, int] = {}
        for row in range(end - begin):
            first_child.append(-1)
            next_sibling.append(-1)
            parent = all_parents[begin + row]
            if row == 0:
                depth.append(0)
                words.append([0] * num_words)
            elif row < max_rows and 0 <= parent < row and depth[begin + parent] >= 0:
                depth.append(depth[begin + parent] + 1)
                words.append(list(words[begin + parent]))
                words[-1][parent // 64] |= 1 << (parent % 64)
                if parent in last_child:
                    next_sibling[begin + last_child[parent]] = row
                else:
                    first_child[begin + parent] = row
                last_child[parent] = row
            else:
                depth.append(-1)
                words.append([0] * num_words)
    signed = [[word - (1 << 64) if word >> 63 else word for word in row] for row in words]
    ancestors = torch.tensor(signed, dtype=torch.int64, device=parents.device).reshape(len(words), num_words)
    return Tree(
        ancestors,
        torch.tensor(depth, dtype=torch.int32, device=parents.device),
        torch.tensor(first_child, dtype=torch.int32, device=parents.device),
        torch.tensor(next_sibling, dtype=torch.int32, device=parents.device),
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
) -> torch.Tensor:
    """Attention of every row to its sequence's context, its ancestors and itself."""
    out = torch.empty_like(q)
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k_pool.shape[1]
    contexts = context_len.tolist()
    for sequence, (begin, end) in enumerate(_spans(row_start.tolist())):
        num_rows, context = end - begin, contexts[sequence]
        used = slots[sequence, : context + num_rows].long()
        keys = k_pool[used].to(accumulate).repeat_interleave(group, 1)  # [context + rows, H, Dh]
        values = v_pool[used].to(accumulate).repeat_interleave(group, 1)
        visible = visible_keys(ancestors[begin:end], context, window)
        scores = torch.einsum("rhd,khd->hrk", q[begin:end].to(accumulate), keys) * scale
        weights = soft_capped(scores, soft_cap).masked_fill(~visible, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hrk,khd->rhd", weights, values).to(q.dtype)
    return out


def visible_keys(ancestors: torch.Tensor, context: int, window: Optional[int]) -> torch.Tensor:
    """[rows, context + rows] bool: what each row of one sequence sees of its context and its rows, itself included."""
    num_rows, device = ancestors.shape[0], ancestors.device
    is_ancestor = unpack_bits(ancestors, num_rows)  # [rows, rows]
    depth = is_ancestor.sum(1)
    in_context = torch.ones(num_rows, context, dtype=torch.bool, device=device)
    visible = torch.cat([in_context, is_ancestor | torch.eye(num_rows, dtype=torch.bool, device=device)], 1)
    if window is not None:
        key_position = torch.cat([torch.arange(context, device=device), context + depth])
        visible &= (context + depth).unsqueeze(1) - key_position < window
    return visible


def soft_capped(scores: torch.Tensor, soft_cap: Optional[float]) -> torch.Tensor:
    """Squashed into (-soft_cap, soft_cap); as they are for None."""
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


@dataclass
class _Rows:
    """One sequence's rows; links that do not lead forward are read as none, so that every walk ends."""

    depth: List[int]
    first_child: List[int]
    next_sibling: List[int]
    tokens: List[int]
    vocab: int  # where only the argmax ids are known: what an int32 can hold

    def usable(self, row: int) -> bool:
        return self.depth[row] >= 0 and 0 <= self.tokens[row] < self.vocab

    def children(self, node: int) -> List[int]:
        found, previous, row = [], node, self.first_child[node]
        while previous < row < len(self.tokens):
            if self.usable(row):
                found.append(row)
            previous, row = row, self.next_sibling[row]
        return found

    def inspect(self) -> Status:
        """TREE_PRUNED if a drafted row with a token cannot be followed, or a link leads nowhere."""
        size = len(self.tokens)
        pruned = any(self.tokens[row] != -1 and not self.usable(row) for row in range(1, size))
        broken = any(
            link[row] != -1 and not row < link[row] < size
            for link in (self.first_child, self.next_sibling)
            for row in range(size)
        )
        return Status.TREE_PRUNED if pruned or broken else Status.OK


@dataclass
class _Walk:
    """The accepted rows of one sequence and how its walk ended."""

    path: List[int]
    next_token: int = -1
    status: Status = Status.OK


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
) -> TreeVerdict:
    """Walk each sequence's tree: greedily at temperature 0, else by rejection sampling among the children."""
    path = torch.full_like(row_tokens, -1, dtype=torch.int32)
    num_accepted: List[int] = []
    next_token: List[int] = []
    status: List[int] = []
    read = [] if full_logits is None else [full_logits] + ([] if draft_logits is None else [draft_logits])
    double = any(logits.dtype == torch.float64 for logits in read)
    temperatures = temperature.to(torch.float64 if double else torch.float32)
    for sequence, (begin, end) in enumerate(_spans(row_start.tolist())):
        if begin == end:
            num_accepted.append(0)
            next_token.append(-1)
            status.append(0)
            continue
        span = slice(begin, end)
        rows = _Rows(
            depth=tree.depth[span].tolist(),
            first_child=tree.first_child[span].tolist(),
            next_sibling=tree.next_sibling[span].tolist(),
            tokens=row_tokens[span].tolist(),
            vocab=2**31 if full_logits is None else full_logits.shape[-1],
        )
        full_rows = None if full_logits is None else full_logits[span]
        if not temperatures[sequence] > 0:
            walk = _walk_greedy(rows, full_rows, None if full_argmax is None else full_argmax[span].tolist())
        elif full_rows is None:
            walk = _Walk([0], status=Status.TARGET_EMPTY)
        else:
            draft_rows = None if proposal == "deterministic" or draft_logits is None else draft_logits[span]
            walk = _walk_sampled(rows, full_rows, draft_rows, uniforms[span], temperatures[sequence], proposal)
        path[begin : begin + len(walk.path)] = torch.tensor(walk.path, dtype=torch.int32)
        num_accepted.append(len(walk.path) - 1)
        next_token.append(walk.next_token)
        status.append(int(walk.status | rows.inspect()))
    return TreeVerdict(
        path,
        torch.tensor(num_accepted, dtype=torch.int32, device=path.device),
        torch.tensor(next_token, dtype=torch.int32, device=path.device),
        torch.tensor(status, dtype=torch.int32, device=path.device),
    )


def _walk_greedy(rows: _Rows, full_rows: Optional[torch.Tensor], full_argmax: Optional[List[int]]) -> _Walk:
    walk = _Walk([0])
    while True:
        node = walk.path[-1]
        if full_argmax is not None:
            token = full_argmax[node]
            if not 0 <= token < rows.vocab:
                walk.status |= Status.TOKEN_OUT_OF_RANGE
                return walk
        else:
            assert full_rows is not None
            walk.status |= _fatal_in(full_rows[node])
            if walk.status:
                return walk
            token = int(full_rows[node].argmax())
        child = next((child for child in rows.children(node) if rows.tokens[child] == token), None)
        if child is None:
            walk.next_token = token
            return walk
        walk.path.append(child)


def _walk_sampled(
    rows: _Rows,
    full_rows: torch.Tensor,
    draft_rows: Optional[torch.Tensor],
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    proposal: str,
) -> _Walk:
    walk = _Walk([0])
    coins = uniforms.tolist()
    while True:
        node = walk.path[-1]
        fatal = _fatal_in(full_rows[node])
        if fatal:
            walk.status |= fatal
            return walk
        target = _softmax(full_rows[node], temperature)
        children = rows.children(node)
        if draft_rows is None:
            child, target, found = _judge_deterministic(children, rows.tokens, coins, target)
        elif children and _fatal_in(draft_rows[node]):
            child, found = None, Status.DRAFT_INVALID
        else:
            draft = torch.zeros_like(target)
            if children:
                draft[: draft_rows.shape[-1]] = _softmax(draft_rows[node].to(target.dtype), temperature)
            replaced = proposal == "with_replacement"
            child, target, found = _judge_drawn(children, rows.tokens, coins, target, draft, replaced)
        walk.status |= found
        if child is None:
            walk.next_token = int(draw_from_weights(target, uniforms[0]))
            return walk
        walk.path.append(child)


def _judge_deterministic(
    children: List[int], tokens: List[int], coins: List[float], target: torch.Tensor
) -> Tuple[Optional[int], torch.Tensor, Status]:
    """Accept a child c with probability r(c), else r(c) <- 0 and renormalise."""
    status = Status.OK
    for child in children:
        token = tokens[child]
        if coins[child] < float(target[token]):
            return child, target, status
        residual = target.clone()
        residual[token] = 0
        target, found = _normalise_or_keep(residual, target)
        status |= found
    return None, target, status


def _judge_drawn(
    children: List[int],
    tokens: List[int],
    coins: List[float],
    target: torch.Tensor,
    draft: torch.Tensor,
    replaced: bool,
) -> Tuple[Optional[int], torch.Tensor, Status]:
    """Accept c with probability min(1, r(c) / d(c)), else r <- norm(max(0, r - d)), and d(c) <- 0 if not replaced."""
    status = Status.OK
    proposed = draft > 0
    for child in children:
        token = tokens[child]
        chance = float(draft[token])
        if chance == 0:
            # Emptied by an earlier sibling with the same token, or never the proposal's to draw.
            status |= Status.OK if proposed[token] else Status.DRAFT_ZERO
            continue
        if coins[child] * chance < float(target[token]):
            return child, target, status
        target, found = _normalise_or_keep((target - draft).clamp(min=0), target)
        status |= found
        if not replaced:
            remaining = draft.clone()
            remaining[token] = 0
            draft, _ = _normalise_or_keep(remaining, remaining)
    return None, target, status


def _normalise_or_keep(weights: torch.Tensor, last: torch.Tensor) -> Tuple[torch.Tensor, Status]:
    mass = weights.sum(dtype=torch.float64)
    if mass > 0:
        return weights / mass.to(weights.dtype), Status.OK
    return last, Status.RESIDUAL_EMPTY


def _softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    logits = logits.to(temperature.dtype)
    weights = ((logits - logits.max()) / temperature).exp()
    return weights / weights.sum(dtype=torch.float64).to(weights.dtype)


def _fatal_in(logits: torch.Tensor) -> Status:
    if logits.isnan().any() or logits.isposinf().any():
        return Status.TARGET_NOT_FINITE
    return Status.TARGET_EMPTY if logits.isneginf().all() else Status.OK


def _spans(starts: List[int]) -> List[Tuple[int, int]]:
    return [(starts[i], starts[i + 1]) for i in range(len(starts) - 1)]


def unpack_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[rows, W] int64 words to [rows, num_bits] bool."""
    bits = (words.unsqueeze(-1) >> torch.arange(64, device=words.device)) & 1
    return bits.flatten(1)[:, :num_bits].bool()


def compact_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    row_start: torch.Tensor,
    start: torch.Tensor,
) -> None:
    """Move the accepted rows' keys and values to the front of each sequence's rows, in place."""
    starts, accepted, offsets = row_start.tolist(), num_accepted.tolist(), start.tolist()
    for sequence, (begin, end) in enumerate(_spans(starts)):
        if begin == end:
            continue
        kept = offsets[sequence] + path[begin : begin + accepted[sequence] + 1].long()
        target = slice(offsets[sequence], offsets[sequence] + len(kept))
        for cache in (k, v):
            # Indexing copies first, so the moves may overlap.
            cache[sequence, target] = cache[sequence, kept]
