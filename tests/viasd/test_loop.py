"""The decode loop's bookkeeping, with tables instead of models."""

import pytest
import torch

import tables
from tables import DRAFT, SLIM, TableModel
from viasd import DecodeRun, Gate, InvalidInput, ModelDrafter, PromptLookup, Request, Sampling, SelfDrafter, Speculation
from viasd.drafters import Draft, Drafter
from viasd.models import DecoderOutput
from viasd_kernels import acceptance_stats, uniforms


def decode(model, requests, **options):
    run = DecodeRun(model, requests, **options)
    for _ in run.cycles():
        pass
    return run.results


def greedy(model, prompt, max_new_tokens, eos=()):
    output = []
    while len(output) < max_new_tokens and not (output and output[-1] in eos):
        output.append(int(model.probs("full", [*prompt, *output]).argmax()))
    return output


DRAFTERS = {
    "none": lambda model: None,
    "self": lambda model: SelfDrafter(model, DRAFT),
    "model": lambda model: ModelDrafter(TableModel(model.vocab_size, 99)),
    "lookup": lambda model: PromptLookup(min_match=1),
}


@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_is_the_full_models_own_output(kind, route):
    model = TableModel(7, 1)
    prompts = [[0, 1, 2], [3], [4, 5, 6, 0, 1, 2, 3, 4], [6, 6]]
    requests = [Request(p, Sampling(20, seed=0, eos_token_ids=(5,))) for p in prompts]
    results = decode(model, requests, drafter=DRAFTERS[kind](model), route=route)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == greedy(model, prompt, 20, (5,))
        assert result.finish_reason == ("eos" if result.tokens[-1] == 5 else "length")


@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_samples_do_not_depend_on_batch_mates(kind, route):
    model = TableModel(5, 2)
    options = {"drafter": DRAFTERS[kind](model), "route": route}
    requests = [tables.request(seed, 3 + seed, temperature=0.5 * (seed % 4)) for seed in range(12)]
    together = decode(model, requests, **options)
    reordered = decode(model, requests[::-1], **options)[::-1]
    for request, one, other in zip(requests, together, reordered, strict=True):
        alone = decode(model, [request], **options)[0]
        assert alone.tokens == one.tokens == other.tokens
        assert alone.tiers == one.tiers == other.tiers


def test_nothing_follows_an_end_of_sequence_inside_a_block():
    model = TableModel(2, 3)
    drafter = SelfDrafter(model, DRAFT)
    requests = [tables.request(seed, 12, eos=(0,)) for seed in range(300)]
    for route in (None, SLIM):
        for result in decode(model, requests, drafter=drafter, route=route):
            assert 0 not in result.tokens[:-1]
            assert result.finish_reason == ("eos" if result.tokens[-1] == 0 else "length")
            assert result.finish_reason == "eos" or len(result.tokens) == 12
            stats = result.stats
            assert stats.num_tokens == len(result.tokens) == len(result.tiers)
            assert len(stats.overshoot) == len(result.tokens) - result.tiers.count("full")
            assert stats.num_checked + stats.num_discarded <= sum(stats.drafted_at) + len(result.tokens)
            assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))


def test_the_tiers_say_who_decided():
    model = TableModel(3, 4)
    plain = decode(model, [tables.request(0, 10)])[0]
    assert set(plain.tiers) == {"full"}
    assert plain.stats.num_full_passes == 10
    two = decode(model, [tables.request(s, 10) for s in range(20)], drafter=SelfDrafter(model, DRAFT))
    assert {tier for result in two for tier in result.tiers} == {"draft", "full"}
    three = decode(model, [tables.request(s, 10) for s in range(20)], drafter=SelfDrafter(model, DRAFT), route=SLIM)
    assert {tier for result in three for tier in result.tiers} == {"draft", "slim", "full"}
    for result in two:
        assert result.tiers.count("draft") == sum(result.stats.accepted_at)
        assert result.stats.num_slim_passes == 0
        assert not any(result.stats.regions.values())


def test_equal_tiers_accept_everything():
    """Where draft, slim and full agree, each full pass settles all that may wait for it."""
    model = TableModel(4, 5)
    model._row = lambda tier, prefix, num_full, row=model._row: row("full", prefix, 0)
    speculation = Speculation(gamma=3, max_pending=8, gate=Gate("ratio", 0.0, 0.0))
    options = {"drafter": SelfDrafter(model, DRAFT), "route": SLIM, "speculation": speculation}
    result = decode(model, [tables.request(0, 26)], **options)[0]
    stats = result.stats
    assert stats.num_changed == stats.num_discarded == 0
    assert stats.rejection_rate == 0.0
    assert stats.pending_acceptance == 1.0
    assert stats.acceptance_by_position == [1.0, 1.0, 1.0]
    assert (stats.num_full_passes, stats.num_slim_passes) == (3, 6)  # 4 + 4 pending and a bonus; then 9 more; then 8
    assert result.tiers[:9] == ["draft"] * 3 + ["slim"] + ["draft"] * 3 + ["slim", "full"]


