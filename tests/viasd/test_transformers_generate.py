"""``model.generate(custom_generate=viasd.transformers_generate())`` beside plain ``generate``."""

import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import viasd
from tiny_models import tiny
from viasd import InvalidInput, Speculation, UnsupportedModel
from viasd.integrations import HUB_FOLDER

FIXED = Speculation(gamma=5, adaptive=False)
IDS = torch.tensor([[0, 0, 0, 5, 6, 7, 5, 6], [9, 8, 7, 9, 8, 7, 9, 8], [0, 0, 11, 12, 13, 11, 12, 13], [0] * 7 + [40]])
MASK = (IDS != 0).long()
DRAFTERS = {"lookup": viasd.PromptLookup(min_match=1), "self": "self"}


def sharpened(family):
    model = tiny(family, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    with torch.no_grad():  # initialised as they come, the logits hardly differ
        model.get_output_embeddings().weight.mul_(12.0)
    return model


@pytest.fixture(scope="module", params=["llama", "gpt_neox"], ids=["native", "generic"])
def model(request):
    return sharpened(request.param)


@pytest.fixture(params=[1, 4], ids=["one", "four"])
def inputs(request):
    if request.param == 1:
        return {"input_ids": IDS[1:2]}
    return {"input_ids": IDS, "attention_mask": MASK}


def ours(model, inputs, drafter="lookup", route=None, **options):
    names = ("tokenizer", "streamer", "assistant_model", "stop_strings")
    given = {name: options.pop(name) for name in names if name in options}
    decode = viasd.transformers_generate(drafter=DRAFTERS[drafter], route=route, speculation=FIXED, **given)
    return model.generate(**inputs, custom_generate=decode, **options)


def plain(model, inputs, **options):
    return model.generate(**inputs, **options)


SETTINGS = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.6},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [6, 7], [9, 8]]},
    "minimum": {"min_new_tokens": 8, "eos_token_id": list(range(3, 60))},
    "end": {"eos_token_id": list(range(3, 30))},
    "forced end": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "suppressed": {"suppress_tokens": list(range(0, 90, 2)), "begin_suppress_tokens": [51, 53]},
    "bias": {"sequence_bias": [[[5], 6.0], [[6, 7], -9.0]]},
    "prefix": {"prefix_allowed_tokens_fn": lambda b, ids: [10 + b, 20 + b, 30 + len(ids) % 5]},
    "encoder": {"encoder_repetition_penalty": 1.5},
    "decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 7},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("route", [None, "default"], ids=["two", "three"])
def test_greedy_equals_plain_generate(model, inputs, route, settings):
    options = {"max_new_tokens": 14, "do_sample": False, **settings}
    expected = plain(model, inputs, **options)
    for drafter in DRAFTERS:
        assert torch.equal(ours(model, inputs, drafter, route, **options), expected)


def test_return_dict_has_the_same_scores_and_logits(model, inputs):
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 7, "repetition_penalty": 1.3}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, got = plain(model, inputs, **options), ours(model, inputs, **options)
    assert type(got) is type(expected)
    assert torch.equal(got.sequences, expected.sequences)
    lengths = (got.sequences[:, inputs["input_ids"].shape[1] :] != 0).sum(-1)
    for name in ("scores", "logits"):
        assert len(getattr(got, name)) == len(getattr(expected, name))
        for i, (one, other) in enumerate(zip(getattr(got, name), getattr(expected, name), strict=True)):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            assert torch.allclose(one[lengths > i], other[lengths > i], atol=1e-3)
    without = ours(model, inputs, max_new_tokens=3, return_dict_in_generate=True, do_sample=False)
    assert without.scores is None
    assert without.logits is None


