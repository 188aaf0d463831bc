"""compat.vllm against oracles in plain Python, and the law of what it emits."""

import pytest
import torch
from compat_cases import metadata, v1_batch, v2_batch
from scipy import stats

from viasd_kernels import uniforms
from viasd_kernels.compat.vllm import COIN_DOMAIN, rejection_sample, rejection_sample_v1

pytestmark = pytest.mark.usefixtures("one_thread")
by_impl = pytest.mark.parametrize("impl", ["reference", "native"])
by_draft = pytest.mark.parametrize("has_draft", [False, True], ids=["one-hot", "drafted"])

FALSE_ALARM = 1e-9


def drawn(weights: list[float], coin: float) -> int:
    total, running = sum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > coin * total:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def chain_oracle(tokens: list[int], target, draft, coins: list[float], greedy: bool) -> tuple[list[int], bool]:
    """The tokens emitted before and at the first rejection, and whether there was one.

    ``target[i]`` and ``draft[i]`` (a list each, or None for one-hot) judge ``tokens[i]`` with coins[i + 1].
    """
    emitted = []
    for place, token in enumerate(tokens):
        q = target[place]
        if greedy:
            best = q.index(max(q))
            emitted.append(best)
            if token != best:
                return emitted, True
            continue
        if token < 0:
            return [*emitted, drawn(q, coins[0])], True
        p = draft[place] if draft is not None else [float(token == v) for v in range(len(q))]
        if not coins[place + 1] * p[token] < q[token]:
            rest = [max(0.0, own - other) for own, other in zip(q, p, strict=True)]
            return [*emitted, drawn(rest if p[token] > 0 else q, coins[0])], True
        emitted.append(token)
    return emitted, False


def padded(emitted: list[int], width: int) -> list[int]:
    return emitted + [-1] * (width - len(emitted))


# ------------------------------------------------------------------------------------------------- model runner V2


def v2_oracle(batch: dict) -> tuple[list[list[int]], list[int]]:
    sampled, steps = [], batch["num_speculative_steps"]
    starts = batch["cu_num_logits"].tolist()
    for request, state in enumerate(batch["idx_mapping"].tolist()):
        span = range(starts[request], starts[request + 1])
        heat = float(batch["temperature"][state])
        target = batch["target_logits"][span[0] : span[-1] + 1]
        target = (target if heat == 0 else target.softmax(-1)).tolist()
        draft = batch["draft_logits"]
        draft = None if draft is None or heat == 0 else (draft[state] / heat).softmax(-1).tolist()
        key = torch.tensor([int(batch["seed"][state])]), torch.tensor([int(batch["pos"][span[0]]) + COIN_DOMAIN])
        coins = uniforms(*key, steps + 1)[0].tolist()
        tokens = batch["draft_sampled"][span[0] + 1 : span[-1] + 1].tolist()
        emitted, rejected = chain_oracle(tokens, target, draft, coins, heat == 0)
        if not rejected:
            last = target[-1]
            emitted.append(last.index(max(last)) if heat == 0 else drawn(last, coins[0]))
        sampled.append(padded(emitted, steps + 1))
    return sampled, [sum(token >= 0 for token in own) for own in sampled]


@by_impl
@by_draft
def test_v2_is_rejection_sampling(has_draft, impl) -> None:
    lengths = set()
    for seed in range(40):
        batch = v2_batch(seed, has_draft)
        sampled, num_sampled = rejection_sample(**batch, impl=impl)
        expected, expected_num = v2_oracle(batch)
        assert sampled.tolist() == expected, seed
        assert num_sampled.tolist() == expected_num
        assert (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)
        lengths |= set(expected_num)
    assert lengths == {1, 2, 3, 4, 5}


def test_v2_a_request_does_not_depend_on_its_mates() -> None:
    batch = v2_batch(5, True)
    sampled, _ = rejection_sample(**batch)
    starts = batch["cu_num_logits"].tolist()
    for request in range(6):
        alone = slice(starts[request], starts[request + 1])
        rows = {name: batch[name][alone] for name in ("target_logits", "draft_sampled", "pos")}
        rows |= {name: batch[name][alone] for name in ("expanded_idx_mapping", "expanded_local_pos")}
        rows |= {"cu_num_logits": torch.tensor([0, alone.stop - alone.start])}
        got, _ = rejection_sample(**(batch | rows | {"idx_mapping": batch["idx_mapping"][request : request + 1]}))
        assert torch.equal(got[0], sampled[request])


