"""The law of what verify_tree emits, computed from the op itself.

For every tree a drafter could draw, bisection over one coin at a time finds with which probability the op accepts each
child and emits each token. Nothing here repeats the acceptance rules. The products of these probabilities, weighted
with the probability of the tree, are the law of the output; that the coins act independently, as the products assume,
is what `replay` is there to check.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from viasd_kernels.tree_verify import TreeVerdict, build_tree, verify_tree

LAST_COIN = 1 - 2.0**-53
BISECTIONS = 32
TOLERANCE = 1e-8  # BISECTIONS leave 2**-32 per probability

Children = tuple[int, ...]


@dataclass
class Laws:
    """Target and proposal after each token, [V, V] float64 rows; the root's token is 0."""

    full: torch.Tensor
    draft: torch.Tensor

    @property
    def vocab(self) -> int:
        return self.full.shape[1]


def random_laws(seed: int, vocab: int) -> Laws:
    """Rows of each kind in turn: all positive, masked targets, proposals off their support, one-hot proposals."""
    generator = torch.Generator().manual_seed(seed)
    full, draft = (torch.rand(vocab, vocab, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
    for row in range(vocab):
        kind = (seed + row) % 5
        if kind in (1, 3):
            full[row, (seed + row) % vocab] = 0
        if kind in (2, 3):
            draft[row, torch.randperm(vocab, generator=generator)[: vocab // 2]] = 0
        if kind == 4:
            draft[row] = torch.nn.functional.one_hot(torch.tensor(seed % vocab), vocab)
    return Laws(full / full.sum(1, keepdim=True), draft / draft.sum(1, keepdim=True))


# How children may come about: every outcome with its probability.


def independent(law: torch.Tensor, count: int) -> Iterator[tuple[Children, float]]:
    for children in itertools.product(range(len(law)), repeat=count):
        yield children, math.prod(float(law[child]) for child in children)


def without_replacement(law: torch.Tensor, count: int) -> Iterator[tuple[Children, float]]:
    """Fewer children than asked for when the support runs out: unused rows at the end."""
    if count == 0 or law.sum() == 0:
        yield (-1,) * count, 1.0
        return
    for child in law.nonzero().flatten().tolist():
        rest = law.clone()
        rest[child] = 0
        rest = rest / rest.sum() if rest.sum() > 0 else rest
        for others, weight in without_replacement(rest, count - 1):
            yield (child, *others), float(law[child]) * weight


def top_k(law: torch.Tensor, count: int) -> Iterator[tuple[Children, float]]:
    best = law.argsort(descending=True, stable=True)[:count].tolist()
    yield (*best, *[-1] * (count - len(best))), 1.0


def pruned_by_probability(law: torch.Tensor, count: int) -> Iterator[tuple[Children, float]]:
    for children, weight in without_replacement(law, count):
        yield tuple(child if child >= 0 and law[child] >= 0.25 else -1 for child in children), weight


def order_lost(law: torch.Tensor, count: int) -> Iterator[tuple[Children, float]]:
    for children, weight in without_replacement(law, count):
        yield tuple(sorted(children, key=lambda child: (child < 0, child))), weight


Drafter = Callable[[torch.Tensor, int], Iterator[tuple[Children, float]]]


@dataclass
class Trees:
    """All trees with `width[0]` children under the root and `width[1]` under each of those, and their probabilities."""

    laws: Laws
    width: tuple[int, int]
    tokens: torch.Tensor  # [T, rows]
    weight: torch.Tensor  # [T]

    @property
    def parents(self) -> list[int]:
        return [-1, *[0] * self.width[0], *[1 + i for i in range(self.width[0]) for _ in range(self.width[1])]]

    def children(self, node: int) -> list[int]:
        return [row for row, parent in enumerate(self.parents) if parent == node]


def draw_all(laws: Laws, width: tuple[int, int], drafter: Drafter) -> Trees:
    tokens, weights = [], []
    for children, weight in drafter(laws.draft[0], width[0]):
        options = [
            list(drafter(laws.draft[child], width[1])) if child >= 0 else [((-1,) * width[1], 1.0)]
            for child in children
        ]
        for grandchildren in itertools.product(*options):
            tokens.append([0, *children, *[token for below, _ in grandchildren for token in below]])
            weights.append(weight * math.prod(chance for _, chance in grandchildren))
    likely = torch.tensor(weights, dtype=torch.float64) > 0
    return Trees(laws, width, torch.tensor(tokens)[likely], torch.tensor(weights, dtype=torch.float64)[likely])


@dataclass
class Op:
    """The op under test on many trees of one shape: coins [S, rows] in, verdict with path [S, rows] out."""

    proposal: str
    impl: str

    def __call__(self, trees: Trees, which: torch.Tensor, coins: torch.Tensor) -> TreeVerdict:
        tokens = trees.tokens[which].flatten()
        row_start = torch.arange(len(which) + 1) * len(trees.parents)
        row_laws = tokens.clamp(min=0)
        verdict = verify_tree(
            build_tree(torch.tensor(trees.parents).repeat(len(which)), row_start, max_rows=len(trees.parents)),
            tokens,
            trees.laws.full.log()[row_laws],
            coins.flatten(),
            row_start,
            temperature=torch.ones(len(which)),
            draft_logits=None if self.proposal == "deterministic" else trees.laws.draft.log()[row_laws],
            proposal=self.proposal,
            impl=self.impl,
        )
        return verdict._replace(path=verdict.path.reshape(coins.shape))


@dataclass
class Searches:
    """Bisections to be run together: the largest coin of `row` for which `holds` is still true, other coins fixed."""

    which: list[int]
    coins: list[list[float]]
    row: list[int]
    accepted: list[list[int]]  # the path that must result, without the root
    highest: list[int]  # and the next token must not exceed this; -1 where the path alone is asked for


def plan(trees: Trees) -> tuple[Searches, dict[tuple[int, int, int], int]]:
    """One search per (tree, node, outcome): outcome is a child's place, or their number + v for a next token <= v."""
    searches, index = Searches([], [], [], [], []), {}
    for tree in range(len(trees.tokens)):
        for node in [0, *trees.children(0)]:
            reach = [LAST_COIN] * len(trees.parents)
            if node:
                reach[node] = 0.0
            chain, children = [node] if node else [], trees.children(node)
            for outcome in range(len(children) + trees.laws.vocab - 1):
                is_child = outcome < len(children)
                index[tree, node, outcome] = len(searches.which)
                searches.which.append(tree)
                searches.coins.append(reach)
                searches.row.append(children[outcome] if is_child else 0)
                searches.accepted.append([*chain, children[outcome]] if is_child else chain)
                searches.highest.append(-1 if is_child else outcome - len(children))
    return searches, index


def bisect(trees: Trees, op: Op, searches: Searches) -> torch.Tensor:
    which, coins, row = torch.tensor(searches.which), torch.tensor(searches.coins).double(), torch.tensor(searches.row)
    coins = torch.where(coins > 0.5, LAST_COIN, coins)
    accepted = torch.full_like(trees.tokens[which], -1)
    accepted[:, 0] = 0
    for search, path in enumerate(searches.accepted):
        accepted[search, 1 : 1 + len(path)] = torch.tensor(path)
    highest, length = torch.tensor(searches.highest), torch.tensor([len(path) for path in searches.accepted])
    low, high = torch.zeros(len(which), dtype=torch.float64), torch.ones(len(which), dtype=torch.float64)
    on_path = torch.arange(accepted.shape[1]) <= length.unsqueeze(1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        verdict = op(trees, which, coins.scatter(1, row.unsqueeze(1), middle.unsqueeze(1)))
        holds = ((verdict.path == accepted) | ~on_path).all(1)
        ends = (verdict.num_accepted == length) & (verdict.next_token <= highest)
        holds &= (highest < 0) | ends
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return (low + high) / 2


@dataclass
class Thresholds:
    """P(coin accepts child) and P(next token <= v), for each tree, node and outcome."""

    values: list[float]
    index: dict[tuple[int, int, int], int]
    num_next: int

    def accept(self, tree: int, node: int, place: int) -> float:
        return self.values[self.index[tree, node, place]]

    def next_token(self, tree: int, node: int, num_children: int) -> list[float]:
        """The running sums of the next token's law, the last one 1."""
        return [self.values[self.index[tree, node, num_children + v]] for v in range(self.num_next)] + [1.0]


def measure(trees: Trees, op: Op) -> Thresholds:
    searches, index = plan(trees)
    return Thresholds(bisect(trees, op, searches).tolist(), index, trees.laws.vocab - 1)


def law_at(trees: Trees, thresholds: Thresholds, tree: int, node: int) -> tuple[list[float], list[float]]:
    """At a node that was reached: the probabilities of its children, by place, and of the next tokens."""
    children, left, taken = trees.children(node), 1.0, []
    for place in range(len(children)):
        chance = thresholds.accept(tree, node, place)
        taken.append(left * chance)
        left *= 1 - chance
    running = thresholds.next_token(tree, node, len(children))
    return taken, [left * (running[v] - (running[v - 1] if v else 0.0)) for v in range(len(running))]


def emitted_law(trees: Trees, thresholds: Thresholds) -> tuple[torch.Tensor, torch.Tensor]:
    """P(first token) [V], and P(first token was an accepted child, second token) [V, V]."""
    first = torch.zeros(trees.laws.vocab, dtype=torch.float64)
    second = torch.zeros(trees.laws.vocab, trees.laws.vocab, dtype=torch.float64)
    for tree, (tokens, weight) in enumerate(zip(trees.tokens.tolist(), trees.weight.tolist(), strict=True)):
        taken, ended = law_at(trees, thresholds, tree, 0)
        first += weight * torch.tensor(ended, dtype=torch.float64)
        for child, chance in zip(trees.children(0), taken, strict=True):
            if tokens[child] < 0 or chance < TOLERANCE:
                continue
            first[tokens[child]] += weight * chance
            below, ended_below = law_at(trees, thresholds, tree, child)
            second[tokens[child]] += weight * chance * torch.tensor(ended_below, dtype=torch.float64)
            for grandchild, chance_below in zip(trees.children(child), below, strict=True):
                if tokens[grandchild] >= 0:
                    second[tokens[child], tokens[grandchild]] += weight * chance * chance_below
    return first, second


def distances(trees: Trees, op: Op) -> tuple[float, float]:
    """Total variation from the target's law: of the first token, and of the second where the first was a child."""
    first, second = emitted_law(trees, measure(trees, op))
    expected = second.sum(1, keepdim=True) * trees.laws.full
    return float((first - trees.laws.full[0]).abs().sum() / 2), float((second - expected).abs().sum() / 2)


def replay(trees: Trees, thresholds: Thresholds, tree: int, coins: list[float]) -> tuple[list[int], int | None] | None:
    """Path and next token that the thresholds foretell for these coins; None within TOLERANCE of a threshold.

    After a grandchild, whose next tokens `plan` does not ask for, the path alone.
    """
    path = [0]
    while path[-1] in (0, *trees.children(0)):
        children = trees.children(path[-1])
        for place, child in enumerate(children):
            chance = thresholds.accept(tree, path[-1], place)
            if abs(coins[child] - chance) < TOLERANCE:
                return None
            if coins[child] < chance:
                path.append(child)
                break
        else:
            running = thresholds.next_token(tree, path[-1], len(children))
            if min(abs(coins[0] - step) for step in running) < TOLERANCE:
                return None
            return path, next(v for v, step in enumerate(running) if coins[0] < step)
    return path, None