@pytest.mark.parametrize(("gate", "full_passes"), [(Gate("ratio", 2.0, 2.0), 5), (Gate("ratio", 0.0, 0.0), 2)])
def test_the_gate_decides_when_the_full_model_is_asked(gate, full_passes):
    model = TableModel(4, 6)
    model._row = lambda tier, prefix, num_full, row=model._row: row("full", prefix, 0)
    speculation = Speculation(gamma=1, max_pending=8, gate=gate)
    options = {"drafter": SelfDrafter(model, DRAFT), "route": SLIM, "speculation": speculation}
    result = decode(model, [tables.request(0, 14)], **options)[0]
    assert result.stats.num_full_passes == full_passes
    assert result.stats.regions["C" if gate.escalate > 0 else "A"] > 0


def test_overshoot_is_proposal_minus_full_probability():
    model = TableModel(3, 7)
    result = decode(model, [tables.request(3, 8)], drafter=SelfDrafter(model, DRAFT))[0]
    prefix = [0, 1]
    expected = []
    for token, tier in zip(result.tokens, result.tiers, strict=True):
        if tier == "draft":
            expected.append(model.probs("draft", prefix)[token] - model.probs("full", prefix)[token])
        prefix.append(token)
    assert expected
    assert result.stats.overshoot == pytest.approx(expected, abs=1e-5)


class Recording(SelfDrafter):
    """Notes what the loop tells a drafter."""

    capture_layers = (1, 3)

    def __init__(self, model, route):
        super().__init__(model, route)
        self.contexts, self.verdicts, self.closed, self.drafts = [], [], [], []

    def propose(self, context):
        self.contexts.append([dict(own) for own in context.captured])
        self.drafts.append(super().propose(context))
        return self.drafts[-1]

    def observe(self, verdict):
        self.verdicts.append(verdict)

    def close(self, request_ids):
        self.closed.extend(request_ids)


class Capturing(TableModel):
    """Hands out, as a layer's hidden state, the row's token and position."""

    def forward(self, rows, cache, *, capture_layers=(), **options):
        output = super().forward(rows, cache, **options)
        states = torch.tensor(list(zip(rows.tokens, rows.positions, strict=True)))
        return DecoderOutput(output.logits, {layer: states + 100 * layer for layer in capture_layers})


@pytest.mark.parametrize("route", [None, SLIM], ids=["two", "three"])
def test_a_drafter_sees_captured_states_verdicts_and_the_end(route):
    model = Capturing(4, 13)
    drafter = Recording(model, DRAFT)
    results = decode(model, [tables.request(s, 6 + s) for s in range(3)], drafter=drafter, route=route)
    assert drafter.contexts[0] == [{}, {}, {}]
    assert sorted(drafter.closed) == sorted({id for verdict in drafter.verdicts for id in verdict.request_ids})
    for draft, verdict in zip(drafter.drafts, drafter.verdicts, strict=True):
        for drafted, accepted, token in zip(draft.row_tokens, verdict.accepted, verdict.next_token, strict=True):
            assert drafted[1 : 1 + len(accepted)] == accepted
            assert 0 <= token < 4
    for captured in drafter.contexts[1:]:
        for own in captured:
            assert own.keys() == {1, 3}
            assert torch.equal(own[3], own[1] + 200)
            tokens, positions = (own[1] - 100).T.tolist()
            assert positions == list(range(positions[0], positions[0] + len(positions)))
            sequences = [result.prompt_tokens + result.tokens for result in results]
            if route is None:
                assert any(all(s[p : p + 1] == [t] for t, p in zip(tokens, positions, strict=True)) for s in sequences)


def test_escalating_together_saves_passes():
    model = TableModel(4, 14)
    requests = [tables.request(s, 24) for s in range(12)]
    calls = []
    forward = model.forward
    model.forward = lambda rows, cache, route=None, **o: calls.append(route) or forward(rows, cache, route=route, **o)
    counts = {}
    for together in (False, True):
        calls.clear()
        speculation = Speculation(gamma=2, co_escalate=together)
        decode(model, requests, drafter=SelfDrafter(model, DRAFT), route=SLIM, speculation=speculation)
        counts[together] = calls.count(SLIM)
    assert counts[True] < counts[False]


