"""SGLang's tree functions over this package's ops: its arguments, its outputs in place, its coins (0.5.23).

Layout: B requests of N nodes each, node 0 the root, a node's children linked from ``retrive_next_token`` (the first)
through ``retrive_next_sibling``; ``retrive_index[b, i]``, usually b * N + i, is where node i stands in flat arrays.
Links must lead to later nodes, as SGLang's own do; others are read as none. Nothing here synchronises: shapes and
dtypes are checked, values are not, so that a CUDA graph can capture the calls.
"""

from enum import IntEnum
from typing import Tuple

import torch

from ..checks import check_tensor
from ..sampling import draw_from_weights
from ..tree_verify import Tree, build_tree, verify_tree
from ..tree_verify.reference import unpack_bits

SMALLEST_THRESHOLD = 1e-9
LINKS = ("retrive_next_token", "retrive_next_sibling")


class TreeMaskMode(IntEnum):
    """What ``tree_mask`` holds, by SGLang's numbers."""

    FULL_MASK = 0  # per request [N, context + N] bool, one after another; the context's part is left alone
    QLEN_ONLY = 1  # [B, N, N] bool
    QLEN_ONLY_BITPACKING = 2  # [B, N] in 1, 2 or 4 bytes for up to 8, 16 or 32 nodes: bit i is node i


def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
    *,
    impl: str = "auto",
) -> None:
    """Lay out EAGLE's drafted tokens as a tree: ``build_tree`` on parents found from the drafting steps.

    Candidate t = selected_index[b, i - 1] is node i. It was drawn at step slot t // topk: slot 0 hangs from the root,
    another one from the node whose candidate is parent_list[b, slot]. A node without such a parent is pruned: linked
    from nowhere, seen by no other.

    Args:
        parent_list: [B, topk * (depth - 1) + 1] int64.
        selected_index: [B, N - 1] int64, ascending.
        verified_seq_len: [B] int64, tokens before the root.
        tree_mask: flat and contiguous, at least as large as ``TreeMaskMode`` says; any dtype for packed bits, else bool
            or uint8. Out: each node sees its ancestors and itself.
        positions: [B * N] int64. Out: verified_seq_len + depth in the tree.
        retrive_index: [B, N] int64. Out: b * N + i.
        retrive_next_token: [B, N] int64. Out: the first child, -1 for none.
        retrive_next_sibling: [B, N] int64. Out, likewise.
        topk: candidates a node had at each step.
        depth: drafting steps.
        draft_token_num: N.
        tree_mask_mode: a ``TreeMaskMode``.
        impl: of ``build_tree``.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape or range. NotImplementedError: ``impl``.
    """
    op, device, nodes = "build_tree_kernel_efficient", parent_list.device, draft_token_num
    if topk < 1 or depth < 1 or nodes < 1:
        raise ValueError(f"{op}: topk, depth and draft_token_num must be >= 1, got {topk}, {depth} and {nodes}")
    batch = verified_seq_len.shape[0]
    check_tensor(op, "parent_list", parent_list, [batch, None], [torch.int64], device)
    check_tensor(op, "selected_index", selected_index, [batch, nodes - 1], [torch.int64], device)
    check_tensor(op, "verified_seq_len", verified_seq_len, [batch], [torch.int64], device)
    check_tensor(op, "tree_mask", tree_mask, [None], [tree_mask.dtype], device)
    check_tensor(op, "positions", positions, [batch * nodes], [torch.int64], device)
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    _check_nodes(op, ("retrive_index", *LINKS), links, (batch, nodes))
    row_start = torch.arange(batch + 1, device=device) * nodes
    parents = _parents_of_candidates(parent_list, selected_index, topk)
    tree = build_tree(parents.flatten(), row_start, max_rows=nodes, impl=impl, check=False)
    positions.copy_((tree.depth.clamp(min=0).view(batch, nodes) + verified_seq_len.unsqueeze(1)).flatten())
    retrive_index.copy_(torch.arange(batch * nodes, device=device).view(batch, nodes))
    retrive_next_token.copy_(tree.first_child.view(batch, nodes))
    retrive_next_sibling.copy_(tree.next_sibling.view(batch, nodes))
    itself = torch.eye(nodes, dtype=torch.bool, device=device)
    seen = unpack_bits(tree.ancestors, nodes).view(batch, nodes, nodes) | itself
    _write_mask(op, tree_mask, seen, verified_seq_len, tree_mask_mode)


