"""compat.sglang against oracles in plain Python: SGLang's rules, one node at a time."""

import pytest
import torch
from compat_cases import POISON, linked, outputs, random_parents
from scipy import stats

from viasd_kernels import uniforms
from viasd_kernels.compat.sglang import (
    TreeMaskMode,
    build_tree_kernel_efficient,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)

pytestmark = pytest.mark.usefixtures("one_thread")
by_impl = pytest.mark.parametrize("impl", ["reference", "native"])

FALSE_ALARM = 1e-9


def children(next_token, next_sibling, node: int) -> list[int]:
    found, child = [], int(next_token[node])
    while child != -1:
        found.append(child)
        child = int(next_sibling[child])
    return found


# ------------------------------------------------------------------------------------------------------ the oracles


def greedy_oracle(outs, candidates, index, next_token, next_sibling, target_predict) -> None:
    predicts, accept_index, accept_token_num = outs
    for request in range(len(candidates)):
        node, accepted = 0, 0
        accept_index[request, 0] = index[request, 0]
        while True:
            wanted = int(target_predict.flatten()[index[request, node]])
            predicts[index[request, node]] = wanted
            below = children(next_token[request], next_sibling[request], node)
            hit = next((child for child in below if int(candidates[request, child]) == wanted), None)
            if hit is None or accepted == accept_index.shape[1] - 1:
                break
            accepted, node = accepted + 1, hit
            accept_index[request, accepted] = index[request, node]
        accept_token_num[request] = accepted


def sampling_oracle(outs, candidates, tree, coins, final, target, draft, single, acc) -> float:
    """Fills the outputs in; returns how close any coin came to a decision it could have gone the other way on."""
    (predicts, accept_index, accept_token_num), (index, next_token, next_sibling), closest = outs, tree, 1.0
    for request in range(len(candidates)):
        node, accepted, scratch = 0, 0, draft[request].clone()
        accept_index[request, 0] = index[request, 0]
        while accepted < accept_index.shape[1] - 1:
            running, hit = 0.0, None
            for child in children(next_token[request], next_sibling[request], node):
                token = int(candidates[request, child])
                chance = float(target[request, node, token])
                running += chance
                closest = min(closest, abs(float(coins[request, node]) - running / acc))
                if float(coins[request, node]) <= running / acc or chance >= single:
                    hit = child
                    break
                scratch[node, token] = target[request, node, token]
            if hit is None:
                break
            predicts[index[request, node]] = candidates[request, hit]
            accepted, node = accepted + 1, hit
            accept_index[request, accepted] = index[request, node]
        accept_token_num[request] = accepted
        weights = target[request, node]
        if accepted < accept_index.shape[1] - 1:
            weights = (weights - scratch[node]).clamp(min=0)
        mass, running, drawn = weights.double().sum(), 0.0, len(weights) - 1
        for token, weight in enumerate(weights.double().tolist()):
            running += weight
            closest = min(closest, abs(float(final[request]) - running / float(mass)) if mass > 0 else 1.0)
            if running > float(final[request] * mass):
                drawn = token
                break
        predicts[index[request, node]] = drawn
    return closest


# ------------------------------------------------------------------------------------------------------------ greedy


@by_impl
@pytest.mark.parametrize("steps", [1, 2, 4, 12])
def test_greedy_is_sglangs(steps, impl) -> None:
    longest = 0
    for seed in range(12):
        batch, nodes, vocab = 5, 1 + seed, 2 + seed % 3
        generator = torch.Generator().manual_seed(seed)
        candidates, target_predict = torch.randint(0, vocab, (2, batch, nodes), generator=generator)
        candidates[torch.rand(batch, nodes, generator=generator) < 0.1] = -1
        tree = linked(random_parents(seed, batch, nodes))
        got, expected = outputs(batch, nodes, steps), outputs(batch, nodes, steps)
        assert verify_tree_greedy(*got, candidates, *tree, target_predict, impl=impl) is None
        greedy_oracle(expected, candidates, *tree, target_predict)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        longest = max(longest, int(got[2].max()))
    assert min(steps - 1, 4) <= longest < steps


