"""Many requests: how many are decoded at a time, and that nobody notices."""

import random
from collections import deque

import pytest
import torch

import tables
import viasd
from tables import DRAFT, SLIM, TableModel
from tiny_models import tiny
from viasd import Admission, DecodeInterrupted, DecodeRun, InvalidInput, SelfDrafter, Speculation
from viasd.decode.admission import free_bytes

FIXED = Speculation(gamma=4, adaptive=False)


def decode(model, requests, admission=None):
    run = DecodeRun(model, requests, drafter=SelfDrafter(model, DRAFT), route=SLIM, admission=admission)
    most = 0
    for _ in run.cycles():
        most = max(most, sum(bool(sequence.slots) for sequence in run.sequences))
    return run, most


@pytest.mark.parametrize("admission", [Admission(1), Admission(3), Admission(max_slots=60), Admission(max_slots=1)])
def test_results_do_not_depend_on_how_many_are_let_in(admission):
    model = TableModel(4, 70)
    requests = [tables.request(seed, 3 + seed % 9, eos=(3,)) for seed in range(25)]
    together, _ = decode(model, requests)
    some, most = decode(model, requests, admission)
    assert [result.tokens for result in some.results] == [result.tokens for result in together.results]
    assert [result.tiers for result in some.results] == [result.tiers for result in together.results]
    assert most <= admission.max_sequences
    if admission.max_slots:
        assert some.cache.pool.num_slots <= max(admission.max_slots, max(s.max_slots for s in some.sequences))
    assert some.cache.pool.take(some.cache.pool.num_slots) == list(range(some.cache.pool.num_slots))


def test_requests_start_in_order_and_as_soon_as_there_is_room():
    model = TableModel(4, 71)
    requests = [tables.request(seed, 1 + 3 * (seed % 4)) for seed in range(12)]
    run = DecodeRun(model, requests, admission=Admission(3))
    started = []
    for _ in run.cycles():
        active = [i for i, sequence in enumerate(run.sequences) if sequence.slots]
        started += [i for i in active if i not in started]
    assert started == sorted(started)
    waiting, active = deque(run.sequences), []
    assert Admission(5).admit(waiting, active, float("inf")) == run.sequences[:5]
    assert len(Admission(5).admit(waiting, run.sequences[:4], float("inf"))) == 1
    assert len(Admission(5).admit(waiting, [], 1)) == 1  # one is always let in
    assert Admission(5).admit(waiting, run.sequences[:1], 1) == []


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_memory_bounds_what_is_let_in(family):
    lm = viasd.load(tiny(family), drafter=None)
    cache = lm.model.new_cache()
    slots = cache.pool.take(300)
    lm.model.forward(viasd.models.Rows([1], [0], [0, 1], slots[:1], [[]]), cache)
    if family == "llama":
        stored = cache.kv.keys.nbytes + cache.kv.values.nbytes
        assert lm.model.slot_bytes * cache.kv.num_slots == stored
    else:
        # Four layers of keys and values of four heads, which this family does not share among queries.
        assert lm.model.slot_bytes == 4 * 2 * 64 * 4
    assert 0 < lm.model.slot_bytes * Admission().slots(lm.model) < free_bytes(torch.device("cpu"))
    assert Admission(max_slots=7).slots(lm.model) == 7


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_of_many_prompts_gets_its_solo_output(implementation, temperature):
    rng = random.Random(0)
    lm = viasd.load(tiny("llama"), drafter="self", route="default", speculation=FIXED, implementation=implementation)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 60))] for _ in range(40)]
    options = {"max_new_tokens": 12, "temperature": temperature}
    results = lm.generate(prompts, seed=list(range(40)), admission=Admission(16), **options)
    for seed in range(0, 40, 5):
        assert lm.generate(prompts[seed], seed=seed, **options).tokens == results[seed].tokens


def test_a_bar_counts_prompts_and_interruptions_lose_nothing(capsys):
    lm = viasd.load(tiny("llama"), drafter=None)
    lm.generate([[1, 2]] * 3, max_new_tokens=4, progress=True)
    assert "3/3" in capsys.readouterr().err
    lm.generate([[1, 2]] * 30, max_new_tokens=2)  # not on a terminal
    assert capsys.readouterr().err == ""

    def interrupting(tokens):
        if len(tokens) >= 6:
            raise KeyboardInterrupt
        return False

    with pytest.raises(DecodeInterrupted) as raised:
        lm.generate([[1, 2], [3, 4, 5]], max_new_tokens=9, stopping=interrupting)
    assert [len(result.tokens) for result in raised.value.results] == [3, 2]
    assert isinstance(raised.value, KeyboardInterrupt)


@pytest.mark.parametrize(
    "options", [{"max_sequences": 0}, {"max_sequences": None}, {"max_slots": 0}, {"max_slots": 1.5}]
)
def test_admissions_that_cannot_work_are_refused(options):
    with pytest.raises(InvalidInput, match=f"admission: {next(iter(options))} must be an integer >= 1"):
        Admission(**options)
