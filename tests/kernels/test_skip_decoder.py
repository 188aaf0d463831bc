"""SkipDecoder against Transformers' own forward, on tiny random models of every family."""

from __future__ import annotations

import pytest
import torch
from hf_mapping import VARIANTS, decoder_of, tiny
from skip_sequences import LIMIT, Sequences, difference, plain, some_ids

pytestmark = pytest.mark.usefixtures("each_implementation")

FAMILIES = ["llama", "mistral", "qwen2, two windows", "qwen3", "gemma2", "gemma3"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prompt_at_once_in_chunks_and_token_by_token(name: str) -> None:
    model, ids = tiny(name), some_ids(23)
    decoder, expected = decoder_of(model), plain(model, ids)
    assert difference(Sequences(decoder).run([ids]).logits, expected) <= LIMIT
    sequences = Sequences(decoder)
    chunks = [ids[first:end] for first, end in ((0, 1), (1, 9), (9, 11), (11, 20), (20, 21), (21, 22), (22, 23))]
    logits = torch.cat([sequences.extend([chunk]).logits for chunk in chunks])
    assert difference(logits, expected) <= LIMIT


@pytest.mark.parametrize("name", ["llama3 rope", "gemma3, linear rope", "llama"])
def test_far_positions(name: str) -> None:
    model, ids = tiny(name), some_ids(400)
    sequences = Sequences(decoder_of(model), num_slots=400)
    sequences.extend([ids[:300]], logits_rows=torch.tensor([], dtype=torch.int64))
    assert difference(sequences.run([ids[300:]]).logits, plain(model, ids)[300:]) <= LIMIT


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_ragged_sequences_with_rollback(name: str) -> None:
    model = tiny(name)
    whole = [some_ids(length, seed=length) for length in (3, 14, 9)]
    sequences = Sequences(decoder_of(model), 4)
    sequences.extend([*(ids[:-3] for ids in whole), []])
    sequences.run([[5, 6, 7, 8], [9, 10], [11], []])
    sequences.keep([[], [], [], []])
    logits = sequences.run([*(ids[-3:] for ids in whole), []]).logits.view(3, 3, -1)
    for own, ids in zip(logits, whole, strict=True):
        assert difference(own, plain(model, ids)[-3:]) <= LIMIT


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tree_path_equals_its_own_plain_forward_and_can_be_accepted(name: str) -> None:
    model = tiny(name)
    prompts, tree = [some_ids(9), some_ids(2, seed=1)], some_ids(7, seed=2)
    parents = [[-1, 0, 0, 1, 2, 2, 5], [-1, 0, 1]]
    sequences = Sequences(decoder_of(model), 2)
    sequences.extend(prompts)
    logits = sequences.run([tree, tree[:3]], parents).logits
    paths = [[0, 2, 5, 6], [0]]
    for first, prompt, links in ((0, prompts[0], parents[0]), (7, prompts[1], parents[1])):
        for row in range(len(links)):
            path, node = [], row
            while node >= 0:
                path, node = [tree[node], *path], links[node]
            assert difference(logits[first + row], plain(model, prompt + path)[-1]) <= LIMIT
    sequences.keep(paths)
    logits = sequences.run([[50, 51], [52]]).logits
    taken = [prompt + [tree[row] for row in path] for prompt, path in zip(prompts, paths, strict=True)]
    assert difference(logits[:2], plain(model, taken[0] + [50, 51])[-2:]) <= LIMIT
    assert difference(logits[2], plain(model, taken[1] + [52])[-1]) <= LIMIT


def test_positions_are_free_of_slots_and_order() -> None:
    """The same sequence in two shuffles of the pool gives the same bits."""
    decoder, ids = decoder_of(tiny("gemma3")), some_ids(12)
    outputs = []
    for seed in (0, 1):
        sequences = Sequences(decoder)
        order = torch.randperm(120, generator=torch.Generator().manual_seed(seed)).tolist()
        sequences.free = order
        sequences.extend([ids[:8]])
        outputs.append(sequences.run([ids[8:]]).logits)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_hidden_and_captured_states_are_transformers_hidden_states(name: str) -> None:
    model, ids = tiny(name), some_ids(11)
    last = []
    hook = model.model.layers[3].register_forward_hook(
        lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    output = Sequences(decoder_of(model)).run([ids], capture_layers=(4, 0, 3))
    assert output.captured.keys() == {0, 3, 4}
    for layer in (0, 3):
        assert (output.captured[layer] - expected[layer][0]).abs().max() <= LIMIT
    assert (output.captured[4] - last[0]).abs().max() <= LIMIT
    assert (output.hidden - expected[-1][0]).abs().max() <= LIMIT


def test_logits_rows() -> None:
    decoder, ids = decoder_of(tiny("gemma2")), some_ids(10)
    every = Sequences(decoder).run([ids])
    some = Sequences(decoder).run([ids], logits_rows=torch.tensor([9, 2, 2], dtype=torch.int32))
    torch.testing.assert_close(some.logits, every.logits[[9, 2, 2]])
    assert torch.equal(some.hidden, every.hidden)


def test_an_unused_row_is_finite_and_disturbs_nobody() -> None:
    decoder = decoder_of(tiny("qwen3"))
    alone = Sequences(decoder).run([[7, 8]]).logits
    together = Sequences(decoder, 2).run([[7, 8], [-1]]).logits
    torch.testing.assert_close(together[:2], alone)
    assert together.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_half_precision_errs_no_more_than_transformers(name: str, dtype: torch.dtype) -> None:
    """Both against the same rounded weights in float64."""
    model, ids = tiny(name, dtype=dtype), some_ids(20)
    ours, theirs = Sequences(decoder_of(model)).run([ids]).logits, plain(model, ids)
    exact = Sequences(decoder_of(model.to(torch.float64))).run([ids]).logits
    assert ours.dtype == dtype
    error, allowed = ((logits.double() - exact).square().mean().sqrt() for logits in (ours, theirs))
    assert error <= 1.2 * allowed


def test_float64_agrees_with_float32() -> None:
    model, ids = tiny("gemma2"), some_ids(20)
    single = Sequences(decoder_of(model)).run([ids]).logits
    double = Sequences(decoder_of(model.to(torch.float64))).run([ids]).logits
    assert double.dtype == torch.float64
    assert difference(single, double) <= 2e-5