def test_greedy_follows_retrive_index_into_flat_arrays() -> None:
    _, next_token, next_sibling = linked([[-1, 0, 1], [-1, 0, 0]])
    places = torch.tensor([[4, 0, 5], [3, 1, 2]])
    candidates = torch.tensor([[9, 7, 8], [9, 6, 5]])
    target_predict = torch.empty(6, dtype=torch.int64)
    target_predict[places] = torch.tensor([[7, 8, 3], [5, 1, 2]])
    got = outputs(2, 3, 3)
    verify_tree_greedy(*got, candidates, places, next_token, next_sibling, target_predict.view(2, 3))
    assert got[1].tolist() == [[4, 0, 5], [3, 2, -1]]
    assert got[2].tolist() == [2, 1]
    assert got[0].tolist() == [8, POISON, 2, 5, 7, 3]


# ---------------------------------------------------------------------------------------------------------- sampling


@by_impl
@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (0.4, 1.0), (1.0, 0.6), (0.0, 0.0)], ids=str)
def test_sampling_is_sglangs(single, acc, impl) -> None:
    compared = 0
    for seed in range(30):
        batch, nodes, vocab, steps = 4, 2 + seed % 9, 3 + seed % 4, 1 + seed % 5
        generator = torch.Generator().manual_seed(seed)
        candidates = torch.randint(0, vocab, (batch, nodes), generator=generator)
        target, draft = (torch.randn(2, batch, nodes, vocab, generator=generator) * 2).softmax(-1)
        target = torch.where(torch.rand(target.shape, generator=generator) < 0.2, 0, target)
        target, draft = target / target.sum(-1, keepdim=True).clamp(min=1e-6), draft if seed % 2 else draft * 0
        coins, final = torch.rand(batch, nodes, generator=generator), torch.rand(batch, generator=generator)
        tree = linked(random_parents(seed, batch, nodes))
        got, expected, before = outputs(batch, nodes, steps), outputs(batch, nodes, steps), draft.clone()
        rest = (coins, final, target, draft, single)
        assert tree_speculative_sampling_target_only(*got, candidates, *tree, *rest, acc, impl=impl) is None
        assert torch.equal(draft, before)
        if sampling_oracle(expected, candidates, tree, *rest, max(acc, 1e-9)) < 1e-6:
            continue
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), seed
        compared += 1
    assert compared >= 28


def emitted_pairs(siblings: list[int], below: list[int], acc: float = 1.0, trials: int = 100_000):
    """(first token, second token or -1 behind a rejection, law [V, V]) of one tree with many coins."""
    vocab, count = 6, len(siblings)
    law = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3)).softmax(-1)
    tokens = torch.tensor([0, *siblings, *below])
    parents = [-1, *[0] * count, *[1] * len(below)]
    tree = [own.expand(trials, -1) for own in linked([parents])]
    nodes = len(parents)
    tree[0] = torch.arange(trials * nodes).view(trials, nodes)
    coins = uniforms(torch.arange(trials), torch.zeros(trials, dtype=torch.int64), nodes + 1).float()
    target, got = law[tokens].expand(trials, nodes, vocab), outputs(trials, nodes, 3)
    rest = (coins[:, :nodes], coins[:, nodes].contiguous(), target, torch.zeros(target.shape))
    tree_speculative_sampling_target_only(*got, tokens.expand(trials, -1), *tree, *rest, threshold_acc=acc)
    predicts = got[0].view(trials, nodes)
    child = (got[1][:, 1].long() - tree[0][:, 0]).clamp(min=0)
    second = torch.where(got[2] > 0, predicts.gather(1, child.unsqueeze(1)).squeeze(1), -1)
    return predicts[:, 0], second, law


def tail(observed: torch.Tensor, law: torch.Tensor) -> float:
    counts = observed.long().bincount(minlength=len(law)).double()
    return float(stats.chisquare(counts.numpy(), (law.double() / law.double().sum() * counts.sum()).numpy()).pvalue)


