"""Where stop strings end an output, and what a stream shows of it."""

import random

import pytest

import viasd
from viasd import InvalidInput
from viasd.text import Detokenizer, StopStrings, cut_at

PIECES = ["a", "b", "ab", "ba", "abc", "c", "", " ", "\n", "é"]


class ByteTokenizer:
    """Tokens are bytes of text: some of whole words, some of parts of a character."""

    def __init__(self):
        self.tokens = [piece.encode() for piece in PIECES] + [bytes([byte]) for byte in "é€😀".encode()]

    def decode(self, tokens, skip_special_tokens=True):
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("seed", range(40))
def test_the_first_token_that_completes_a_stop_string_ends_the_output(seed):
    rng, tokenizer = random.Random(seed), ByteTokenizer()
    tokens = [rng.randrange(len(tokenizer.tokens)) for _ in range(60)]
    stop = [rng.choice(["ab", "bca", "a\n", "é", "😀", "abcab", "cc", " a b"]) for _ in range(rng.randrange(1, 4))]
    strings = StopStrings(stop, tokenizer)
    found = [any(s in tokenizer.decode(tokens[:n]) for s in stop) for n in range(1, len(tokens) + 1)]
    expected = found.index(True) if True in found else None
    ends = [strings.ends(tokens[:n]) for n in range(1, len(tokens) + 1)]
    assert (ends.index(True) if True in ends else None) == expected

    output = tokens if expected is None else tokens[: expected + 1]
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = [detokenizer.push(token) for token in output] + [detokenizer.flush()]
    assert "".join(pieces) == cut_at(stop, tokenizer.decode(output))


def test_text_that_may_begin_a_stop_string_is_held_back():
    tokenizer = ByteTokenizer()
    a, b, c = (tokenizer.tokens.index(char.encode()) for char in "abc")
    detokenizer = Detokenizer(tokenizer, ["abc"])
    assert [detokenizer.push(token) for token in (c, a, b, a, b)] == ["c", "", "", "ab", ""]
    assert detokenizer.push(c) == ""
    assert detokenizer.push(a) == detokenizer.flush() == ""
    unfinished = Detokenizer(tokenizer, ["abc"])
    assert [unfinished.push(a), unfinished.push(b), unfinished.flush()] == ["", "", "ab"]


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InvalidInput, match="stop: stop strings need a tokenizer"):
        StopStrings(["x"], None)


@pytest.mark.model
@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_the_real_model_stops_where_its_text_says_so(drafter):
    lm = viasd.load(drafter=drafter)
    prompt = [{"role": "user", "content": "Repeat after me: one, two, three, four, five, six."}]
    free = lm.generate(prompt, max_new_tokens=30)
    stop = free.text[7:10]
    result = lm.generate(prompt, max_new_tokens=30, stop=stop, logprobs=1)
    assert result.finish_reason == "stop"
    assert result.text == free.text[: free.text.index(stop)]
    assert result.tokens == free.tokens[: len(result.tokens)]
    assert len(result.logprobs) == len(result.tokens)
    stream = lm.stream(prompt, max_new_tokens=30, stop=[stop])
    assert "".join(token.text for token in stream) == result.text == stream.result.text
    late = lm.generate(prompt, max_new_tokens=30, stop=stop, min_new_tokens=len(result.tokens) + 1)
    assert len(late.tokens) > len(result.tokens)
