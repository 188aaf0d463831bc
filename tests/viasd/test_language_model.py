"""``viasd.load`` and the calls of what it returns, on tiny random models."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import viasd
from viasd import DecodeError, InvalidInput, Route, RouteMismatch, UnsupportedModel

FIXED = viasd.Speculation(gamma=5, adaptive=False)  # models this small are too fast for drafting to pay
WORDS = [f"w{i}" for i in range(60)]


def tiny(seed=0, **overrides):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "eos_token_id": None}
    config = AutoConfig.for_model("llama", **{**sizes, **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


def tokenizer(words=WORDS):
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w1"
    return made


@pytest.fixture(scope="module")
def lm():
    return viasd.load(tiny(), tokenizer=tokenizer(), drafter="self", route="default", speculation=FIXED)


def transformers_greedy(model, ids, n):
    ids_2d = torch.tensor([ids])
    output = model.generate(ids_2d, attention_mask=torch.ones_like(ids_2d), max_new_tokens=n, do_sample=False)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("route", [None, "default"], ids=["two", "three"])
@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "self", "model"])
def test_greedy_equals_transformers(drafter, route):
    module = tiny(1)
    lm = viasd.load(module, drafter=tiny(2) if drafter == "model" else drafter, route=route, speculation=FIXED)
    prompts = [[5, 6, 7], list(range(20)), [9], [3, 4, 3, 4, 3]]
    for prompt, result in zip(prompts, lm.generate(prompts, max_new_tokens=20), strict=True):
        assert result.tokens == transformers_greedy(module, prompt, 20)
        assert result.prompt_tokens == prompt
        assert len(result.tiers) == 20


def test_text_chat_and_ids_mean_the_same(lm):
    by_ids = lm.generate([5, 6, 1], max_new_tokens=8)
    assert lm.generate("w5 w6 w1", max_new_tokens=8).tokens == by_ids.tokens
    assert lm.generate([{"role": "user", "content": "w5 w6"}], max_new_tokens=8).tokens == by_ids.tokens
    assert by_ids.text == " ".join(WORDS[token] for token in by_ids.tokens)


def test_a_list_of_prompts_gives_a_list_in_order(lm):
    prompts = ["w5 w6", [7, 8, 9], [{"role": "user", "content": "w3"}]]
    together = lm.generate(prompts, max_new_tokens=6)
    assert [result.tokens for result in together] == [lm.generate(p, max_new_tokens=6).tokens for p in prompts]
    assert [len(result) for result in (lm.generate(["w5"]), lm.generate([[5]]))] == [1, 1]


def test_tensors_and_arrays_are_prompts_too(lm):
    expected = lm.generate([[5, 6, 7], [8, 9, 5]], max_new_tokens=6)
    ids = torch.tensor([[5, 6, 7], [8, 9, 5]])
    for given in (ids, ids.int(), ids.numpy(), list(ids), list(ids.numpy())):
        assert [own.tokens for own in lm.generate(given, max_new_tokens=6)] == [own.tokens for own in expected]
    for given in (ids[0], ids[0].int(), ids[0].numpy(), list(ids[0])):
        assert lm.generate(given, max_new_tokens=6).tokens == expected[0].tokens
        assert [token.id for token in lm.stream(given, max_new_tokens=6)] == expected[0].tokens
    assert len(lm.generate(ids[:1], max_new_tokens=2)) == 1
    with pytest.raises(InvalidInput, match="stream takes one prompt"):
        lm.stream(ids[:1])
    with pytest.raises(InvalidInput, match="got a list with float"):
        lm.generate(ids[0].float())


def test_a_greedy_call_leaves_torchs_generator_alone(lm):
    before = torch.get_rng_state()
    lm.generate([5, 6], max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), before)
    lm.generate([5, 6], max_new_tokens=4, temperature=1.0)
    assert not torch.equal(torch.get_rng_state(), before)


def test_an_end_that_is_no_token_masks_none(lm):
    settings = {"max_new_tokens": 12, "logit_bias": {59: 1e4}}  # 59 is the last id
    assert lm.generate([5, 6], eos_token_ids=-1, min_new_tokens=5, **settings).tokens == [59] * 12


def test_seeds_belong_to_requests(lm):
    def sample(prompt, seed):
        return lm.generate(prompt, max_new_tokens=12, temperature=1.0, seed=seed)

    alone = sample([5, 6], 3).tokens
    assert sample([5, 6], 3).tokens == alone
    assert sample([5, 6], 4).tokens != alone
    assert sample([[9, 9], [5, 6]], 3)[1].tokens == alone
    assert [r.tokens for r in sample([[5, 6], [5, 6]], [4, 3])] == [sample([5, 6], 4).tokens, alone]
    torch.manual_seed(0)
    one = sample([5, 6], None).tokens
    other = sample([5, 6], None).tokens
    torch.manual_seed(0)
    assert sample([5, 6], None).tokens == one != other


def test_stream_hands_out_what_generate_returns(lm):
    settings = {"max_new_tokens": 15, "temperature": 0.8, "seed": 5}
    expected = lm.generate("w5 w6", **settings)
    stream = lm.stream("w5 w6", **settings)
    tokens = list(stream)
    assert [token.id for token in tokens] == expected.tokens
    assert [token.tier for token in tokens] == expected.tiers
    assert "".join(token.text for token in tokens) == expected.text == stream.result.text
    assert stream.result.finish_reason == "length"


def test_an_interrupted_stream_keeps_what_it_has(lm):
    stream = lm.stream([5, 6], max_new_tokens=30)
    got = [next(stream).id for _ in range(7)]
    assert stream.result.tokens[:7] == got
    assert stream.result.finish_reason is None
    assert stream.result.text.startswith(" ".join(WORDS[token] for token in got))


def test_end_of_sequence_comes_from_the_model_unless_given():
    module = tiny(3)
    plain = transformers_greedy(module, [5, 6], 12)
    stop = plain[6]
    module.generation_config.eos_token_id = [stop, 59]
    lm = viasd.load(module, drafter="self", speculation=FIXED)
    expected = plain[: plain.index(stop) + 1]
    assert lm.generate([5, 6], max_new_tokens=12).tokens == expected
    assert lm.generate([5, 6], max_new_tokens=12).finish_reason == "eos"
    assert lm.generate([5, 6], max_new_tokens=12, eos_token_ids=()).tokens == plain
    assert lm.generate([5, 6], max_new_tokens=12, eos_token_ids=[plain[0]]).tokens == plain[:1]


def test_a_folder_loads_with_its_tokenizer_and_can_draft(tmp_path):
    module = tiny(4)
    module.save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    speculation = viasd.Speculation(gamma=4, adaptive=False)
    lm = viasd.load(tmp_path / "target", drafter=tmp_path / "target", speculation=speculation)
    assert lm.name == "target"
    result = lm.generate("w5 w6", max_new_tokens=10)
    assert result.tokens == transformers_greedy(module, [5, 6], 10)
    assert result.stats.tokens_per_full_pass == 5.0  # its own draft is always right


def test_a_route_is_read_from_a_file_and_belongs_to_a_model(tmp_path):
    module = tiny(5)
    hash_ = viasd.TransformersModel(module).config_hash
    Route((True, False, True, True), (True, True, False, True), config_hash=hash_).save(tmp_path / "route.json")
    lm = viasd.load(module, route=tmp_path / "route.json")
    assert lm.route.mlp == (True, True, False, True)
    assert lm.generate([5, 6], max_new_tokens=10).tokens == transformers_greedy(module, [5, 6], 10)
    with pytest.raises(RouteMismatch, match="config"):
        viasd.load(tiny(5, intermediate_size=48), route=str(tmp_path / "route.json"))
    with pytest.raises(RouteMismatch, match="made for 4 layers"):
        viasd.load(tiny(5, num_hidden_layers=5), route=tmp_path / "route.json")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([[5], []], "prompt is empty"),
        ([60], r"ids must lie in \[0, 60\), got 60"),
        ([5, -1], r"ids must lie in \[0, 60\), got -1"),
        ([5] * 64, "prompt has 64 tokens; the model's context holds 64"),
        ([5.5], "prompt must be text, ids .* got a list with float"),
        ([True], "prompt must be text, ids .* got a list with bool"),
        (None, "prompt must be text, ids or chat messages, got NoneType"),
        (5, "got int"),
        (b"ab", "got bytes"),
        ({"role": "user", "content": "w5"}, "got dict"),
        (["w5", 5], "got int"),
        ([{"role": "user"}], "prompt must be text, ids"),
    ],
)
def test_prompts_that_cannot_work(lm, prompt, message):
    with pytest.raises(InvalidInput, match=message):
        lm.generate(prompt)


@pytest.mark.parametrize("n", [0, -1])
def test_lengths_that_cannot_work(lm, n):
    with pytest.raises(InvalidInput, match=f"max_new_tokens must be an integer >= 1, got {n}"):
        lm.generate([5], max_new_tokens=n)
    with pytest.raises(InvalidInput, match="max_new_tokens"):
        lm.stream([5], max_new_tokens=n)


def test_seeds_must_match_the_prompts(lm):
    with pytest.raises(InvalidInput, match="one per prompt, 2, got 3"):
        lm.generate([[5], [6]], seed=[1, 2, 3])


def test_a_stream_takes_one_prompt(lm):
    with pytest.raises(InvalidInput, match="stream takes one prompt"):
        lm.stream([[5], [6]])


def test_text_needs_a_tokenizer_and_chat_a_template():
    bare = viasd.load(tiny())
    with pytest.raises(InvalidInput, match="need a tokenizer"):
        bare.generate("w5")
    assert bare.generate([5], max_new_tokens=2).text == ""
    without_template = tokenizer()
    without_template.chat_template = None
    with pytest.raises(InvalidInput, match="no chat template"):
        viasd.load(tiny(), tokenizer=without_template).generate([{"role": "user", "content": "w5"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "medusa"}, "drafter must be 'prompt-lookup', 'self', a model, .* got 'medusa'"),
        ({"drafter": 5}, "drafter must be a name, a path, a model, a Drafter or None, got int"),
        ({"speculation": 5}, "speculation must be a Speculation or None, got int"),
        ({"route": 5}, "route must be a Route, a path, 'default' or None, got int"),
        ({"route": "no-such-route.json"}, "route: cannot read no-such-route.json"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(InvalidInput, match=message):
        viasd.load(tiny(), **options)


def test_what_is_no_model_is_refused():
    with pytest.raises(InvalidInput, match=r"model must be a path, .* got int"):
        viasd.load(5)


def test_ids_may_be_tensors():
    lm = viasd.load(tiny())
    assert lm.generate(torch.tensor([5, 6]), max_new_tokens=3).tokens == lm.generate([5, 6], max_new_tokens=3).tokens


def test_whole_numbers_do_for_settings(lm):
    greedy = lm.generate([5, 6], max_new_tokens=5)
    assert lm.generate([5, 6], max_new_tokens=5, temperature=0).tokens == greedy.tokens
    sampled = lm.generate([5, 6], max_new_tokens=5, temperature=1.0, seed=1)
    assert lm.generate([5, 6], max_new_tokens=5, temperature=1, top_p=1, seed=1).tokens == sampled.tokens


def test_a_loaded_model_loads_again_with_its_end_of_sequence():
    module = tiny(3)
    module.generation_config.eos_token_id = 7
    lm = viasd.load(module)
    assert viasd.load(lm.model).eos_token_ids == lm.eos_token_ids == (7,)


def test_a_prompt_longer_than_one_prefill_pass():
    module = tiny(11, max_position_embeddings=1400)
    prompt = torch.randint(0, 60, (1300,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = transformers_greedy(module, prompt, 6)
    for drafter in ("self", tiny(12, max_position_embeddings=1400)):
        lm = viasd.load(module, drafter=drafter, route="default", speculation=FIXED)
        assert lm.generate(prompt, max_new_tokens=6).tokens == expected


def test_the_default_route_belongs_to_its_model(tmp_path):
    viasd.load(tiny(), route="default").route.save(tmp_path / "route.json")
    viasd.load(tiny(5), route=tmp_path / "route.json")
    with pytest.raises(RouteMismatch):
        viasd.load(tiny(intermediate_size=48), route=tmp_path / "route.json")


def test_a_saved_model_keeps_its_identity(tmp_path):
    module = tiny(13)
    module.save_pretrained(tmp_path)
    assert viasd.load(tmp_path).model.config_hash == viasd.load(module).model.config_hash


@pytest.mark.parametrize("path", ["/no/such/folder", "./no-such-folder"])
def test_a_missing_folder_is_named(path):
    with pytest.raises(InvalidInput, match=f"model: no folder {path}"):
        viasd.load(path)


def test_vocabularies_must_agree(tmp_path):
    with pytest.raises(InvalidInput, match="it has 80 tokens and the model 60"):
        viasd.load(tiny(), drafter=tiny(vocab_size=80))
    words = WORDS.copy()
    words[7], words[8] = words[8], words[7]
    for name, own in (("same", WORDS), ("swapped", words)):
        tiny(6).save_pretrained(tmp_path / name)
        tokenizer(own).save_pretrained(tmp_path / name)
    viasd.load(tiny(), tokenizer=tokenizer(), drafter=tmp_path / "same")
    with pytest.raises(InvalidInput, match="differs from the model's in 2 ids; id 7 is 'w8' there and 'w7' here"):
        viasd.load(tiny(), tokenizer=tokenizer(), drafter=tmp_path / "swapped")


def test_padded_vocabularies_work_with_tokenizers(tmp_path):
    tiny(7, vocab_size=64).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    module = tiny(8)
    lm = viasd.load(module, tokenizer=tokenizer(), drafter=tmp_path, speculation=FIXED)
    assert lm.generate([5, 6], max_new_tokens=12).tokens == transformers_greedy(module, [5, 6], 12)


def test_broken_weights_are_refused_at_load():
    module = tiny(9)
    with torch.no_grad():
        module.lm_head.weight[3] = float("nan")
    with pytest.raises(UnsupportedModel, match="not finite"):
        viasd.load(module)


def test_what_breaks_while_decoding_loses_nothing():
    module = tiny(10)
    lm = viasd.load(module, drafter="self", speculation=FIXED)
    plain = transformers_greedy(module, [5, 6], 3)
    with torch.no_grad():
        module.model.embed_tokens.weight[plain[1]] = float("nan")
    with pytest.raises(DecodeError, match=r"prompt 0: .*TARGET_NOT_FINITE") as caught:
        lm.generate([[5, 6], [7]], max_new_tokens=3)
    assert caught.value.results[0].tokens == plain[:2]
    assert len(caught.value.results[1].tokens) == 3
    stream = lm.stream([5, 6], max_new_tokens=3)
    assert [next(stream).id, next(stream).id] == plain[:2]
    with pytest.raises(DecodeError):
        next(stream)
