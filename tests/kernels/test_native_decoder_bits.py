"""What a row yields, bit for bit: whatever else the pass holds, however it is cut and on however many threads."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from native_cases import (
    MIXED,
    Driver,
    by_dtype,
    by_level,
    cpu_level,
    native_decoder,
    random_weights,
    same_bits,
    some_tokens,
    torch_threads,
)

from viasd_kernels.layer_skip import LayerConfig, SkipDecoder

LENGTH = 300  # past a split of 256 keys


def read(decoder: SkipDecoder, tokens: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Hidden states, logits, keys and values by position, of a chain in passes of these lengths."""
    driver, outputs = Driver(decoder), []
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        outputs.append(driver.extend([tokens[end - length : end]]))
    places = driver.context[0]
    hidden, logits = (torch.cat([getattr(output, name) for output in outputs]) for name in ("hidden", "logits"))
    return hidden, logits, driver.pool.keys[:, places], driver.pool.values[:, places]


def assert_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for name, ours, theirs in zip(("hidden", "logits", "keys", "values"), got, expected, strict=True):
        assert same_bits(ours, theirs), name


@by_dtype
@by_level
def test_a_chain_in_passes_of_any_length_on_any_number_of_threads(level: str, dtype: torch.dtype) -> None:
    tokens = some_tokens(LENGTH)
    with cpu_level(level):
        decoder = native_decoder(dtype=dtype)
        with torch_threads(1):
            one_by_one = read(decoder, tokens, [1] * LENGTH)
        cuts = {1: [*range(1, 24), 24], 2: [250, 3, 7, 40], 3: [60, 6, 40, 150, 5, 39], 5: [LENGTH]}
        for threads, lengths in cuts.items():
            with torch_threads(threads):
                assert_same(read(decoder, tokens, lengths), one_by_one)


@by_dtype
@by_level
@pytest.mark.parametrize("context", [60, 250])
def test_a_pass_of_any_length_begins_with_the_same_rows(level: str, dtype: torch.dtype, context: int) -> None:
    """Every number of rows from 1 to 40: every shape of a block of rows, over a tile's and a split's end."""
    tokens = some_tokens(context + 40)
    with cpu_level(level):
        driver = Driver(native_decoder(dtype=dtype))
        driver.extend([tokens[:context]])
        longest = driver.run([tokens[context:]])
        driver.keep([[]])
        for length in range(1, 40):
            output = driver.run([tokens[context : context + length]])
            driver.keep([[]])
            assert same_bits(output.hidden, longest.hidden[:length])
            assert same_bits(output.logits, longest.logits[:length])