def v2_tails(has_draft: bool, scaled_before: bool = False, vocab: int = 6, trials: int = 60_000) -> list[float]:
    """Chi-square of the first token, and of the second behind each accepted one, of many requests with the same laws.

    Drafted from the proposal at the request's temperature, or, without one, its likeliest tokens.
    """
    generator = torch.Generator().manual_seed(2)
    heat, steps = 0.5, 2
    full, noise = torch.randn(2, vocab, vocab, generator=generator)
    draft = full + noise
    law = (draft / heat).softmax(-1)
    tokens = torch.zeros(trials, steps + 1, dtype=torch.int64)
    for place in range(steps):
        rows = law[tokens[:, place]]
        chosen = torch.multinomial(rows, 1, generator=generator).squeeze(1) if has_draft else rows.argmax(-1)
        tokens[:, place + 1] = chosen
    request, local = torch.arange(trials), torch.arange(steps + 1)
    proposals = draft[tokens[:, :steps]]
    sampled, num_sampled = rejection_sample(
        (full / heat)[tokens.flatten()],
        (proposals / heat if scaled_before else proposals) if has_draft else None,
        tokens.flatten(),
        torch.arange(trials + 1) * (steps + 1),
        local.repeat(trials),
        request,
        request.repeat_interleave(steps + 1),
        local.repeat(trials),
        torch.full((trials,), heat),
        request * 7919,
        steps,
    )
    target = (full.double() / heat).softmax(-1)
    tails = [stats.chisquare(sampled[:, 0].bincount(minlength=vocab), target[0] * trials).pvalue]
    for token in range(vocab):
        after = sampled[(sampled[:, 0] == token) & (num_sampled > 1), 1]
        if len(after) > 500:
            tails.append(stats.chisquare(after.bincount(minlength=vocab), target[token] * len(after)).pvalue)
    assert len(tails) >= 2
    return tails


@by_draft
def test_v2_chi_square_is_the_targets(has_draft) -> None:
    assert min(v2_tails(has_draft)) > FALSE_ALARM


def test_v2_chi_square_notices_a_draft_that_was_scaled_before() -> None:
    assert min(v2_tails(True, scaled_before=True)) < FALSE_ALARM


def test_v2_draft_over_fewer_or_more_ids_than_the_target() -> None:
    batch = v2_batch(8, True)
    wide = batch["draft_logits"]
    shut = wide.clone()
    shut[..., 5:] = float("-inf")
    assert torch.equal(
        rejection_sample(**(batch | {"draft_logits": wide[..., :5].contiguous()}))[0],
        rejection_sample(**(batch | {"draft_logits": shut}))[0],
    )
    more = torch.nn.functional.pad(wide, (0, 3), value=9.0)
    assert torch.equal(rejection_sample(**(batch | {"draft_logits": more}))[0], rejection_sample(**batch)[0])


def test_v2_a_target_without_a_distribution_ends_a_request_without_a_token() -> None:
    batch = v2_batch(1, False)
    begin, end = batch["cu_num_logits"][3:5].tolist()
    before, _ = rejection_sample(**batch)
    batch["target_logits"][begin:end] = float("nan")
    sampled, num_sampled = rejection_sample(**batch)
    assert sampled[3].tolist() == [-1] * 5
    assert int(num_sampled[3]) == 0
    others = torch.arange(6) != 3
    assert torch.equal(sampled[others], before[others])


def test_v2_without_requests_or_drafts() -> None:
    batch = v2_batch(1, True)
    empty = {name: batch[name][:0] for name in ("target_logits", "draft_sampled", "pos", "idx_mapping")}
    sampled, num_sampled = rejection_sample(**(batch | empty | {"cu_num_logits": torch.zeros(1, dtype=torch.int32)}))
    assert sampled.shape == (0, 5)
    assert num_sampled.shape == (0,)
    rows = {"cu_num_logits": torch.arange(7), "num_speculative_steps": 0, "draft_logits": batch["draft_logits"][:, :0]}
    rows |= {name: batch[name][:6] for name in ("target_logits", "draft_sampled", "pos")}
    sampled, num_sampled = rejection_sample(**(batch | rows))
    assert sampled.shape == (6, 1)
    assert num_sampled.tolist() == [1] * 6


@pytest.mark.parametrize(
    "option",
    [
        {"synthetic_conditional_rates": torch.ones(4)},
        {"use_block_verification": True},
        {"contexts": torch.zeros(1, 1)},
        {"watermark_key": 0},
        {"fly_window_size": 2},
    ],
    ids=lambda option: next(iter(option)),
)
def test_v2_what_changes_the_law_is_refused(option) -> None:
    with pytest.raises(NotImplementedError, match=f"rejection_sample: {next(iter(option))} is not offered"):
        rejection_sample(**v2_batch(0, True), **option)


def test_v2_arguments_are_checked() -> None:
    batch = v2_batch(0, True)
    with pytest.raises(ValueError, match=r"draft_logits must have shape \[9, 4, any\], got \[9, 3, 7\]"):
        rejection_sample(**(batch | {"draft_logits": batch["draft_logits"][:, :3]}))
    with pytest.raises(TypeError, match=r"seed must be torch\.int64, got torch\.int32"):
        rejection_sample(**(batch | {"seed": batch["seed"].int()}))
    with pytest.raises(ValueError, match=r"idx_mapping must have shape \[6\], got \[5\]"):
        rejection_sample(**(batch | {"idx_mapping": batch["idx_mapping"][:5]}))


