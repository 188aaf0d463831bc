"""The compiled tree ops against the reference on random batches; threads; a missing build; the coins."""

import sys
import threading

import pytest
import torch

from viasd_kernels import uniforms
from viasd_kernels.native import load_native
from viasd_kernels.tree_verify import Tree, TreeVerdict, build_tree, verify_tree

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

LAST_COIN = 1 - 2.0**-53
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def random_batch(seed: int, dtype: torch.dtype, proposal: str, sequences: int, vocab: int) -> tuple[tuple, dict]:
    """Ragged trees, some rows unused or pruned, masked logits, a bad row here and there, three temperatures."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 10, (sequences,), generator=generator)
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = int(row_start[-1])
    local = torch.arange(rows) - torch.repeat_interleave(row_start[:-1], lengths)
    parents = (torch.rand(rows, generator=generator) * local * 0.7).long() - (local == 0).long()
    broken = (torch.rand(rows, generator=generator) < 0.02) & (local > 0)
    tree = build_tree(parents.masked_fill(broken, -1), row_start, max_rows=10, check=False)
    full = torch.randn(rows, vocab, generator=generator) * 2
    full = full.masked_fill(torch.rand(full.shape, generator=generator) < 0.1, float("-inf")).to(dtype)
    draft = (full.float().clamp(min=-3) + torch.randn(full.shape, generator=generator)).to(dtype)[:, : vocab - 1]
    for logits in (full, draft):
        logits[torch.rand(rows, generator=generator) < 0.01] = float("nan")
        logits[torch.rand(rows, generator=generator) < 0.01] = float("-inf")
    # Tokens from the head of the parent's proposal, so that trees are neither all accepted nor all rejected.
    parent_row = (torch.arange(rows) - local + parents.clamp(min=0)).clamp(min=0)
    places = torch.randint(0, 3, (rows, 1), generator=generator)
    tokens = draft.float().nan_to_num(0).topk(3).indices[parent_row].gather(1, places).squeeze(1)
    tokens[torch.rand(rows, generator=generator) < 0.05] = -1
    tokens[torch.rand(rows, generator=generator) < 0.01] = vocab
    coins = torch.rand(rows, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([0.0, 0.7, 1.3])[torch.randint(3, (sequences,), generator=generator)]
    options = {"temperature": temperature, "proposal": proposal}
    if proposal != "deterministic":
        options["draft_logits"] = draft.contiguous()
    return (tree, tokens, full, coins, row_start), options


def same_sequences(left: TreeVerdict, right: TreeVerdict, row_start: torch.Tensor) -> torch.Tensor:
    sequence = torch.repeat_interleave(row_start.diff())
    differing_rows = torch.zeros(len(row_start) - 1).index_add(0, sequence, (left.path != right.path).float())
    same = differing_rows == 0
    for name in ("num_accepted", "next_token", "status"):
        same &= getattr(left, name) == getattr(right, name)
    return same


@pytest.mark.parametrize("proposal", ["deterministic", "without_replacement", "with_replacement"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_tree_equals_the_reference(dtype: torch.dtype, proposal: str) -> None:
    (tree, tokens, full, coins, row_start), options = random_batch(5, dtype, proposal, sequences=300, vocab=37)

    def verify(impl: str, stretch: float) -> TreeVerdict:
        stretched = (coins * stretch).clamp(max=LAST_COIN)
        return verify_tree(tree, tokens, full, stretched, row_start, impl=impl, check=False, **options)

    expected, found = verify("reference", 1.0), verify("native", 1.0)
    # Sequences within 1e-6 of a decision boundary: their outcome changes with coins that much smaller or larger.
    decided = same_sequences(verify("native", 1 - 1e-6), verify("native", 1 + 1e-6), row_start)
    assert int((~decided).sum()) <= 1
    assert same_sequences(expected, found, row_start)[decided].all()
    assert {1, 2, 64} <= {bit for status in expected.status.tolist() for bit in (1, 2, 8, 16, 64) if status & bit}
    assert (expected.num_accepted > 1).any()


def test_verify_tree_equals_the_reference_on_a_large_vocabulary() -> None:
    for proposal in ("deterministic", "without_replacement"):
        (tree, tokens, full, coins, row_start), options = random_batch(6, torch.float32, proposal, 12, 150_001)
        verdicts = [
            verify_tree(tree, tokens, full, coins, row_start, impl=impl, check=False, **options)
            for impl in ("reference", "native")
        ]
        assert same_sequences(*verdicts, row_start).all()


def test_given_argmax_equals_the_reference() -> None:
    (tree, tokens, full, coins, row_start), options = random_batch(7, torch.float32, "deterministic", 300, 5)
    argmax = full.nan_to_num(0).argmax(-1)
    argmax[::50] = -1
    options |= {"temperature": torch.zeros(300), "full_argmax": argmax}
    for logits in (full, None):
        verdicts = [
            verify_tree(tree, tokens, logits, coins, row_start, impl=impl, check=False, **options)
            for impl in ("reference", "native")
        ]
        assert same_sequences(*verdicts, row_start).all()
        assert (verdicts[0].num_accepted > 1).any()


def test_two_threads_do_not_disturb_each_other() -> None:
    batches = [random_batch(seed, torch.float32, "without_replacement", 400, 500) for seed in (8, 9)]
    expected = [verify_tree(*inputs, impl="native", check=False, **options) for inputs, options in batches]
    disturbed: list[str] = []
    start = threading.Barrier(2)

    def work(which: int) -> None:
        (inputs, options), want = batches[which], expected[which]
        start.wait()
        for _ in range(10):
            got = verify_tree(*inputs, impl="native", check=False, **options)
            disturbed.extend(name for name, a, b in zip(got._fields, got, want, strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert disturbed == []


def test_the_interpreter_runs_while_native_code_works() -> None:
    (tree, tokens, full, coins, row_start), options = random_batch(10, torch.float64, "without_replacement", 30, 30_000)
    finished, counted = threading.Event(), 0

    def work() -> None:
        verify_tree(tree, tokens, full, coins, row_start, impl="native", check=False, **options)
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not finished.is_set():
        counted += 1
    thread.join()
    assert counted > 100


def test_verify_tree_refuses_a_wrong_row_start_even_unchecked() -> None:
    links = torch.full((2,), -1, dtype=torch.int32)
    tree = Tree(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), links, links)
    for row_start in ([0, 3], [1, 2], [0, 2, 1, 2]):
        with pytest.raises(ValueError, match="row_start"):
            verify_tree(
                tree,
                torch.tensor([0, 0]),
                torch.zeros(2, 3),
                torch.zeros(2, dtype=torch.float64),
                torch.tensor(row_start),
                temperature=torch.ones(len(row_start) - 1),
                impl="native",
                check=False,
            )


@pytest.mark.usefixtures("cpu_level")
def test_half_precision_is_read_exactly() -> None:
    # Every float16 and bfloat16 value is the largest once: the argmax among it, its neighbours and -inf must agree.
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        every = every[every.isfinite()].sort().values
        rows = len(every) - 1
        logits = torch.stack([every[:-1], every[1:]], 1)
        verdict = verify_tree(
            build_tree(torch.full((rows,), -1), torch.arange(rows + 1), max_rows=1),
            torch.zeros(rows, dtype=torch.int64),
            logits,
            torch.zeros(rows, dtype=torch.float64),
            torch.arange(rows + 1),
            temperature=torch.zeros(rows),
            impl="native",
        )
        assert torch.equal(verdict.next_token.long(), logits.double().argmax(-1))


def test_native_coins_are_the_references_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, draws = (torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator) for _ in range(2))
    for n in (0, 1, 2, 9):
        coins = [uniforms(seeds, draws, n, impl=impl) for impl in ("reference", "native", "auto")]
        assert torch.equal(coins[0], coins[1])
        assert torch.equal(coins[0], coins[2])
    strided = uniforms(seeds[::2], draws[::2].clone(), 3)
    assert torch.equal(strided, uniforms(seeds, draws, 3)[::2])
    with pytest.raises(NotImplementedError, match="uniforms: no 'triton' implementation for cpu"):
        uniforms(seeds, draws, 3, impl="triton")


def test_a_missing_build_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    load_native.cache_clear()
    monkeypatch.setitem(sys.modules, "viasd_kernels._native", None)
    with pytest.raises(ImportError, match=r"pip install --no-build-isolation -e \..*impl=\"reference\""):
        load_native()