def _parents_of_candidates(parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int) -> torch.Tensor:
    """[B, N]: -1 for the root and for nodes whose parent was not selected."""
    slot = selected_index // topk
    known = torch.nn.functional.pad(parent_list, (0, 1), value=-1)
    candidate = known.gather(1, slot.clamp(max=parent_list.shape[1]))
    same = selected_index.unsqueeze(1) == candidate.unsqueeze(2)
    # One more column, so that there is a maximum to ask for where only the root was selected.
    place = torch.nn.functional.pad(same, (0, 1)).int().argmax(2)
    parents = torch.where(slot == 0, 0, torch.where(same.any(2), place + 1, -1))
    return torch.nn.functional.pad(parents, (1, 0), value=-1)


def _write_mask(op: str, tree_mask: torch.Tensor, seen: torch.Tensor, context: torch.Tensor, mode: int) -> None:
    batch, nodes, _ = seen.shape
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        if nodes > 32:
            raise ValueError(f"{op}: draft_token_num must be at most 32 for packed masks, got {nodes}")
        num_bytes = 1 if nodes <= 8 else 2 if nodes <= 16 else 4
        bits = torch.nn.functional.pad(seen, (0, 8 * num_bytes - nodes)).view(batch, nodes, num_bytes, 8)
        packed = (bits * 2 ** torch.arange(8, device=seen.device)).sum(-1).to(torch.uint8)
        tree_mask.view(torch.uint8)[: packed.numel()] = packed.flatten()
        return
    if tree_mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"{op}: tree_mask must be torch.bool or torch.uint8, got {tree_mask.dtype}")
    seen = seen.to(tree_mask.dtype)
    if mode == TreeMaskMode.QLEN_ONLY:
        tree_mask[: seen.numel()] = seen.flatten()
    elif mode == TreeMaskMode.FULL_MASK:
        width = context + nodes
        first = (width.cumsum(0) - width) * nodes + context  # of each request's row 0, behind its context
        node = torch.arange(nodes, device=seen.device)
        tree_mask[first.view(-1, 1, 1) + width.view(-1, 1, 1) * node.unsqueeze(1) + node] = seen
    else:
        raise ValueError(f"{op}: tree_mask_mode must be 0, 1 or 2, got {mode}")


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Accept drafted tokens that equal the target's argmax: ``verify_tree`` at temperature 0.

    Args:
        predicts: [B * N] int32. Out: at each node on the path, where ``retrive_index`` says, the token after it.
        accept_index: [B, S] int32, filled with -1 by the caller. Out: the path's nodes as ``retrive_index`` numbers
            them, the root first; no more than S - 1 drafted tokens are accepted.
        accept_token_num: [B] int32. Out: drafted tokens accepted, without the root.
        candidates: [B, N] int64 tokens; a negative one is never accepted.
        retrive_index: [B, N] int64.
        retrive_next_token: [B, N] int64.
        retrive_next_sibling: [B, N] int64.
        target_predict: [B, N] int64, the argmax after each node, read where ``retrive_index`` says.
        impl: of ``verify_tree``.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape. NotImplementedError: ``impl``.
    """
    op, shape = "verify_tree_greedy", candidates.shape
    _check_outputs(op, predicts, accept_index, accept_token_num, candidates)
    names = ("candidates", "retrive_index", *LINKS, "target_predict")
    nodes = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    _check_nodes(op, names, nodes, (shape[0], shape[1]))
    argmax = target_predict.take(retrive_index.clamp(min=0))
    path, num_accepted = _walk(
        candidates, argmax, retrive_next_token, retrive_next_sibling, accept_index.shape[1], impl
    )
    _write_path(accept_index, accept_token_num, retrive_index, path, num_accepted)
    predicts.scatter_(0, retrive_index.gather(1, path).flatten(), argmax.gather(1, path).flatten().int())


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    impl: str = "auto",
) -> None:
    """Accept drafted tokens by the target's probabilities alone, with SGLang's thresholds and coins.

    At a node with coin u and target q its children are judged in order: child c is accepted if u <= (sum of q over the
    children up to c) / threshold_acc, or if q(c) >= threshold_single. Where none is, the token after the node is drawn
    from max(0, q - draft_probs) without the rejected children; after S - 1 accepted tokens, from q. At thresholds of 1
    and distinct siblings the output's law is the target's; a sibling given twice counts twice, which biases it
    (``verify_tree`` does not), and thresholds below 1 accept more than is lossless.

    Which children pass follows from the coins alone, so the walk is ``verify_tree``'s greedy one over that yes or no,
    and the last token is drawn by ``draw_from_weights``.

    Args:
        predicts: [B * N] int32. Out: at each node on the path, where ``retrive_index`` says, the token after it.
        accept_index: [B, S] int32, filled with -1 by the caller. Out: the path's nodes, the root first.
        accept_token_num: [B] int32. Out: drafted tokens accepted, without the root.
        candidates: [B, N] int64 tokens; one outside [0, V) is never accepted.
        retrive_index: [B, N] int64.
        retrive_next_token: [B, N] int64.
        retrive_next_sibling: [B, N] int64.
        uniform_samples: [B, N] float32 in [0, 1): a node's coin, for all its children.
        uniform_samples_for_final_sampling: [B] float32 in [0, 1).
        target_probs: [B, N, V] float32.
        draft_probs: [B, N, V] float32, zeros for the law above. Scratch in SGLang; here it is read and left as it was.
        threshold_single: see above.
        threshold_acc: see above; 1e-9 at least.
        deterministic: not read: the same input always gives the same output.
        impl: of ``verify_tree``.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape. NotImplementedError: ``impl``.

    Numerics: sums in float64. A coin of exactly 0 accepts a first child of probability 0, and a target without mass
    yields V - 1, as in SGLang.
    """
    op, device = "tree_speculative_sampling_target_only", candidates.device
    _check_outputs(op, predicts, accept_index, accept_token_num, candidates)
    batch, nodes = candidates.shape
    names = ("candidates", "retrive_index", *LINKS)
    _check_nodes(op, names, (candidates, retrive_index, retrive_next_token, retrive_next_sibling), (batch, nodes))
    coins, final_coins = uniform_samples, uniform_samples_for_final_sampling
    check_tensor(op, "uniform_samples", coins, [batch, nodes], [torch.float32], device)
    check_tensor(op, "uniform_samples_for_final_sampling", final_coins, [batch], [torch.float32], device)
    check_tensor(op, "target_probs", target_probs, [batch, nodes, None], [torch.float32], device)
    check_tensor(op, "draft_probs", draft_probs, list(target_probs.shape), [torch.float32], device)

    vocabulary, steps = target_probs.shape[2], accept_index.shape[1]
    parents = _parents_of_links(retrive_next_token, retrive_next_sibling)
    judged = (parents >= 0) & (candidates >= 0) & (candidates < vocabulary)
    at_parent, request = parents.clamp(min=0), torch.arange(batch, device=device)
    tokens = candidates.clamp(0, vocabulary - 1)
    chance = torch.where(judged, target_probs[request.unsqueeze(1), at_parent, tokens], 0)
    siblings = (parents.unsqueeze(2) == parents.unsqueeze(1)).tril()  # [B, child, itself and those before it]
    running = (siblings * chance.double().unsqueeze(1)).sum(2)
    passes = coins.gather(1, at_parent).double() <= running / max(threshold_acc, SMALLEST_THRESHOLD)
    passes = judged & (passes | (chance >= threshold_single))

    yes = torch.ones_like(candidates)
    path, num_accepted = _walk(passes.long(), yes, retrive_next_token, retrive_next_sibling, steps, impl)
    last = path[:, -1]
    ended = (num_accepted < steps - 1).unsqueeze(1)  # at a rejection, or for want of children
    target = target_probs[request, last]
    weights = torch.where(ended, (target - draft_probs[request, last]).clamp(min=0), target)
    rejected = ended & judged & (parents == last.unsqueeze(1))
    # One more column takes what is not to be written.
    weights = torch.nn.functional.pad(weights, (0, 1)).scatter(1, torch.where(rejected, tokens, vocabulary), 0)
    final = draw_from_weights(weights[:, :vocabulary], final_coins.double())
    final = torch.where(final < 0, vocabulary - 1, final).unsqueeze(1)

    _write_path(accept_index, accept_token_num, retrive_index, path, num_accepted)
    after = torch.nn.functional.pad(tokens.gather(1, path)[:, 1:], (0, 1))
    after = torch.where(torch.arange(steps, device=device) < num_accepted.unsqueeze(1), after, final)
    predicts.scatter_(0, retrive_index.gather(1, path).flatten(), after.flatten().int())


def _parents_of_links(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """[B, N] int64: the node whose child each node is, -1 for the root and for nodes that no link leads to."""
    batch, nodes = next_token.shape
    own = torch.arange(nodes, device=next_token.device).expand(batch, nodes)

    def follow(links: torch.Tensor, nowhere: torch.Tensor) -> torch.Tensor:
        """From where each node is linked; one more column takes the links that lead nowhere."""
        places = torch.where((links > own) & (links < nodes), links, nodes)
        return torch.nn.functional.pad(nowhere, (0, 1)).scatter(1, places, own)[:, :nodes]

    first = follow(next_sibling, own)
    for _ in range((nodes - 1).bit_length()):  # each time twice as far, to the first sibling
        first = first.gather(1, first)
    return follow(next_token, torch.full_like(own, -1)).gather(1, first)


def _walk(
    tokens: torch.Tensor,
    argmax: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    steps: int,
    impl: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The path [B, steps] int64 of nodes whose token is their parent's argmax, its last node repeated; accepted [B]."""
    batch, nodes = tokens.shape
    depth = torch.zeros(batch * nodes, dtype=torch.int32, device=tokens.device)
    verdict = verify_tree(
        Tree(depth, depth, next_token.flatten().int(), next_sibling.flatten().int()),
        tokens.flatten().clamp(min=-1),
        None,
        depth.double(),
        torch.arange(batch + 1, device=tokens.device) * nodes,
        temperature=torch.zeros(batch, device=tokens.device),
        full_argmax=argmax.flatten(),
        impl=impl,
        check=False,
    )
    num_accepted = verdict.num_accepted.clamp(max=steps - 1).long()
    place = torch.arange(steps, device=tokens.device).minimum(num_accepted.unsqueeze(1))
    return verdict.path.view(batch, nodes).long().gather(1, place), num_accepted


