"""The compiled acceptance_stats and gate_tiers against the reference on random batches, bad rows included."""

import threading

import pytest
import torch
from chain_cases import DTYPES, LAST_COIN, random_chains

from viasd_kernels import Gate, GateVerdict, Region, Stats, Status, acceptance_stats, gate_tiers
from viasd_kernels.acceptance.reference import acceptance_stats as reference_stats

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

FLOATS = [name for name in Stats._fields if name != "target_argmax"]
CRITERIA = {"ratio": (0.5, 0.05), "tv": (0.3, 0.9), "kl": (0.3, 2.0)}


def row_arguments(seed: int, dtype: torch.dtype, sequences: int, vocab: int) -> dict:
    chains = random_chains(seed, dtype, sequences, vocab)
    rows = len(chains["row_tokens"])
    return {
        "draft_logits": chains["draft_logits"],
        "target_logits": chains["target_logits"],
        "tokens": chains["row_tokens"],
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(rows)[:rows],
    }


def assert_as_accurate_as_torch(found: Stats, rows: dict, **options: float) -> None:
    """Errors against float64 at most twice those of the same expression in torch, and one unit in the last place.

    Of float64 there is nothing more exact to compare with: 1e-14 of the reference.
    """
    narrow = reference_stats(**rows, **options)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in rows.items()}
    exact = reference_stats(**wide, **options)
    assert torch.equal(found.target_argmax, narrow.target_argmax)
    for name in FLOATS:
        got, theirs, want = (getattr(stats, name) for stats in (found, narrow, exact))
        assert got.dtype == theirs.dtype, name
        assert torch.equal(got.isnan(), theirs.isnan()), name
        assert torch.equal(got.isinf(), theirs.isinf()), name
        finite = want.isfinite()
        scale = want[finite].abs().clamp(min=1)
        error, allowed = ((x.double()[finite] - want[finite]).abs() / scale for x in (got, theirs))
        if finite.any():
            slack = 1e-14 if got.dtype == torch.float64 else torch.finfo(got.dtype).eps
            assert float(error.max()) <= 2 * float(allowed.max()) + slack, name


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("undershoot", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_equal_the_reference(dtype: torch.dtype, undershoot: bool) -> None:
    rows = row_arguments(3, dtype, 300, 37)
    options = {"alpha": 0.3, "beta": 0.7, "undershoot": undershoot}
    found = acceptance_stats(**rows, **options, impl="native", check=False)
    assert_as_accurate_as_torch(found, rows, **options)
    assert found.ratio.isnan().any()
    assert found.kl_draft_target.isinf().any()


@pytest.mark.parametrize("vocab", [5, 15, 16, 17, 255, 257, 4095, 4096, 4097, 8193, 50_001])
def test_statistics_at_the_ends_of_blocks_and_chunks(vocab: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = row_arguments(vocab, dtype, 12, vocab)
        for width in {vocab - 1, max(vocab // 2, 1), 1}:
            rows["draft_logits"] = rows["draft_logits"][:, :width]
            found = acceptance_stats(**rows, impl="native", check=False)
            assert_as_accurate_as_torch(found, rows)


def test_statistics_of_two_dtypes() -> None:
    rows = row_arguments(4, torch.float32, 60, 11)
    rows["target_logits"] = rows["target_logits"].to(torch.bfloat16)
    assert_as_accurate_as_torch(acceptance_stats(**rows, impl="native", check=False), rows)
    rows["draft_logits"] = rows["draft_logits"].double()
    assert_as_accurate_as_torch(acceptance_stats(**rows, impl="native", check=False), rows)


def test_rows_far_apart_and_weights_too_small_for_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(20, 3000, generator=generator) * 60
    draft = torch.randn(20, 3000, generator=generator) * 60
    rows = {
        "draft_logits": draft,
        "target_logits": target,
        "tokens": torch.randint(3000, (20,), generator=generator),
        "temperature": torch.ones(20),
    }
    assert_as_accurate_as_torch(acceptance_stats(**rows, impl="native"), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mass_too_small_to_weigh_still_makes_a_divergence_infinite(dtype: torch.dtype) -> None:
    # Id 1 is masked in one of the rows; in the other it is likely, hardly there, or nothing even to the reference.
    inf, smallest = float("inf"), 103 if dtype == torch.float32 else 744
    for depth, has_mass in ((0, True), (smallest * 0.6, True), (smallest - 1, True), (smallest + 5, False)):
        row, masked = torch.tensor([[0.0, -depth]], dtype=dtype), torch.tensor([[0.0, -inf]], dtype=dtype)
        for impl in ("reference", "native"):
            for draft, target, name in ((row, masked, "kl_draft_target"), (masked, row, "kl_target_draft")):
                found = acceptance_stats(draft, target, torch.tensor([0]), temperature=torch.ones(1), impl=impl)
                assert bool(getattr(found, name).isinf()) == has_mass
                assert bool(found.rkl.isinf()) == (has_mass and name == "kl_draft_target")
                assert not found.draft_entropy.isnan()


def walk(chains: dict, criterion: str, impl: str, stretch: float = 1.0, has_draft: bool = True) -> GateVerdict:
    sequences = len(chains["temperature"])
    accept, escalate = (torch.full((sequences,), level * stretch) for level in CRITERIA[criterion])
    return gate_tiers(
        chains["row_tokens"],
        chains["target_logits"],
        (chains["uniforms"] * stretch).clamp(max=LAST_COIN),
        chains["row_start"],
        gate=Gate(criterion, accept.double(), escalate.double()),
        temperature=chains["temperature"],
        draft_logits=chains["draft_logits"] if has_draft else None,
        impl=impl,
        check=False,
    )


def same_sequences(left: GateVerdict, right: GateVerdict, row_start: torch.Tensor) -> torch.Tensor:
    sequence = torch.repeat_interleave(row_start.diff())
    differing_rows = ((left.tokens != right.tokens) | (left.regions != right.regions)).float()
    same = torch.zeros(len(row_start) - 1).index_add(0, sequence, differing_rows) == 0
    for name in ("num_emitted", "escalate", "status"):
        same &= getattr(left, name) == getattr(right, name)
    return same


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("case", ["ratio", "ratio, no draft", "tv", "kl"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_equals_the_reference(dtype: torch.dtype, case: str) -> None:
    criterion, has_draft = case.split(",")[0], "no draft" not in case
    chains = random_chains(5, dtype, 1000, 37)
    expected = walk(chains, criterion, "reference", has_draft=has_draft)
    found = walk(chains, criterion, "native", has_draft=has_draft)
    # Sequences within 1e-6 of a decision boundary change with coins and thresholds that much smaller or larger.
    nearby = [walk(chains, criterion, "native", stretch, has_draft) for stretch in (1 - 1e-6, 1 + 1e-6)]
    decided = same_sequences(*nearby, chains["row_start"])
    assert int((~decided).sum()) <= 3
    assert same_sequences(expected, found, chains["row_start"])[decided].all()
    assert expected.regions.unique().tolist() == [int(region) for region in Region]
    seen = {bit for status in expected.status.tolist() for bit in Status if status & bit}
    assert {Status.TARGET_NOT_FINITE, Status.TARGET_EMPTY, Status.TOKEN_OUT_OF_RANGE} <= seen
    assert (Status.DRAFT_INVALID in seen) == (criterion != "ratio")
    rows = torch.repeat_interleave(decided, chains["row_start"].diff())
    for name, got, want in zip(Stats._fields, found.stats, expected.stats, strict=True):
        torch.testing.assert_close(
            got[rows], want[rows], rtol=1e-5, atol=2e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_gate_on_a_large_vocabulary() -> None:
    chains = random_chains(6, torch.float32, 10, 150_001)
    for criterion in CRITERIA:
        verdicts = [walk(chains, criterion, impl) for impl in ("reference", "native")]
        assert same_sequences(*verdicts, chains["row_start"]).all()


def test_refuses_a_wrong_row_start_even_unchecked() -> None:
    chains = random_chains(6, torch.float32, 2, 5)
    for row_start in ([0, 1, 99], [1, 1, len(chains["row_tokens"])], [0, 9, len(chains["row_tokens"])]):
        with pytest.raises(ValueError, match="row_start"):
            walk(chains | {"row_start": torch.tensor(row_start)}, "ratio", "native")


def test_two_threads_do_not_disturb_each_other() -> None:
    torch.set_num_threads(2)
    batches = [random_chains(seed, torch.float32, 3, 40_000) for seed in (8, 9)]
    rows = [row_arguments(seed, torch.float32, 3, 40_000) for seed in (8, 9)]

    def results(which: int) -> list[torch.Tensor]:
        *verdict, stats = walk(batches[which], "tv", "native")
        statistics = acceptance_stats(**rows[which], impl="native", check=False)
        return [tensor.nan_to_num(-7.0) for tensor in (*verdict, *stats, *statistics)]

    expected, disturbed, start = [results(0), results(1)], [], threading.Barrier(2)

    def work(which: int) -> None:
        start.wait()
        for _ in range(10):
            disturbed.extend(not torch.equal(a, b) for a, b in zip(results(which), expected[which], strict=True))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(disturbed) == 2 * 10 * len(expected[0])
    assert not any(disturbed)