def test_chi_square_at_thresholds_of_1_is_the_targets() -> None:
    first, second, law = emitted_pairs([2, 5, 1], [4, 0])
    assert tail(first, law[0]) > FALSE_ALARM
    for token in (2, 5, 1):  # children without children of their own, and one with two
        after = second[(first == token) & (second >= 0)]
        assert len(after) > 1000
        assert tail(after, law[token]) > FALSE_ALARM


@pytest.mark.parametrize(("siblings", "acc"), [([2, 2, 5], 1.0), ([2, 5, 1], 0.7)], ids=["duplicates", "threshold"])
def test_chi_square_notices_where_sglangs_rule_is_not_the_targets(siblings, acc) -> None:
    first, _, law = emitted_pairs(siblings, [4, 0], acc)
    assert tail(first, law[0]) < FALSE_ALARM


# --------------------------------------------------------------------------------------------------------- the tree


def eagle_tree(seed: int, batch: int, topk: int, depth: int, nodes: int):
    """What EAGLE's drafting hands over: parent_list, selected_index, and each selected node's parent by its own count.

    Candidates are numbered step by step: topk from the root, then topk from each of the topk kept at the step before.
    """
    generator = torch.Generator().manual_seed(seed)
    parent_list = torch.full((batch, topk * (depth - 1) + 1), -1)
    selected, parents = torch.empty(batch, nodes - 1, dtype=torch.int64), []
    for request in range(batch):
        origin, frontier = dict.fromkeys(range(topk), -1), list(range(topk))
        for step in range(1, depth):
            slot = 1 + topk * (step - 1)
            parent_list[request, slot : slot + topk] = torch.tensor(frontier)
            grown = {(slot + i) * topk + j: kept for i, kept in enumerate(frontier) for j in range(topk)}
            origin |= grown
            order = torch.randperm(len(grown), generator=generator)[:topk].tolist()
            frontier = [list(grown)[i] for i in sorted(order)]
        chosen: list[int] = []
        while len(chosen) < nodes - 1:  # a candidate comes after its parent
            open_now = [c for c, own in origin.items() if c not in chosen and own in (-1, *chosen)]
            chosen.append(open_now[int(torch.randint(len(open_now), (), generator=generator))])
        selected[request] = torch.tensor(sorted(chosen))
        place = {candidate: i + 1 for i, candidate in enumerate(sorted(chosen))} | {-1: 0}
        parents.append([-1, *(place[origin[candidate]] for candidate in sorted(chosen))])
    return parent_list, selected, parents


def ancestors_and_itself(parents: list[int], node: int) -> set[int]:
    return {node} | (ancestors_and_itself(parents, parents[node]) if parents[node] >= 0 else set())


def build(parent_list, selected, lengths, tree_mask, mode, topk, depth, impl="auto"):
    batch, nodes = selected.shape[0], selected.shape[1] + 1
    positions, links = torch.full((batch * nodes,), POISON), torch.full((3, batch, nodes), -1)
    arguments = (parent_list, selected, lengths, tree_mask, positions, *links, topk, depth, nodes, mode)
    assert build_tree_kernel_efficient(*arguments, impl=impl) is None
    return positions, links


