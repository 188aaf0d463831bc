"""The loops under all native ops: the same bits from every compiled variant and any number of threads; exp; OpenMP."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from chain_cases import DTYPES, random_chains

from viasd_kernels import Gate, accept_chain, acceptance_stats, build_tree, gate_tiers, verify_tree
from viasd_kernels.native import load_native

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


def supported_levels() -> list[str]:
    native, levels = load_native(), []
    for level in ("portable", "avx2", "avx512"):
        try:
            native.set_cpu_level(level)
        except ValueError:
            continue
        levels.append(level)
    native.set_cpu_level("auto")
    return levels


def exp_nonpositive(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(values)
    load_native().exp_nonpositive(values.data_ptr(), out.data_ptr(), len(values), values.dtype == torch.float64)
    return out


@pytest.mark.usefixtures("cpu_level")
def test_exp_is_within_1_1_units_in_the_last_place() -> None:
    for dtype, lowest, precision in ((torch.float32, -64.0, 24), (torch.float64, -600.0, 53)):
        generator = torch.Generator().manual_seed(0)
        values = torch.cat([lowest * torch.rand(500_000, generator=generator, dtype=dtype), -torch.rand(500_000)])
        values = torch.cat([values.to(dtype), torch.tensor([-0.0, 0.0, lowest * 0.99999, -1e-30], dtype=dtype)])
        # 64 bits of mantissa where the machine has them.
        exact = np.exp(values.numpy().astype(np.longdouble))
        ulp = np.ldexp(np.longdouble(1), np.frexp(exact)[1] - precision)
        error = np.abs(exp_nonpositive(values).numpy() - exact) / ulp
        assert error.max() <= 1.1
        assert exp_nonpositive(torch.zeros(3, dtype=dtype)).tolist() == [1.0] * 3
        beyond = torch.tensor([lowest * 1.0001, lowest * 1.2, -1e30, -torch.inf], dtype=dtype)
        assert exp_nonpositive(beyond).tolist() == [0.0] * 4


def test_log_is_within_2_units_in_the_last_place() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        [
            1 + torch.rand(20_000, generator=generator, dtype=torch.float64),
            2 ** (2000 * torch.rand(20_000, generator=generator, dtype=torch.float64) - 1000),
            1 + 2.0 ** -torch.arange(1, 53, dtype=torch.float64),
            1 - 2.0 ** -torch.arange(1, 53, dtype=torch.float64),
        ]
    )
    native = load_native()
    found = np.array([native.log_positive(value) for value in values.tolist()])
    exact = np.log(values.numpy().astype(np.longdouble))
    ulp = np.ldexp(np.longdouble(1), np.frexp(np.abs(exact))[1] - 53)
    assert (np.abs(found - exact) / ulp).max() <= 2
    assert native.log_positive(1.0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_has_the_same_bits_on_every_processor(dtype: torch.dtype) -> None:
    values = -90 * torch.rand(100_003, dtype=dtype, generator=torch.Generator().manual_seed(1))
    native, found = load_native(), []
    for level in supported_levels():
        native.set_cpu_level(level)
        found.append(exp_nonpositive(values))
    native.set_cpu_level("auto")
    assert all(torch.equal(bits, found[0]) for bits in found)


def chain(chains: dict) -> list[torch.Tensor]:
    return list(accept_chain(**chains, impl="native", check=False))


def stats(chains: dict) -> list[torch.Tensor]:
    rows = len(chains["row_tokens"])
    found = acceptance_stats(
        chains["draft_logits"],
        chains["target_logits"],
        chains["row_tokens"],
        temperature=torch.tensor([0.0, 0.7, 1.0]).repeat(rows)[:rows],
        impl="native",
        check=False,
    )
    return list(found)


def gate(criterion: str, chains: dict) -> list[torch.Tensor]:
    sequences = len(chains["temperature"])
    low, high = {"ratio": (0.5, 0.05), "tv": (0.3, 0.9), "kl": (0.3, 2.0)}[criterion]
    *verdict, found = gate_tiers(
        chains["row_tokens"],
        chains["target_logits"],
        chains["uniforms"],
        chains["row_start"],
        gate=Gate(criterion, torch.full((sequences,), low), torch.full((sequences,), high)),
        temperature=chains["temperature"],
        draft_logits=chains["draft_logits"],
        impl="native",
        check=False,
    )
    return [*verdict, *found]


def tree(proposal: str, chains: dict) -> list[torch.Tensor]:
    """Every drafted row a child of the root."""
    lengths = chains["row_start"].diff()
    local = torch.arange(len(chains["row_tokens"])) - torch.repeat_interleave(chains["row_start"][:-1], lengths)
    verdict = verify_tree(
        build_tree((local > 0).long() - 1, chains["row_start"], max_rows=8),
        chains["row_tokens"],
        chains["target_logits"],
        chains["uniforms"],
        chains["row_start"],
        temperature=chains["temperature"],
        draft_logits=None if proposal == "deterministic" else chains["draft_logits"],
        proposal=proposal,
        impl="native",
        check=False,
    )
    return list(verdict)


OPS = {
    "accept_chain": chain,
    "acceptance_stats": stats,
    **{f"gate_tiers, {criterion}": partial(gate, criterion) for criterion in ("ratio", "tv", "kl")},
    **{f"verify_tree, {rule}": partial(tree, rule) for rule in ("deterministic", "without_replacement")},
}


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    """NaN's payload is not promised."""
    return [
        (tensor.nan_to_num(12345.0) if tensor.is_floating_point() else tensor).numpy().tobytes() for tensor in tensors
    ]


# One sequence or several, and vocabularies of a few blocks or of many chunks, whose ends fit neither.
SIZES = [(40, 5), (40, 17), (3, 4099), (1, 70_003), (5, 40_000)]


@pytest.mark.parametrize(("sequences", "vocab"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_variants_and_threads_give_the_same_bits(name: str, dtype: torch.dtype, sequences: int, vocab: int) -> None:
    chains = random_chains(vocab, dtype, sequences, vocab)
    native = load_native()
    expected = bits(OPS[name](chains))
    for level in supported_levels():
        native.set_cpu_level(level)
        for threads in (1, 2, 5) if vocab > 20_000 else (1,):
            torch.set_num_threads(threads)
            assert bits(OPS[name](chains)) == expected, (level, threads)
    native.set_cpu_level("auto")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'portable', 'avx2', 'avx512' or 'amx', got 'sse9'"):
        load_native().set_cpu_level("sse9")
    assert load_native().cpu_level() == supported_levels()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime_serves_torch_and_the_ops() -> None:
    program = """
import torch
from viasd_kernels import accept_chain
torch.set_num_threads(2)
torch.rand(1000, 1000) @ torch.rand(1000, 1000)
logits, coins, start = torch.zeros(4, 100_000), torch.zeros(4, dtype=torch.float64), torch.arange(5)
accept_chain(torch.zeros(4, dtype=torch.int64), logits, coins, start, temperature=torch.ones(4), impl="native")
paths = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(*sorted(path for path in paths if "omp" in path.rsplit("/", 1)[1]))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 1, found
