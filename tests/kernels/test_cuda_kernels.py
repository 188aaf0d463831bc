"""The kernels in CUDA C++ without a GPU: their bodies on a simulated team, and the built module without a driver."""

import importlib.util
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from chain_cases import LAST_COIN, random_chains
from test_native_accept_chain import run as run_chain
from test_native_accept_chain import same_sequences as same_chains
from test_native_tree import random_batch
from test_native_tree import same_sequences as same_trees
from tree_cases import RULES

from viasd_kernels import Status, build_tree, verify_tree
from viasd_kernels.native import load_cuda

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
needs_cuda_build = pytest.mark.skipif(
    importlib.util.find_spec("viasd_kernels._cuda") is None, reason="built without nvcc"
)


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "no draft"])
@by_dtype
def test_accept_chain_equals_the_reference(on_host_team, dtype: torch.dtype, has_draft: bool) -> None:
    batch = random_chains(3, dtype, 1000, 37)
    if not has_draft:
        batch["draft_logits"] = None
    expected, found = run_chain(batch, "reference"), run_chain(batch, "native")
    # Sequences within 1e-6 of a decision boundary: their outcome changes with coins that much smaller or larger.
    decided = same_chains(run_chain(batch, "native", 1 - 1e-6), run_chain(batch, "native", 1 + 1e-6))
    assert int((~decided).sum()) <= 2
    assert same_chains(expected, found)[decided].all()
    seen = {bit for status in expected.status.tolist() for bit in Status if status & bit}
    assert {Status.TARGET_NOT_FINITE, Status.TARGET_EMPTY, Status.TOKEN_OUT_OF_RANGE} <= seen
    assert (expected.num_accepted > 2).any()


def test_accept_chain_on_wide_strided_rows_of_two_dtypes(on_host_team) -> None:
    batch = random_chains(5, torch.float32, 12, 8_193)
    batch["draft_logits"] = batch["draft_logits"].half()
    expected = run_chain(batch, "reference")
    assert same_chains(expected, run_chain(batch, "native")).all()
    for name in ("target_logits", "draft_logits"):  # each second row starts where no 16 bytes do
        batch[name] = torch.stack([batch[name], -batch[name]], 1)[:, 0]
    assert same_chains(expected, run_chain(batch, "native")).all()


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45])
def test_temperatures_whose_inverse_is_no_number(on_host_team, temperature: float) -> None:
    batch = random_chains(7, torch.float32, 300, 37)
    batch["temperature"] = torch.full((300,), temperature)
    assert same_chains(run_chain(batch, "reference"), run_chain(batch, "native")).all()
    for proposal in RULES:
        (tree, tokens, full, coins, row_start), options = random_batch(6, torch.float32, proposal, 100, 37)
        options |= {"temperature": torch.full((100,), temperature), "check": False}
        verdicts = [
            verify_tree(tree, tokens, full, coins, row_start, impl=impl, **options) for impl in ("reference", "native")
        ]
        assert same_trees(*verdicts, row_start).all()


@pytest.mark.parametrize("proposal", RULES)
@by_dtype
def test_verify_tree_equals_the_reference(on_host_team, dtype: torch.dtype, proposal: str) -> None:
    (tree, tokens, full, coins, row_start), options = random_batch(5, dtype, proposal, sequences=300, vocab=37)

    def verify(impl: str, stretch: float):
        stretched = (coins * stretch).clamp(max=LAST_COIN)
        return verify_tree(tree, tokens, full, stretched, row_start, impl=impl, check=False, **options)

    expected, found = verify("reference", 1.0), verify("native", 1.0)
    decided = same_trees(verify("native", 1 - 1e-6), verify("native", 1 + 1e-6), row_start)
    assert int((~decided).sum()) <= 1
    assert same_trees(expected, found, row_start)[decided].all()
    assert (expected.num_accepted > 1).any()


@pytest.mark.parametrize("has_logits", [True, False])
def test_verify_tree_by_given_argmax_ids(on_host_team, has_logits: bool) -> None:
    (tree, tokens, full, coins, row_start), _ = random_batch(8, torch.float32, "deterministic", 200, 7)
    temperature = torch.zeros(200)
    argmax = full.nan_to_num(0).argmax(-1)
    argmax[::17] = 2**40
    logits = full if has_logits else None
    verdicts = [
        verify_tree(
            tree, tokens, logits, coins, row_start, temperature=temperature, full_argmax=argmax, impl=impl, check=False
        )
        for impl in ("reference", "native")
    ]
    assert same_trees(*verdicts, row_start).all()
    assert (verdicts[0].num_accepted > 1).any()


@pytest.mark.parametrize("max_rows", [20, 70])
def test_build_tree_equals_the_reference(on_host_team, max_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, max_rows + 1, (40,), generator=generator)
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    local = torch.cat([torch.arange(length) for length in lengths.tolist()])
    parents = (torch.rand(local.shape, generator=generator) * local).long() - (local == 0).long()
    parents[torch.rand(local.shape, generator=generator) < 0.05] = 7  # forward links, cycles, and some that are right
    expected = build_tree(parents, row_start, max_rows=max_rows, impl="reference", check=False)
    found = build_tree(parents, row_start, max_rows=max_rows, impl="native", check=False)
    for name in expected._fields:
        assert torch.equal(getattr(expected, name), getattr(found, name)), name
    assert (expected.depth == -1).any()


@needs_cuda_build
def test_every_kernel_is_built_for_each_architecture_without_a_spill() -> None:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listing = subprocess.run(
        [tool, "--dump-resource-usage", load_cuda().__file__], capture_output=True, text=True, check=True
    ).stdout
    for architecture in (80, 90, 100):
        of_architecture = "".join(re.findall(rf"arch = sm_{architecture}\n(?:(?!Fatbin).)*", listing, re.DOTALL))
        names = Counter(re.findall(r"Function \S*?\d([a-z_]+)_kernel", of_architecture))
        assert names == {"accept_chain": 3, "build_tree": 1, "verify_tree": 3, "compact_kv": 2}, of_architecture
        assert set(re.findall(r"STACK:(\d+)", of_architecture)) == {"0"}, of_architecture


@needs_cuda_build
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_call_without_a_driver_says_so() -> None:
    nowhere = dict.fromkeys(("parents", "row_start", "ancestors", "depth", "first_child", "next_sibling"), 0)
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        load_cuda().build_tree(**nowhere, num_sequences=1, max_rows=1, place=(0, 0))
