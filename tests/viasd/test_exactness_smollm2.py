"""Greedy float32 decoding of a real model, token for token beside Transformers' own ``generate``."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import viasd
from viasd.models.embedded import embedded_model
from viasd.report.demo import PROMPTS

TIE = 1e-4  # logits closer than this may be told apart differently by differently shaped matrix products
SPEC_BENCH = Path(__file__).parents[3] / "shared/data/spec_bench_dev.jsonl"

pytestmark = pytest.mark.model


def prompts(count):
    """Short real prompts, over as many categories as there are; the demo's own where the data set is not at hand."""
    if not SPEC_BENCH.exists():
        return [prompt for _, prompt in zip(range(count), PROMPTS * count, strict=False)]
    questions = [json.loads(line) for line in SPEC_BENCH.read_text().splitlines()]
    by_category = {}
    for question in sorted(questions, key=lambda q: len(q["turns"][0])):
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    ordered = [own[i] for i in range(count) for own in by_category.values() if i < len(own)]
    return ordered[:count]


@pytest.fixture(scope="module")
def lm():
    return viasd.load(embedded_model())


@pytest.fixture(scope="module")
def first_layers(lm):
    """A separate draft model: the target's first layers, then its head."""
    config = type(lm.model.config)(**{**lm.model.config.to_dict(), "num_hidden_layers": 6})
    small = LlamaForCausalLM(config).eval()
    small.load_state_dict(lm.model.model.state_dict(), strict=False)
    small.tie_weights()
    return small


class References:
    def __init__(self, lm):
        self.lm = lm
        self.known = {}

    def __call__(self, prompt, new_tokens):
        key = (prompt, new_tokens)
        if key not in self.known:
            ids = viasd.text.encode(messages(prompt), self.lm.tokenizer, 10**9, 10**9)
            inputs = torch.tensor([ids])
            output = self.lm.model.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False
            )
            self.known[key] = ids, output[0, len(ids) :].tolist()
        return self.known[key]


@pytest.fixture(scope="module")
def references(lm):
    return References(lm)


def messages(prompt):
    return [{"role": "user", "content": prompt}]


def check_equal(lm, result, reference, record_property):
    """Equal token for token, or different first at a tie."""
    ids, expected = reference
    if result.tokens == expected:
        return 0
    place = next(i for i, (a, b) in enumerate(zip(result.tokens, expected, strict=False)) if a != b)
    with torch.inference_mode():
        logits = lm.model.model(torch.tensor([ids + expected[:place]])).logits[0, -1]
    ours, theirs = logits[result.tokens[place]].item(), logits[expected[place]].item()
    detail = f"token {place}: ours {result.tokens[place]} (logit {ours:.6f}), theirs {expected[place]} ({theirs:.6f})"
    assert abs(theirs - ours) < TIE, f"{detail}, margin {theirs - ours:.2e}"
    record_property("tie", detail)
    return 1


def run(lm, first_layers, references, record_property, drafter, route, count, new_tokens):
    target = viasd.load(
        lm.model, tokenizer=lm.tokenizer, drafter=first_layers if drafter == "model" else drafter, route=route
    )
    settings = {"max_new_tokens": new_tokens, "eos_token_ids": lm.eos_token_ids}
    chosen = prompts(count)
    ties = 0
    for prompt in chosen:
        result = target.generate(messages(prompt), **settings)
        ties += check_equal(lm, result, references(prompt, new_tokens), record_property)
    together = target.generate([messages(prompt) for prompt in chosen[:4]], **settings)
    assert len({len(result.prompt_tokens) for result in together}) > 1
    for prompt, result in zip(chosen, together, strict=False):
        ties += check_equal(lm, result, references(prompt, new_tokens), record_property)
    print(f"{ties} ties excused among {count + 4} outputs")


CONFIGURATIONS = [
    pytest.param(drafter, route, id=f"{drafter}-{'three' if route else 'two'}")
    for drafter in (None, "prompt-lookup", "self", "model")
    for route in (None, "default")
]


@pytest.mark.parametrize(("drafter", "route"), CONFIGURATIONS)
def test_greedy_is_transformers_own(lm, first_layers, references, record_property, drafter, route):
    run(lm, first_layers, references, record_property, drafter, route, 5, 32)


@pytest.mark.full
@pytest.mark.parametrize(("drafter", "route"), CONFIGURATIONS)
def test_greedy_is_transformers_own_at_length(lm, first_layers, references, record_property, drafter, route):
    run(lm, first_layers, references, record_property, drafter, route, 20, 64)
