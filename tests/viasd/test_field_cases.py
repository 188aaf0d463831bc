"""Faults that users of other engines reported, on both paths, greedy and sampled, one request and four."""

import itertools
import math

import pytest
import torch

import viasd
from tiny_models import tiny
from viasd import InvalidInput, Speculation
from viasd.drafters import Draft, Drafter, PromptLookup
from viasd.models import DecoderOutput

PROMPTS = [[5, 6, 7, 8, 5, 6], [11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27, 28], [40]]
SPECULATION = Speculation(gamma=5, adaptive=False)
WIDE = Speculation(gamma=5, adaptive=False, max_pending=4)


class Knowing(Drafter):
    """Proposes what it is told that the output will be, every third time with one wrong token in it."""

    name = "knowing"

    def __init__(self, outputs):
        self.outputs = {tuple(prompt): output for prompt, output in outputs}
        self.num_calls = 0

    def propose(self, context):
        self.num_calls += 1
        row_tokens = []
        for tokens, limit in zip(context.tokens, context.max_tokens, strict=True):
            prompt = next(p for p in self.outputs if tuple(tokens[: len(p)]) == p)
            done = len(tokens) - len(prompt)
            draft = self.outputs[prompt][done : done + max(limit, 0)]
            if draft and self.num_calls % 3 == 0:
                draft[len(draft) // 2] = (draft[len(draft) // 2] + 1) % 97
            row_tokens.append([tokens[-1], *draft])
        return Draft(row_tokens)


@pytest.fixture(scope="module", params=["native", "transformers"])
def path(request):
    module = tiny("llama")
    torch.manual_seed(1)
    with torch.no_grad():  # initialised as they come, the logits hardly differ
        module.lm_head.weight.mul_(12.0)
    return module, viasd.load(module, drafter=None, implementation=request.param)


@pytest.fixture(params=[1, 4], ids=["one", "four"])
def prompts(request):
    return PROMPTS[: request.param]


temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
routes = pytest.mark.parametrize("route", [None, "default"], ids=["two", "three"])


def speculating(path, drafter, route=None, speculation=SPECULATION):
    _, plain = path
    if drafter == "self":
        return viasd.load(plain.model, drafter="self", route=route, speculation=speculation)
    return viasd.load(plain.model, drafter=drafter, route=route, speculation=speculation)


def teacher_forced(module, prompt, tokens):
    """[n, V] the full model's logits behind each of the tokens."""
    with torch.no_grad():
        logits = module(torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1]


def knowing(path, prompts, n=24, **settings):
    """A drafter that knows the greedy output, and that output."""
    _, plain = path
    outputs = [result.tokens for result in plain.generate(prompts, max_new_tokens=n, **settings)]
    return Knowing(list(zip(prompts, outputs, strict=True))), outputs


@temperatures
@routes
def test_nothing_exists_after_an_end_inside_an_accepted_block(path, prompts, temperature, route):
    drafter, outputs = knowing(path, prompts)
    ends = {output[7] for output in outputs}
    lm = speculating(path, drafter, route)
    seen = []
    results = lm.generate(
        prompts,
        max_new_tokens=24,
        temperature=temperature,
        seed=3,
        logprobs=2,
        eos_token_ids=ends,
    )
    for output, result in zip(outputs, results, strict=True):
        seen.append(result.tokens)
        assert not ends & set(result.tokens[:-1])
        assert (result.finish_reason == "eos") == (result.tokens[-1] in ends)
        assert len(result.logprobs) == len(result.tiers) == len(result.tokens) == result.stats.num_tokens
        assert sum(result.stats.accepted_at) <= len(result.tokens)
        if temperature == 0:
            first = next(i for i, token in enumerate(output) if token in ends)
            assert result.tokens == output[: first + 1]


@temperatures
@routes
def test_a_stop_criterion_inside_an_accepted_block(path, prompts, temperature, route):
    drafter, outputs = knowing(path, prompts)
    asked = []

    def stopping(tokens):
        asked.append(list(tokens))
        return len(tokens) % 7 == 0

    lm = speculating(path, drafter, route)
    results = lm.generate(prompts, max_new_tokens=24, temperature=temperature, seed=4, logprobs=0, stopping=stopping)
    for prompt, output, result in zip(prompts, outputs, results, strict=True):
        assert len(prompt) + len(result.tokens) == 7 * (len(prompt) // 7 + 1)
        assert result.finish_reason == "stop"
        assert len(result.logprobs) == len(result.tokens)
        assert [*prompt, *result.tokens] in asked
        if temperature == 0:
            assert result.tokens == output[: len(result.tokens)]


@temperatures
@routes
def test_log_probabilities_are_the_plain_runs(path, prompts, temperature, route):
    """At accepted, recovered and bonus positions."""
    module, plain = path
    lm = speculating(path, plain.model if temperature else knowing(path, prompts)[0], route, WIDE)
    tiers = set()
    for prompt, result in zip(
        prompts,
        lm.generate(prompts, max_new_tokens=20, temperature=temperature, top_k=20, seed=5, logprobs=5),
        strict=True,
    ):
        expected = teacher_forced(module, prompt, result.tokens).log_softmax(-1)
        values = expected.topk(5).values
        for i, (token, given) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
            assert given.logprob == pytest.approx(float(expected[i, token]), abs=2e-4)
            assert [value for _, value in given.top] == pytest.approx(values[i].tolist(), abs=2e-4)
            assert [float(expected[i, id]) for id, _ in given.top] == pytest.approx(values[i].tolist(), abs=2e-4)
        tiers |= set(result.tiers)
    assert {"draft", "full"} <= tiers


PENALTIES = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 3.0, "repetition_penalty": 1.5},
    {"bad_words": [[5], [6, 7], [20, 21, 22]], "logit_bias": {9: 4.0, 10: -math.inf}},
    {"min_new_tokens": 6, "eos_token_ids": (5, 6, 7, 8, 9)},
]