@pytest.mark.parametrize("criterion", ["ratio", "tv", "kl"])
@pytest.mark.parametrize("width", [6, 9])
def test_regions_follow_the_fused_statistics(criterion, width):
    generator = torch.Generator().manual_seed(0)
    slim, draft = torch.randn(400, 9, generator=generator) * 2, torch.randn(400, width, generator=generator) * 2
    slim[::7, 3] = -torch.inf
    tokens = torch.randint(0, width, (400,), generator=generator)
    stats = acceptance_stats(draft, slim, tokens, temperature=torch.ones(400))
    score = {"ratio": stats.ratio, "tv": stats.tv, "kl": stats.kl_draft_target}[criterion]
    gate = Gate(criterion, 0.6, 0.3) if criterion == "ratio" else Gate(criterion, 0.6, 0.9)
    regions = gate.regions(tokens, slim, draft)
    sign = 1 if criterion == "ratio" else -1
    expected = torch.where(
        sign * score >= sign * gate.accept, 0, torch.where(sign * score < sign * gate.escalate, 2, 1)
    )
    expected = torch.where(stats.target_logprob == -torch.inf, 2, expected)
    assert torch.equal(regions, expected)
    assert regions.unique().tolist() == [0, 1, 2]
    one_hot = torch.arange(400) % 2 == 0
    mixed = gate.regions(tokens, slim, draft, one_hot)
    assert torch.equal(mixed[one_hot], gate.regions(tokens, slim)[one_hot])
    assert torch.equal(mixed[~one_hot], regions[~one_hot])


@pytest.mark.parametrize("gate", [Gate(), Gate("tv", 0.3, 0.6), Gate("kl", 0.2, 0.6)], ids=["ratio", "tv", "kl"])
def test_a_greedy_requests_passes_do_not_depend_on_its_mates(gate):
    model = TableModel(4, 15)
    options = {"drafter": SelfDrafter(model, DRAFT), "route": SLIM, "speculation": Speculation(gate=gate)}
    own = tables.request(0, 30, temperature=0.0)
    alone = decode(model, [own], **options)[0].stats
    beside = decode(model, [own, tables.request(1, 30)], **options)[0].stats
    for count in ("regions", "num_slim_passes", "num_full_passes", "num_checked", "num_changed"):
        assert getattr(alone, count) == getattr(beside, count)


class Fixed(Drafter):
    """Proposes what it is told to."""

    name = "fixed"

    def __init__(self, draft):
        self.draft = draft

    def propose(self, context):
        return self.draft


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([[2, 1]]), "starts with the newest token, got .2."),
        (Draft([[]]), "starts with the newest token"),
        (Draft([[1, 4]]), r"ids must lie in \[0, 4\)"),
        (Draft([[1, -1]]), r"ids must lie in \[0, 4\)"),
        (Draft([[1], [1]]), "expected 1 drafts, got 2"),
        (Draft([[1, *[0] * 9]]), "at most 8 tokens in a row"),
        (Draft([[1, 0, 2]], parents=[[-1, 2, 0]]), "parents before children"),
        (Draft([[1, 0, 2]], parents=[[-1, -1, 0]]), "parents before children"),
        (Draft([[1, 0, 2]], parents=[[-1, 0]]), "one parent per row"),
    ],
)
def test_drafts_that_would_corrupt_the_output_are_refused(draft, message):
    with pytest.raises(InvalidInput, match=f"drafter fixed: .*{message}"):
        decode(TableModel(4, 16), [tables.request(0, 9)], drafter=Fixed(draft))


def test_greedy_requests_take_trees_that_were_drawn():
    model = TableModel(4, 17)
    best = greedy(model, [0, 1], 2)
    wrong = (best[0] + 1) % 4
    tree = Draft([[1, wrong, best[0], best[1]]], None, [[-1, 0, 0, 2]], "without_replacement")
    run = DecodeRun(model, [tables.request(0, 3, temperature=0)], drafter=Fixed(tree))
    next(run.cycles())
    assert run.results[0].tokens == greedy(model, [0, 1], 3)
    assert run.results[0].tiers == ["draft", "draft", "full"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], Sampling(seed=0, eos_token_ids=())), "prompt is empty"),
        (Request([4], Sampling(seed=0, eos_token_ids=())), r"ids must lie in \[0, 4\)"),
        (Request([1] * 64, Sampling(seed=0, eos_token_ids=())), "context holds 64"),
        (Request([1], Sampling(eos_token_ids=())), "seed and sampling.eos_token_ids must be given"),
    ],
)
def test_requests_that_cannot_work_are_refused(request_, message):
    with pytest.raises(InvalidInput, match=message):
        DecodeRun(TableModel(4, 18), [request_])