def _write_path(
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    retrive_index: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    on_path = torch.arange(path.shape[1], device=path.device) <= num_accepted.unsqueeze(1)
    accept_index.copy_(torch.where(on_path, retrive_index.gather(1, path).int(), accept_index))
    accept_token_num.copy_(num_accepted)


def _check_outputs(
    op: str,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
) -> None:
    check_tensor(op, "candidates", candidates, [None, None], [torch.int64], candidates.device)
    batch, nodes = candidates.shape
    check_tensor(op, "predicts", predicts, [batch * nodes], [torch.int32], candidates.device)
    check_tensor(op, "accept_index", accept_index, [batch, None], [torch.int32], candidates.device)
    check_tensor(op, "accept_token_num", accept_token_num, [batch], [torch.int32], candidates.device)
    if not nodes or not accept_index.shape[1]:
        raise ValueError(
            f"{op}: candidates and accept_index must have room for the root, got shapes {list(candidates.shape)} and "
            f"{list(accept_index.shape)}"
        )


def _check_nodes(op: str, names: Tuple[str, ...], tensors: Tuple[torch.Tensor, ...], shape: Tuple[int, int]) -> None:
    for name, tensor in zip(names, tensors):
        check_tensor(op, name, tensor, shape, [torch.int64], tensors[0].device)
