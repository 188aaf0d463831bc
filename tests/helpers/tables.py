"""Language models that are tables, and the exact law of what a decode run makes of them.

A table model keeps a real slot cache: each slot remembers the token, the position and the tier that wrote it. Full
logits over a slot that a slim pass wrote come from a table of their own, so a stale key shows in the output's law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from viasd import DecodeRun, Request, Route, Sampling
from viasd.decode import Admission
from viasd.models import DecoderOutput, Rows, SlotPool
from viasd.sampling import edit_row, mask_rows

SLIM = Route((True, False, False, True), (True, False, False, True))
DRAFT = Route((True, False, False, True), (True, False, True, True))
TOGETHER = Admission(max_sequences=10**6)  # all worlds in one batch
TIERS = {None: "full", SLIM: "slim", DRAFT: "draft"}


@dataclass
class TableCache:
    pool: SlotPool = field(default_factory=SlotPool)
    written: dict[int, tuple[int, int, str]] = field(default_factory=dict)


class TableModel:
    """Draws every distribution from a Dirichlet law, seeded by the tier and by all that the tier may depend on."""

    num_layers = 4
    device = torch.device("cpu")
    implementation = reason = "table"

    def __init__(self, vocab_size: int, seed: int, *, spread: float = 0.7, max_positions: int = 64) -> None:
        self.name = f"table-{seed}"
        self.vocab_size = vocab_size
        self.seed = seed
        self.spread = spread
        self.max_positions = max_positions
        self._index: dict[Any, int] = {}
        self._rows: list[np.ndarray] = []

    def check_route(self, route: Route) -> None:
        route.check(self.num_layers, "", self.name)

    def new_cache(self) -> TableCache:
        return TableCache()

    def probs(self, tier: str, prefix: Sequence[int], num_full: int = 0) -> np.ndarray:
        """[V] the law of the token after ``prefix``; a slim one depends on how much of it has full keys."""
        return self._rows[self._row(tier, tuple(prefix), num_full)]

    def _row(self, tier: str, prefix: tuple[int, ...], num_full: int) -> int:
        key = (tier, prefix, num_full)
        if key not in self._index:
            kind = ("full", "slim", "draft", "stale").index(tier)
            rng = np.random.default_rng([self.seed, kind, num_full, len(prefix), *prefix])
            self._index[key] = len(self._rows)
            self._rows.append(rng.dirichlet([self.spread] * self.vocab_size))
        return self._index[key]

    def forward(
        self,
        rows: Rows,
        cache: TableCache,
        *,
        route: Route | None = None,
        logits_rows: Sequence[int] | None = None,
        capture_layers: Sequence[int] = (),
    ) -> DecoderOutput:
        tier = TIERS[route]
        chosen = []
        for b, context in enumerate(rows.context):
            written = [cache.written[slot] for slot in context]
            assert [position for _, position, _ in written] == list(range(len(written)))
            num_full = next((i for i, (_, _, by) in enumerate(written) if by != "full"), len(written))
            effective = "stale" if tier == "full" and num_full < len(written) else tier
            prefixes: list[tuple[int, ...]] = []
            for r in range(rows.row_start[b], rows.row_start[b + 1]):
                parent = r - rows.row_start[b] - 1 if rows.parents is None else rows.parents[r]
                before = tuple(token for token, _, _ in written) if parent < 0 else prefixes[parent]
                assert rows.positions[r] == len(before)
                prefixes.append((*before, rows.tokens[r]))
                chosen.append(self._row(effective, prefixes[-1], num_full if tier == "slim" else 0))
        for token, position, slot in zip(rows.tokens, rows.positions, rows.slots, strict=True):
            cache.written[slot] = (token, position, tier)
        if logits_rows is not None:
            chosen = [chosen[row] for row in logits_rows]
        needed, inverse = np.unique(chosen, return_inverse=True)
        logits = np.log(np.stack([self._rows[row] for row in needed]))
        return DecoderOutput(torch.from_numpy(logits)[torch.from_numpy(inverse)])


def request(
    seed: int,
    max_new_tokens: int,
    *,
    eos: tuple[int, ...] = (),
    hooks: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Request:
    """``hooks`` are fields of ``Request``, ``settings`` of ``Sampling``."""
    settings = {"temperature": 1.0, **settings}
    return Request([0, 1], Sampling(max_new_tokens, seed=seed, eos_token_ids=eos, **settings), **hooks)


def target_law(model: TableModel, request: Request) -> dict:
    """The law of the full model's own output under the request's settings."""
    sampling = request.sampling
    law: dict[tuple[int, ...], float] = {}

    def extend(output: tuple[int, ...], weight: float) -> None:
        stopped = output and request.stopping and request.stopping([*request.prompt_tokens, *output])
        if len(output) == sampling.max_new_tokens or (output and output[-1] in sampling.eos_token_ids) or stopped:
            law[output] = weight
            return
        prefix = [*request.prompt_tokens, *output]
        logits = torch.from_numpy(np.log(model.probs("full", prefix)))
        logits = edit_row(logits, sampling, prefix, len(request.prompt_tokens))
        if request.logits_processor:
            logits = request.logits_processor(prefix, logits)
        probs = (mask_rows(logits[None], [sampling], [0, 1])[0] / sampling.temperature).softmax(-1)
        for token, prob in enumerate(probs.tolist()):
            if prob > 0:
                extend((*output, token), weight * prob)

    extend((), 1.0)
    return law


def total_variation(one: dict, other: dict) -> float:
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())


class Enumeration:
    """The exact law of a decode run, by splitting each coin's interval wherever a decision changes.

    A world is one request; it assigns an interval to every coin that it has used, and its weight is their product.
    The loop sees the intervals' midpoints. The spy around ``accept_chain`` knows, from the rule's definition, where in
    [0, 1) the op's decision changes; every part of the interval without the midpoint becomes a world of its own.
    ``key`` says which coin a pass and a row share: the identity unless a test wants coins used twice.
    """

    def __init__(self, key: Callable[[int, int], Any] = lambda draw, slot: (draw, slot)) -> None:
        self.key = key
        self.worlds: list[dict[Any, tuple[float, float]]] = [{}]
        self.new_worlds: list[dict[Any, tuple[float, float]]] = []
        self.last: list[tuple[int, int]] = []

    def coins(self, seeds: torch.Tensor, draws: torch.Tensor, n: int) -> torch.Tensor:
        self.last = list(zip(seeds.tolist(), draws.tolist(), strict=True))
        grid = [[sum(self._interval(w, self.key(d, slot))) / 2 for slot in range(n)] for w, d in self.last]
        return torch.tensor(grid, dtype=torch.float64)

    def _interval(self, world: int, key: Any) -> tuple[float, float]:
        return self.worlds[world].get(key, (0.0, 1.0))

    def _split(self, world: int, key: Any, boundaries: Sequence[float]) -> float:
        """Narrow the world's interval to the part that holds its midpoint; the other parts become new worlds."""
        low, high = self._interval(world, key)
        coin = (low + high) / 2
        cuts = [low]
        for boundary in [*boundaries, high]:  # ascending; what rounding makes of equal ones is no part of its own
            if cuts[-1] + 1e-13 < boundary and (boundary == high or boundary < high - 1e-13):
                cuts.append(boundary)
        own = (low, high)
        for part in itertools.pairwise(cuts):
            if part[0] <= coin < part[1]:
                own = part
            else:
                self.new_worlds.append({**self.worlds[world], key: part})
        self.worlds[world][key] = own
        return coin

    def spy(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def accept_chain(
            tokens: torch.Tensor,
            logits: torch.Tensor,
            uniforms: torch.Tensor,
            row_start: torch.Tensor,
            *,
            temperature: torch.Tensor,
            draft_logits: torch.Tensor | None = None,
            **options: Any,
        ) -> Any:
            verdict = op(
                tokens, logits, uniforms, row_start, temperature=temperature, draft_logits=draft_logits, **options
            )
            rows_of = (row_start[1:] - row_start[:-1]).tolist()
            scale = temperature.repeat_interleave(torch.tensor(rows_of)).double().unsqueeze(1)
            target = (logits.double() / scale).softmax(-1).numpy()
            draft = None if draft_logits is None else (draft_logits.double() / scale).softmax(-1).numpy()
            for b, (world, draw) in enumerate(self.last):
                rows = range(int(row_start[b]), int(row_start[b + 1]))
                self._walk(
                    world, draw, [int(tokens[r]) for r in rows], target[rows], None if draft is None else draft[rows]
                )
            return verdict

        return accept_chain

    def _walk(self, world: int, draw: int, tokens: list[int], target: np.ndarray, draft: np.ndarray | None) -> None:
        final = target[len(tokens) - 1]
        for row in range(1, len(tokens)):
            token, q = tokens[row], target[row - 1]
            p = np.eye(len(q))[token] if draft is None else draft[row - 1]
            accept = q[token] / p[token]
            if self._split(world, self.key(draw, row), [min(accept, 1.0)]) >= accept:
                final = np.maximum(q - p, 0.0)
                break
        cumulative = final.cumsum()
        self._split(world, self.key(draw, 0), list(cumulative[:-1] / cumulative[-1]))

    def law(
        self, run: Callable[[list[Request], Callable[..., Any]], DecodeRun], make: Callable[[int], Request]
    ) -> dict:
        """Decode world after world, a few thousand at a time, until no decision is left open."""
        law: dict[tuple[int, ...], float] = {}
        waiting: list[dict[Any, tuple[float, float]]] = [{}]
        while waiting:
            self.worlds, waiting, self.new_worlds = waiting[-4000:], waiting[:-4000], []
            decode = run([make(seed) for seed in range(len(self.worlds))], self.coins)
            for _ in decode.cycles():
                pass
            for world, result in zip(self.worlds, decode.results, strict=True):
                weight = float(np.prod([high - low for low, high in world.values()]))
                law[tuple(result.tokens)] = law.get(tuple(result.tokens), 0.0) + weight
            waiting.extend(self.new_worlds)
        return law


def sample_counts(
    run: Callable[[list[Request]], DecodeRun], make: Callable[[int], Request], trials: int, batch: int = 20_000
) -> dict[tuple[int, ...], int]:
    """How often each output came in ``trials`` runs with seeds 0, 1, 2, ..."""
    counts: dict[tuple[int, ...], int] = {}
    for first in range(0, trials, batch):
        decode = run([make(seed) for seed in range(first, min(first + batch, trials))])
        for _ in decode.cycles():
            pass
        for result in decode.results:
            counts[tuple(result.tokens)] = counts.get(tuple(result.tokens), 0) + 1
    return counts


def chi_square_pvalue(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float]) -> float:
    """Pearson's test; outcomes expected fewer than ten times are pooled. An impossible outcome gives 0."""
    from scipy.stats import chi2

    total = sum(counts.values())
    if any(law.get(output, 0.0) == 0.0 for output in counts):
        return 0.0
    cells: list[tuple[float, float]] = []
    rare_expected = rare_seen = 0.0
    for output, prob in law.items():
        expected, seen = prob * total, counts.get(output, 0)
        if expected < 10:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + seen
        else:
            cells.append((expected, seen))
    if rare_expected >= 10:
        cells.append((rare_expected, rare_seen))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