def test_reported_probabilities_stand_a_tiny_temperature():
    model = TableModel(4, 19)
    model._row = lambda tier, prefix, num_full, row=model._row: row("full", prefix, 0)
    result = decode(model, [tables.request(0, 9, temperature=1e-38)], drafter=SelfDrafter(model, DRAFT))[0]
    assert result.tokens == greedy(model, [0, 1], 9)
    assert result.stats.overshoot == [0.0] * result.tiers.count("draft")


def test_progress_adds_up_to_the_results():
    model = TableModel(5, 8)
    run = DecodeRun(model, [tables.request(s, 5 + s) for s in range(4)], drafter=SelfDrafter(model, DRAFT), route=SLIM)
    gathered = {i: [] for i in range(4)}
    for cycle in run.cycles():
        for progress in cycle:
            gathered[progress.index].extend(progress.tokens)
    assert [gathered[i] for i in range(4)] == [result.tokens for result in run.results]


def test_output_stops_at_the_models_context():
    model = TableModel(3, 9, max_positions=8)
    result = decode(model, [tables.request(0, 50)], drafter=SelfDrafter(model, DRAFT), route=SLIM)[0]
    assert len(result.tokens) == 6
    assert result.finish_reason == "length"


def test_all_slots_come_back():
    model = TableModel(3, 10)
    run = DecodeRun(model, [tables.request(s, 9) for s in range(5)], drafter=SelfDrafter(model, DRAFT), route=SLIM)
    for _ in run.cycles():
        pass
    assert run.cache.pool.take(run.cache.pool.num_slots) == list(range(run.cache.pool.num_slots))


class Breaking(TableModel):
    """Logits of one tier turn into NaN at some depth."""

    def __init__(self, tier, depth):
        super().__init__(4, 11)
        self.tier, self.depth = tier, depth

    def forward(self, rows, cache, *, route=None, **options):
        output = super().forward(rows, cache, route=route, **options)
        logits = output.logits.clone()
        if tables.TIERS[route] == self.tier and "logits_rows" not in options:
            logits[[position >= self.depth for position in rows.positions]] = torch.nan
        return DecoderOutput(logits)


def test_broken_full_logits_keep_what_was_generated():
    broken, sound = Breaking("full", 6), TableModel(4, 11)
    requests = [tables.request(0, 9), tables.request(1, 2)]
    results = decode(broken, requests, drafter=SelfDrafter(broken, DRAFT))
    expected = decode(sound, requests, drafter=SelfDrafter(sound, DRAFT))
    assert results[0].finish_reason == "error"
    assert "TARGET_NOT_FINITE" in results[0].error
    assert results[0].tokens == expected[0].tokens[: len(results[0].tokens)]
    assert len(results[0].tokens) == 5
    assert results[1].tokens == expected[1].tokens


def test_a_broken_slim_tier_leaves_the_work_to_the_full_model():
    model = Breaking("slim", 4)
    prompt = [0, 1]
    requests = [Request(prompt, Sampling(9, seed=0, eos_token_ids=()))]
    result = decode(model, requests, drafter=SelfDrafter(model, DRAFT), route=SLIM)[0]
    assert result.tokens == greedy(model, prompt, 9)


def test_coins_are_never_used_twice():
    model = TableModel(3, 12)
    used = []

    def coins(seeds, draws, n):
        used.extend(zip(seeds.tolist(), draws.tolist(), strict=True))
        return uniforms(seeds, draws, n)

    requests = [tables.request(s, 9) for s in range(6)]
    decode(model, requests, drafter=SelfDrafter(model, DRAFT), route=SLIM, coins=coins)
    assert len(used) == len(set(used)) > 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma must be an integer >= 1, got 0"),
        ({"gamma": 2.0}, "gamma must be an integer"),
        ({"max_pending": -1}, "max_pending must be an integer >= 1, got -1"),
        ({"mode": "fast"}, "mode must be 'exact' or 'tiered', got 'fast'"),
    ],
)
def test_speculation_that_cannot_work_is_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        Speculation(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ratio", 0.3, 0.5), "escalate must be <= accept"),
        (("tv", 0.5, 0.3), "escalate must be >= accept"),
        (("kl", 0.5, 0.3), "escalate must be >= accept"),
        (("ratio", float("nan"), 0.3), "escalate must be <= accept"),
        (("js", 0.1, 0.2), "criterion must be"),
    ],
)
def test_gates_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        Gate(*arguments)