def test_a_greedy_call_leaves_torchs_generator_alone(model, inputs):
    ours(model, inputs, max_new_tokens=3, do_sample=False)  # prepares
    before = torch.get_rng_state()
    ours(model, inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


class Recording(LogitsProcessor):
    """Notes the ids that it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0]
        self.seen.append(input_ids.tolist())
        return scores


def test_a_processor_sees_what_precedes_each_position(model, inputs):
    recording = Recording()
    output = ours(model, inputs, max_new_tokens=12, do_sample=False, logits_processor=LogitsProcessorList([recording]))
    width = inputs["input_ids"].shape[1]
    for b, row in enumerate(output.tolist()):
        # With the row's own padding, and for every position of the output at least once.
        own = [call[b] for call in recording.seen if call[b][:width] == row[:width]]
        for length in range(width, len(row)):
            assert row[:length] in own


class StopsAt(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        wanted = torch.arange(len(input_ids)) * 2 + 11
        return input_ids.shape[1] >= wanted


def test_stopping_criteria_end_each_row_inside_a_block(model, inputs):
    criteria = StoppingCriteriaList([StopsAt()])
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 96, "stopping_criteria": criteria}
    expected = plain(model, inputs, **options)
    assert torch.equal(ours(model, inputs, **options), expected)
    assert expected.shape[1] < 30


CHARACTERS = ["<pad>", *map(chr, range(32, 127)), "\n"]


def tokenizer():
    backend = Tokenizer(models.WordLevel({char: i for i, char in enumerate(CHARACTERS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<pad>", pad_token="<pad>")


def test_stop_strings_end_the_output_inside_a_block(model, inputs):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 96}
    free = plain(model, inputs, **options)
    width = inputs["input_ids"].shape[1]
    strings = ["".join(CHARACTERS[token] for token in free[0, width + 5 : width + 7])]
    expected = plain(model, inputs, **options, tokenizer=tokenizer(), stop_strings=strings)
    got = ours(model, inputs, **options, tokenizer=tokenizer(), stop_strings=strings)
    assert torch.equal(got, expected)
    assert len(got[0]) < len(free[0]) or len(got) > 1
    with pytest.raises(InvalidInput, match="stop_strings: the tokenizer must be given too"):
        viasd.transformers_generate(stop_strings="x")


class Collecting(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.ended += 1


def test_streamers_get_the_prompt_every_token_and_the_end(model, capsys):
    inputs, options = {"input_ids": IDS[1:2]}, {"max_new_tokens": 9, "do_sample": False}
    expected, got = Collecting(), Collecting()
    plain(model, inputs, streamer=expected, **options)
    ours(model, inputs, streamer=got, **options)
    assert (got.pieces, got.ended) == (expected.pieces, 1)
    ours(model, inputs, streamer=TextStreamer(tokenizer(), skip_prompt=True), **options)
    printed = capsys.readouterr().out.strip("\n")
    assert printed == "".join(CHARACTERS[token] for token in itertools.chain(*got.pieces[1:])).strip("\n")
    iterator = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=ours, args=(model, inputs), kwargs={"streamer": iterator, **options})
    thread.start()
    assert "".join(iterator).strip("\n") == printed
    thread.join()


def test_sampling_follows_the_processors_law():
    """Two tokens of a small vocabulary against the exact law of plain sampling, and a law that must not fit."""
    from scipy.stats import chi2

    model = sharpened_small()
    prompt = [1, 3, 1, 3, 1]
    settings = {"do_sample": True, "temperature": 1.4, "top_k": 5, "top_p": 0.95, "repetition_penalty": 1.2}

    def law(**settings):
        processors = model._get_logits_processor(
            generation_config=model._prepare_generation_config(GenerationConfig(**settings))[0],
            input_ids_seq_length=len(prompt),
            logits_processor=LogitsProcessorList(),
        )

        def probs(ids):
            ids = torch.tensor([ids])
            with torch.no_grad():
                return processors(ids, model(ids).logits[:, -1].float()).softmax(-1)[0].tolist()

        first = probs(prompt)
        return {(a, b): p * q for a, p in enumerate(first) if p > 0 for b, q in enumerate(probs([*prompt, a])) if q > 0}

    torch.manual_seed(0)
    trials = 3000
    decode = viasd.transformers_generate(drafter="self", speculation=FIXED)
    output = model.generate(torch.tensor([prompt] * trials), custom_generate=decode, max_new_tokens=2, **settings)
    counts = {}
    for pair in map(tuple, output[:, len(prompt) :].tolist()):
        counts[pair] = counts.get(pair, 0) + 1

    def pvalue(expected):
        if not counts.keys() <= expected.keys():
            return 0.0
        cells = [(counts.get(pair, 0), trials * prob) for pair, prob in expected.items() if trials * prob >= 5]
        rest = (trials - sum(seen for seen, _ in cells), trials - sum(mean for _, mean in cells))
        cells += [rest] if rest[1] >= 5 else []
        return float(chi2.sf(sum((seen - mean) ** 2 / mean for seen, mean in cells), len(cells) - 1))

    assert pvalue(law(**settings)) > 1e-6
    assert pvalue(law(**{**settings, "temperature": 1.0})) < 1e-6
    torch.manual_seed(5)
    one = model.generate(torch.tensor([prompt]), custom_generate=decode, max_new_tokens=20, **settings)
    torch.manual_seed(5)
    assert torch.equal(
        one, model.generate(torch.tensor([prompt]), custom_generate=decode, max_new_tokens=20, **settings)
    )


def sharpened_small():
    model = tiny("llama", vocab_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12.0)
    return model


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 11:
            raise RuntimeError("no more")
        return scores


def everything(model):
    """All that a stranger could notice of a model."""
    state = {name: (weight.data_ptr(), weight._version) for name, weight in model.state_dict(keep_vars=True).items()}
    parts = {
        name: (type(part), sorted(vars(part)), list(part._modules), len(part._forward_hooks), part.training)
        for name, part in model.named_modules()
    }
    return state, parts, copy.deepcopy(model.generation_config.to_dict()), copy.deepcopy(model.config.to_dict())


def test_the_model_stays_as_it_was_after_an_exception_and_under_two_threads(model):
    before = everything(model)
    with pytest.raises(RuntimeError, match="no more"):
        ours(model, {"input_ids": IDS[1:2]}, max_new_tokens=9, logits_processor=LogitsProcessorList([Failing()]))
    assert everything(model) == before
    decode = viasd.transformers_generate(drafter="self", route="default", speculation=FIXED)
    expected = [plain(model, {"input_ids": IDS[i : i + 1, 3:]}, max_new_tokens=15, do_sample=False) for i in (1, 2)]
    outputs = {}

    def decode_one(i):
        for _ in range(3):
            outputs[i] = model.generate(IDS[i : i + 1, 3:], custom_generate=decode, max_new_tokens=15, do_sample=False)

    threads = [threading.Thread(target=decode_one, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(outputs[i], one) for i, one in zip((1, 2), expected, strict=True))
    assert everything(model) == before


def test_a_kept_object_sees_new_weights_and_lets_models_go():
    model, decode = sharpened("llama"), viasd.transformers_generate(speculation=FIXED)
    options = {"max_new_tokens": 10, "do_sample": False}
    model.generate(IDS[1:2], custom_generate=decode, **options)
    prepared = decode._prepared
    model.generate(IDS[1:2], custom_generate=decode, **options)
    assert decode._prepared is prepared
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    assert torch.equal(
        model.generate(IDS[1:2], custom_generate=decode, **options), plain(model, {"inputs": IDS[1:2]}, **options)
    )
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_assistant_model_drafts(model, inputs):
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours(model, inputs, assistant_model=model, **options), plain(model, inputs, **options))


def test_a_folder_does_the_same(model):
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 96}
    streamer = Collecting()
    inputs = {"input_ids": IDS[1:2]}
    strings = [CHARACTERS[token] for token in plain(model, inputs, **options)[0, 14:16]]
    expected = plain(model, inputs, tokenizer=tokenizer(), stop_strings=strings, **options)
    got = model.generate(
        **inputs,
        custom_generate=str(HUB_FOLDER),
        trust_remote_code=True,
        tokenizer=tokenizer(),
        stop_strings=strings,
        streamer=streamer,
        drafter="self",
        **options,
    )
    assert torch.equal(got, expected)
    assert streamer.ended == 1
    config = GenerationConfig(stop_strings=strings, **options)
    again = model.generate(
        **inputs,
        custom_generate=str(HUB_FOLDER),
        trust_remote_code=True,
        tokenizer=tokenizer(),
        generation_config=config,
    )
    assert torch.equal(again, expected)
    assert config.stop_strings == strings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "generation mode beam_search is not offered"),
        ({"guidance_scale": 1.5}, "guidance_scale must be None or 1"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is not offered"),
        ({"attention_mask": 1 - MASK[:1]}, "zeros on the left only"),
        ({"position_ids": torch.arange(8)[None] + 3}, "position_ids must count the tokens"),
    ],
    ids=lambda own: next(iter(own)) if isinstance(own, dict) else "",
)
def test_what_is_not_offered_is_named(options, message):
    model = sharpened("llama")
    with pytest.raises(InvalidInput, match=message):
        ours(model, {"input_ids": IDS[:1]}, max_new_tokens=5, **options)


def test_synced_processes_and_training_models_are_refused():
    with pytest.raises(InvalidInput, match="synced_gpus"):
        viasd.transformers_generate(synced_gpus=True)
    with pytest.raises(UnsupportedModel, match="training mode"):
        ours(sharpened("llama").train(), {"input_ids": IDS[1:2]}, max_new_tokens=5)


def test_prepared_caches_and_masks_of_both_signatures_are_taken(model):
    decode = viasd.transformers_generate(speculation=FIXED)
    config = model._prepare_generation_config(GenerationConfig(max_length=20, do_sample=False))[0]
    model._prepare_special_tokens(config, True, device="cpu")
    expected = plain(model, {"input_ids": IDS[1:2]}, max_length=20, do_sample=False)
    for name in ("cache", "past_key_values"):
        for mask in (None, torch.ones(1, 8, dtype=torch.long)):
            given = {name: object(), "use_cache": True, "logits_to_keep": 1, "attention_mask": mask}
            criteria = model._get_stopping_criteria(config, StoppingCriteriaList())
            got = decode(model, IDS[1:2], generation_config=config, stopping_criteria=criteria, **given)
            assert torch.equal(got, expected)
    with pytest.raises(InvalidInput, match="inputs_embeds is not offered"):
        decode(model, IDS[1:2], generation_config=config, inputs_embeds=torch.zeros(1))