@by_impl
@pytest.mark.parametrize(
    ("topk", "depth", "nodes"), [(1, 4, 5), (4, 3, 8), (3, 4, 17), (2, 1, 3), (8, 9, 70), (3, 2, 1)], ids=str
)
def test_build_tree_is_sglangs(topk, depth, nodes, impl) -> None:
    lengths = torch.tensor([3, 0, 11])
    parent_list, selected, parents = eagle_tree(nodes, 3, topk, depth, nodes)
    seen = torch.zeros(3, nodes, nodes, dtype=torch.bool)
    for request, own in enumerate(parents):
        for node in range(nodes):
            seen[request, node, list(ancestors_and_itself(own, node))] = True
    for mode in TreeMaskMode:
        if mode == TreeMaskMode.FULL_MASK:
            tree_mask = torch.ones(int(((lengths + nodes) * nodes).sum()) + 4, dtype=torch.bool)
            wide = [torch.ones(nodes, int(n) + nodes, dtype=torch.bool) for n in lengths]
            for request, own in enumerate(wide):
                own[:, int(lengths[request]) :] = seen[request]
            expected = torch.cat([own.flatten() for own in wide])
        elif mode == TreeMaskMode.QLEN_ONLY:
            tree_mask, expected = torch.ones(3 * nodes * nodes, dtype=torch.uint8), seen.flatten().to(torch.uint8)
        elif nodes > 32:
            with pytest.raises(ValueError, match="draft_token_num must be at most 32 for packed masks, got 70"):
                build(parent_list, selected, lengths, torch.zeros(999, dtype=torch.uint8), mode, topk, depth, impl)
            continue
        else:
            width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[1 if nodes <= 8 else 2 if nodes <= 16 else 4]
            tree_mask = torch.zeros(3 * nodes, dtype=width)
            expected = (seen.long() << torch.arange(nodes)).sum(-1).flatten().to(width)
        positions, links = build(parent_list, selected, lengths, tree_mask, mode, topk, depth, impl)
        assert torch.equal(tree_mask[: len(expected)], expected)
        assert bool((tree_mask[len(expected) :] == 1).all())
        depths = seen.sum(-1) - 1
        assert torch.equal(positions, (depths + lengths.unsqueeze(1)).flatten())
        assert torch.equal(links, torch.stack(linked(parents)))


def test_build_tree_prunes_a_node_whose_parent_was_not_selected() -> None:
    parent_list, selected = torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 2, 4]])  # candidate 2 hangs from candidate 0
    tree_mask = torch.zeros(16, dtype=torch.bool)
    _, links = build(parent_list, selected, torch.tensor([5]), tree_mask, TreeMaskMode.QLEN_ONLY, 2, 2)
    assert links[1].tolist() == [[1, 3, -1, -1]]
    assert links[2].tolist() == [[-1, -1, -1, -1]]
    assert tree_mask.view(4, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]]


# -------------------------------------------------------------------------------------------------------- arguments


def test_arguments_are_checked() -> None:
    tree, tokens = linked([[-1, 0]]), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"verify_tree_greedy: target_predict must be torch\.int64, got torch\.int32"):
        verify_tree_greedy(*outputs(1, 2, 2), tokens, *tree, tokens.int())
    with pytest.raises(ValueError, match=r"verify_tree_greedy: predicts must have shape \[2\], got \[3\]"):
        verify_tree_greedy(*outputs(1, 3, 2), tokens, *tree, tokens)
    with pytest.raises(ValueError, match="must have room for the root"):
        verify_tree_greedy(*outputs(1, 2, 0), tokens, *tree, tokens)
    with pytest.raises(NotImplementedError, match="no 'triton' implementation for cpu"):
        verify_tree_greedy(*outputs(1, 2, 2), tokens, *tree, tokens, impl="triton")
    coins, probs = torch.zeros(1, 2), torch.zeros(1, 2, 3)
    with pytest.raises(TypeError, match=r"uniform_samples must be torch\.float32, got torch\.float64"):
        tree_speculative_sampling_target_only(
            *outputs(1, 2, 2), tokens, *tree, coins.double(), coins[:, 0], probs, probs
        )
    parent_list, lengths, mask = torch.full((1, 1), -1), torch.tensor([5]), torch.zeros(99, dtype=torch.bool)
    with pytest.raises(ValueError, match="tree_mask_mode must be 0, 1 or 2, got 3"):
        build(parent_list, torch.zeros(1, 1, dtype=torch.int64), lengths, mask, 3, 1, 1)
    with pytest.raises(ValueError, match="topk, depth and draft_token_num must be >= 1, got 0, 1 and 2"):
        build(parent_list, torch.zeros(1, 1, dtype=torch.int64), lengths, mask, 1, 0, 1)
    with pytest.raises(TypeError, match=r"tree_mask must be torch\.bool or torch\.uint8, got torch\.int64"):
        build(parent_list, torch.zeros(1, 1, dtype=torch.int64), lengths, mask.long(), 1, 1, 1)