# ------------------------------------------------------------------------------------------------- model runner V1


def v1_oracle(batch: dict, seed: int) -> list[list[int]]:
    sampled, first = [], 0
    for request, count in enumerate(batch["num_draft_tokens"]):
        greedy = batch["sampling_metadata"].all_greedy or not batch["sampling_metadata"].temperature[request] > 0
        own = slice(first, first + count)
        target = batch["target_logits"][own]
        draft = None if batch["draft_probs"] is None else batch["draft_probs"][own].tolist()
        generator = torch.Generator().manual_seed(1000 * seed + request)
        coins = torch.empty(count + 1, dtype=torch.float64).uniform_(generator=generator).tolist()
        target = (target if greedy else target.softmax(-1)).tolist()
        tokens = batch["draft_token_ids"][own].tolist()
        emitted, rejected = chain_oracle(tokens, target, draft, coins, greedy)
        if not rejected:
            emitted.append(100 + request)
        sampled.append(padded(emitted, batch["max_spec_len"] + 1))
        first += count
    return sampled


@by_impl
@by_draft
def test_v1_is_rejection_sampling(has_draft, impl) -> None:
    bonuses = 0
    for seed in range(40):
        sampled = rejection_sample_v1(**v1_batch(seed, has_draft), impl=impl)
        assert sampled.tolist() == v1_oracle(v1_batch(seed, has_draft), seed), seed
        assert sampled.dtype == torch.int32
        bonuses += int((sampled >= 100).sum())
    assert 80 < bonuses < 240  # the two requests without a draft always have theirs


def test_v1_all_greedy_needs_no_temperature() -> None:
    batch = v1_batch(3, True)
    batch["sampling_metadata"] = metadata(None, all_greedy=True)
    assert rejection_sample_v1(**batch).tolist() == v1_oracle(batch, 3)


def test_v1_only_requests_with_a_draft_advance_their_generators() -> None:
    batch = v1_batch(4, True)
    rejection_sample_v1(**batch)
    for request, generator in batch["sampling_metadata"].generators.items():
        fresh = torch.Generator().manual_seed(4000 + request).get_state()
        assert torch.equal(generator.get_state(), fresh) == (batch["num_draft_tokens"][request] == 0)


def v1_tails(wrong: bool, vocab: int = 6, trials: int = 60_000) -> float:
    generator = torch.Generator().manual_seed(2)
    full, draft = torch.randn(2, vocab, generator=generator)
    tokens = torch.multinomial(draft.softmax(-1), trials, replacement=True, generator=generator)
    torch.manual_seed(5)
    sampled = rejection_sample_v1(
        tokens,
        [1] * trials,
        1,
        torch.arange(1, trials + 1),
        (full if wrong else draft).softmax(-1).expand(trials, -1),
        full.expand(trials, -1),
        torch.zeros(trials, 1, dtype=torch.int32),
        metadata(torch.ones(trials)),
    )
    counts = sampled[:, 0].bincount(minlength=vocab)
    return float(stats.chisquare(counts, full.double().softmax(-1) * trials).pvalue)


def test_v1_chi_square_is_the_targets() -> None:
    assert v1_tails(wrong=False) > FALSE_ALARM


def test_v1_chi_square_notices_a_wrong_proposal() -> None:
    assert v1_tails(wrong=True) < FALSE_ALARM


def test_v1_without_drafts_or_requests() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    for batch in (0, 2):
        bonus = torch.full((batch, 1), 5)
        starts, heat = torch.zeros(batch, dtype=torch.int32), metadata(torch.ones(batch))
        sampled = rejection_sample_v1(none, [0] * batch, 3, starts, None, torch.zeros(0, 4), bonus, heat)
        assert sampled.tolist() == [[5, -1, -1, -1]] * batch


@pytest.mark.parametrize(
    "option", [{"synthetic_mode": True}, {"fly_window_size": 3}], ids=lambda option: next(iter(option))
)
def test_v1_what_changes_the_law_is_refused(option) -> None:
    with pytest.raises(NotImplementedError, match=f"rejection_sample_v1: {next(iter(option))} is not offered"):
        rejection_sample_v1(**v1_batch(0, True), **option)


def test_v1_arguments_are_checked() -> None:
    batch = v1_batch(0, True)
    with pytest.raises(ValueError, match=r"draft_probs must have shape \[10, 7\], got \[9, 7\]"):
        rejection_sample_v1(**(batch | {"draft_probs": batch["draft_probs"][:9]}))
    with pytest.raises(ValueError, match=r"bonus_token_ids must have shape \[6, 1\], got \[6\]"):
        rejection_sample_v1(**(batch | {"bonus_token_ids": batch["bonus_token_ids"].squeeze(1)}))