class Stubborn(Drafter):
    """Proposes its newest token again and again."""

    def propose(self, context):
        pairs = zip(context.tokens, context.max_tokens, strict=True)
        return Draft([[tokens[-1]] * (1 + max(limit, 0)) for tokens, limit in pairs])


@pytest.mark.parametrize("settings", PENALTIES, ids=lambda own: next(iter(own)) + str(next(iter(own.values()))))
@pytest.mark.parametrize("drafter", [Stubborn, PromptLookup, "self"])
@routes
def test_penalties_count_position_by_position(path, prompts, drafter, settings, route):
    _, plain = path
    expected = [result.tokens for result in plain.generate(prompts, max_new_tokens=16, **settings)]
    unpenalised = [result.tokens for result in plain.generate(prompts, max_new_tokens=16)]
    assert expected != unpenalised
    lm = speculating(path, drafter if drafter == "self" else drafter(), route)
    results = lm.generate(prompts, max_new_tokens=16, **settings)
    assert [result.tokens for result in results] == expected


@temperatures
@routes
def test_a_grammar_masks_each_position_by_itself(path, prompts, temperature, route):
    """Ids must rise modulo 10; the callback never sees a sequence that breaks the rule."""

    def rising(tokens, logits):
        assert all(b % 10 == (a + 1) % 10 for a, b in itertools.pairwise(tokens[lengths[tokens[0]] - 1 :]))
        allowed = torch.arange(len(logits)) % 10 == (tokens[-1] + 1) % 10
        return logits.masked_fill(~allowed, -torch.inf)

    lengths = {prompt[0]: len(prompt) for prompt in prompts}
    _, plain = path
    for drafter in (Stubborn(), PromptLookup(min_match=1), "self"):
        lm = speculating(path, drafter, route)
        results = lm.generate(prompts, max_new_tokens=15, temperature=temperature, seed=6, logits_processor=rising)
        for prompt, result in zip(prompts, results, strict=True):
            digits = [prompt[-1] % 10, *(token % 10 for token in result.tokens)]
            assert all(b == (a + 1) % 10 for a, b in itertools.pairwise(digits))
        if temperature == 0:
            same = plain.generate(prompts, max_new_tokens=15, logits_processor=rising)
            assert [result.tokens for result in results] == [result.tokens for result in same]


@routes
def test_settings_of_one_request_leave_its_mates_alone(path, route):
    """Temperature 0 beside 1, min-p and a bias in one request of several, seeds in any order."""
    _, plain = path
    lm = speculating(path, "self", route)
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "logit_bias": {3: 5.0}, "frequency_penalty": 1.0},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.9},
    ]
    requests = [
        viasd.Request(prompt, viasd.Sampling(20, seed=40 + i, eos_token_ids=(), **own))
        for i, (prompt, own) in enumerate(zip(PROMPTS, settings, strict=True))
    ]

    def decode(requests):
        run = viasd.DecodeRun(lm.model, requests, drafter=lm.drafter, route=lm.route, speculation=SPECULATION)
        for _ in run.cycles():
            pass
        return [result.tokens for result in run.results]

    together = decode(requests)
    assert decode(requests[::-1])[::-1] == together
    assert [decode([request])[0] for request in requests] == together
    assert together[0] == plain.generate(PROMPTS[0], max_new_tokens=20).tokens


class Tampered:
    """A model whose logits some function changes on their way out."""

    def __init__(self, model, change):
        self._model, self._change = model, change

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, rows, cache, **options):
        output = self._model.forward(rows, cache, **options)
        return DecoderOutput(self._change(rows, output.logits.clone()), output.captured)