@by_dtype
@by_level
def test_batch_mates_change_nothing(level: str, dtype: torch.dtype) -> None:
    sequences = [some_tokens(length, seed=length) for length in (70, 3, 261, 30)]
    parents = [[-1, 0, 0, 1, 3, 2], [-1], [-1, *[row // 2 for row in range(39)]], [-1, 0, 1]]
    rows = [some_tokens(len(own), seed=7) for own in parents]
    with cpu_level(level):
        decoder = native_decoder(dtype=dtype)
        together = Driver(decoder, 4, num_slots=500)
        together.extend(sequences)
        logits = together.run(rows, parents).logits.split([len(own) for own in rows])
        for got, prompt, own, links in zip(logits, sequences, rows, parents, strict=True):
            alone = Driver(decoder)
            alone.extend([prompt])
            assert same_bits(alone.run([own], [links]).logits, got)


def test_neither_do_rows_on_other_routes() -> None:
    """Which rows keep a sub-layer decides how they are packed."""
    decoder, tokens = native_decoder(), some_tokens(80)
    driver = Driver(decoder)
    driver.extend([tokens[:60]])
    expected = driver.run([tokens[60:]]).logits
    driver.keep([[]])
    routes = torch.rand(20, MIXED.num_layers, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    full = [0, 1, 2, 5, 11]
    parents = [full[full.index(row) - 1] if row in full else 0 for row in range(20)]
    parents[0], routes[full] = -1, True
    plain = driver.run([tokens[60:]], [parents]).logits
    driver.keep([[]])
    mixed = driver.run([tokens[60:]], [parents], row_route=routes).logits
    assert same_bits(mixed[full], plain[full])
    assert same_bits(mixed[:3], expected[:3])
    assert not torch.equal(mixed, plain)


@by_level
def test_greedy_speculation_equals_plain_decoding(level: str) -> None:
    """Whatever is proposed: chains of which a part is right, verified and rolled back."""
    with cpu_level(level):
        decoder = native_decoder()
        plain = Driver(decoder)
        tokens = [int(plain.extend([some_tokens(50)]).logits[-1].argmax())]
        for _ in range(40):
            tokens.append(int(plain.extend([tokens[-1:]]).logits[-1].argmax()))
        assert len(set(tokens)) > 3
        fast = Driver(decoder)
        found = [int(fast.extend([some_tokens(50)]).logits[-1].argmax())]
        while len(found) < len(tokens):
            right = len(found) % 4
            draft = [*tokens[len(found) : len(found) + right], *some_tokens(5, seed=len(found))]
            choices = fast.run([[found[-1], *draft]]).logits.argmax(-1).tolist()
            accepted = 0
            while accepted < len(draft) and draft[accepted] == choices[accepted]:
                accepted += 1
            fast.keep([list(range(accepted + 1))])
            found += choices[: accepted + 1]
        assert found[: len(tokens)] == tokens


@by_dtype
@by_level
def test_a_bypassed_row_keeps_its_bits(level: str, dtype: torch.dtype) -> None:
    weights = random_weights(MIXED, dtype)
    weights["embedding"][7, ::2] = -0.0
    weights["layers.1.attention_out"][3] = torch.nan
    routes = torch.ones(6, MIXED.num_layers, 2, dtype=torch.bool)
    routes[3:, 1:3] = False
    with cpu_level(level):
        driver = Driver(SkipDecoder(weights, MIXED, impl="native"))
        parents = [[-1, 0, 1, 0, 3, 4]]
        captured = driver.run([[1, 2, 3, 7, 4, 5]], parents, row_route=routes, capture_layers=(0, 1, 2, 3)).captured
    assert same_bits(captured[2][3:], captured[1][3:])
    assert same_bits(captured[3][3:], captured[1][3:])
    assert captured[2][:3].isnan().any(1).all()
    assert (captured[0][3, ::2].signbit() & (captured[0][3, ::2] == 0)).all()
    assert not torch.equal(captured[1][3:], captured[0][3:])


@by_dtype
@by_level
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_broken_row_reaches_only_those_that_see_it(level: str, dtype: torch.dtype, broken: float) -> None:
    weights = random_weights(MIXED, dtype)
    weights["embedding"][7] = broken
    with cpu_level(level):
        decoder = SkipDecoder(weights, MIXED, impl="native")
        driver = Driver(decoder, 2)
        driver.extend([some_tokens(70, vocab=7), some_tokens(9, vocab=7)])
        parents, logits = [[-1, 0, 0, 1, 2, 2, 3], [-1, 0]], {}
        for token in (6, 7):
            logits[token] = driver.run([[1, 2, token, 3, 4, 5, 6], [1, 2]], parents).logits
            driver.keep([[], []])
    sees = torch.tensor([row in (2, 4, 5) for row in range(9)])
    assert logits[7][sees].isnan().all()
    assert same_bits(logits[7][~sees], logits[6][~sees])


@by_level
def test_a_broken_row_is_forgotten_past_the_window(level: str) -> None:
    config = dataclasses.replace(MIXED, layers=(LayerConfig(window=20),))
    weights = random_weights(config, torch.float32)
    weights["embedding"][7] = torch.inf
    tokens = some_tokens(100, vocab=7)
    with cpu_level(level):
        decoder = SkipDecoder(weights, config, impl="native")
        healthy = Driver(decoder).run([tokens]).logits
        tokens[50] = 7
        logits = Driver(decoder).run([tokens]).logits
    assert logits[50:70].isnan().all()
    assert same_bits(logits[70:], healthy[70:])
    assert same_bits(logits[:50], healthy[:50])


def test_python_threads_share_a_decoder() -> None:
    decoder = native_decoder()

    def decode(seed: int) -> list[torch.Tensor]:
        driver = Driver(decoder, seed=seed)
        return [driver.extend([some_tokens(length, seed=seed)]).logits for length in (90, 1, 5, 33, 1, 2)]

    expected = [decode(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as workers:
        for got, alone in zip(workers.map(decode, list(range(4)) * 5), expected * 5, strict=True):
            assert all(map(same_bits, got, alone))


def test_a_pass_leaves_python_to_other_threads() -> None:
    config = dataclasses.replace(MIXED, hidden_size=512, intermediate_size=2048)
    driver = Driver(native_decoder(config))
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    with torch_threads(1):
        begin = time.perf_counter()
        driver.run([some_tokens(300)])
        end = time.perf_counter()
    done.set()
    other.join()
    quarter = (end - begin) / 4
    assert any(begin + quarter < at < end - quarter for at in ticks)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_one_openmp_runtime() -> None:
    with torch_threads(2):
        Driver(native_decoder()).run([some_tokens(300)])
    files = set(re.findall(r"\S*/lib(?:gomp|omp|iomp5)[-.\w]*", Path("/proc/self/maps").read_text()))
    assert len({os.path.realpath(file) for file in files}) == 1, files