@temperatures
def test_a_broken_target_row_emits_nothing(path, prompts, temperature):
    def breaking(rows, logits):
        if len(logits) == len(rows.positions):
            logits[[position == len(prompts[0]) + 3 for position in rows.positions]] = torch.nan
        return logits

    drafter, outputs = knowing(path, prompts)
    lm = viasd.load(Tampered(path[1].model, breaking), drafter=drafter, speculation=SPECULATION)
    with pytest.raises(viasd.DecodeError, match="prompt 0: the full model's logits are broken") as raised:
        lm.generate(prompts, max_new_tokens=24, temperature=temperature, seed=8)
    broken = raised.value.results[0]
    assert broken.finish_reason == "error"
    assert len(broken.tokens) == 4
    if temperature == 0:
        assert broken.tokens == outputs[0][:4]
    for prompt, output, result in zip(prompts, outputs, raised.value.results, strict=True):
        if len(prompt) > len(prompts[0]) + 3:
            assert len(result.tokens) == 24
            assert temperature or result.tokens == output


@temperatures
def test_a_broken_draft_row_counts_as_rejected(path, prompts, temperature):
    class Broken(Drafter):
        name = "broken"

        def propose(self, context):
            pairs = zip(context.tokens, context.max_tokens, strict=True)
            row_tokens = [[tokens[-1], 0, 0][: 1 + max(limit, 0)] for tokens, limit in pairs]
            if temperature == 0:
                return Draft(row_tokens)
            return Draft(row_tokens, torch.full((sum(map(len, row_tokens)), 97), torch.nan))

    _, plain = path
    lm = speculating(path, Broken())
    results = lm.generate(prompts, max_new_tokens=12, temperature=temperature, seed=9)
    assert all(len(result.tokens) == 12 for result in results)
    if temperature == 0:
        assert [r.tokens for r in results] == [r.tokens for r in plain.generate(prompts, max_new_tokens=12)]
    else:
        assert not any("draft" in result.tiers for result in results)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@routes
def test_a_rejection_past_a_sliding_window_leaves_the_right_keys(implementation, route):
    module = tiny("mistral")
    plain = viasd.load(module, drafter=None, implementation=implementation)
    outputs = [result.tokens for result in plain.generate(PROMPTS, max_new_tokens=40)]
    lm = viasd.load(
        plain.model, drafter=Knowing(list(zip(PROMPTS, outputs, strict=True))), route=route, speculation=WIDE
    )
    results = lm.generate(PROMPTS, max_new_tokens=40)
    assert [result.tokens for result in results] == outputs
    assert all(result.stats.num_changed > 0 for result in results)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == teacher_forced(module, prompt, output).argmax(-1).tolist()


@temperatures
def test_drafting_stops_where_the_drafters_context_ends(path, prompts, temperature):
    small = viasd.load(tiny("llama", num_hidden_layers=2, max_position_embeddings=12), drafter=None)
    lm = speculating(path, small.model)
    results = lm.generate(prompts, max_new_tokens=30, temperature=temperature, seed=10)
    assert all(len(result.tokens) == 30 for result in results)
    if temperature == 0:
        plain = path[1].generate(prompts, max_new_tokens=30)
        assert [result.tokens for result in results] == [result.tokens for result in plain]


def test_bfloat16_differs_only_where_the_margin_is_below_rounding():
    module = tiny("llama").bfloat16()
    plain = viasd.load(module, drafter=None)
    assert plain.model.implementation == "native"
    outputs = [result.tokens for result in plain.generate(PROMPTS, max_new_tokens=40)]
    lm = viasd.load(plain.model, drafter=Knowing(list(zip(PROMPTS, outputs, strict=True))), speculation=SPECULATION)
    for prompt, output, result in zip(PROMPTS, outputs, lm.generate(PROMPTS, max_new_tokens=40), strict=True):
        differing = [i for i, pair in enumerate(zip(output, result.tokens, strict=True)) if pair[0] != pair[1]]
        if differing:
            logits = teacher_forced(module, prompt, output)[differing[0]].float()
            best = logits.topk(2).values
            assert float(best[0] - best[1]) <= 2 * float(best[0].abs()) * 2**-8


def test_ids_beyond_the_vocabulary_are_named(path):
    _, plain = path
    with pytest.raises(InvalidInput, match=r"logit_bias: ids must lie in \[0, 97\), got 97"):
        plain.generate([5], logit_bias={97: 1.0})
    with pytest.raises(InvalidInput, match=r"bad_words: ids must lie in \[0, 97\), got 100"):
        plain.generate([5], bad_words=[[1, 100]])
    with pytest.raises(InvalidInput, match="stop: stop strings need a tokenizer"):
        plain.generate([5], stop="x")
    with pytest.raises(InvalidInput, match="best_of is not a setting; there are max_new_tokens"):
        plain.generate([5], best_of=2)
    with pytest.raises(InvalidInput, match=r"logits_processor must return logits of shape \[97\], got \[96\]"):
        plain.generate([5], logits_processor=lambda tokens, logits: logits[1:])
