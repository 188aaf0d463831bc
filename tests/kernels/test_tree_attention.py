"""tree_attention against a dense masked softmax in float64, written from the definition."""

import pytest
import torch

from viasd_kernels.tree_verify import build_tree, tree_attention

LENGTHS, CONTEXTS = [5, 0, 70, 1], [7, 3, 0, 20]
PARENTS = [-1, 0, 0, 1, 3, -1, *[row // 2 for row in range(69)], -1]


class Case:
    """Random queries, a pool in shuffled order with NaN in every slot no sequence uses, and the trees above."""

    def __init__(self, heads: int, kv_heads: int, dtype: torch.dtype, head_dim: int = 8) -> None:
        generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
        rows, used = sum(LENGTHS), [length + context for length, context in zip(LENGTHS, CONTEXTS, strict=True)]
        self.row_start = torch.tensor([0, *LENGTHS]).cumsum(0)
        self.context_len = torch.tensor(CONTEXTS)
        self.q = torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        pool = torch.full((2, sum(used) + 10, kv_heads, head_dim), float("nan"), dtype=dtype)
        shuffled = torch.randperm(sum(used) + 10, generator=generator)[: sum(used)]
        values = torch.randn(2, sum(used), kv_heads, head_dim, generator=generator, dtype=torch.float64)
        pool[:, shuffled] = values.to(dtype)
        self.k_pool, self.v_pool = pool
        self.slots = torch.full((len(LENGTHS), max(used) + 2), -5, dtype=torch.int32)
        for sequence, slots in enumerate(shuffled.split(used)):
            self.slots[sequence, : len(slots)] = slots
        self.tree = build_tree(torch.tensor(PARENTS), self.row_start, max_rows=70)
        self.scale = head_dim**-0.5

    def run(self, **options: float | None) -> torch.Tensor:
        inputs = (self.q, self.k_pool, self.v_pool, self.slots, self.context_len, self.row_start, self.tree.ancestors)
        return tree_attention(*inputs, scale=self.scale, **options)

    def expected(self, soft_cap: float | None = None, window: int | None = None) -> torch.Tensor:
        out = torch.empty(self.q.shape, dtype=torch.float64)
        group = self.q.shape[1] // self.k_pool.shape[1]
        for sequence, context in enumerate(CONTEXTS):
            begin = int(self.row_start[sequence])
            parents = PARENTS[begin : begin + LENGTHS[sequence]]
            for row in range(LENGTHS[sequence]):
                chain = [row]
                while parents[chain[-1]] >= 0:
                    chain.append(parents[chain[-1]])
                positions = list(range(context)) + [context + len(chain) - 1 - i for i in range(len(chain))]
                entries = list(range(context)) + [context + member for member in chain]
                if window is not None:
                    entries = [e for e, p in zip(entries, positions, strict=True) if p > positions[context] - window]
                slots = self.slots[sequence, torch.tensor(entries)].long()
                for head in range(self.q.shape[1]):
                    keys = self.k_pool[slots, head // group].double()
                    scores = keys @ self.q[begin + row, head].double() * self.scale
                    if soft_cap is not None:
                        scores = soft_cap * (scores / soft_cap).tanh()
                    out[begin + row, head] = scores.softmax(0) @ self.v_pool[slots, head // group].double()
        return out


@pytest.mark.parametrize("options", [{}, {"soft_cap": 0.7}, {"window": 4}, {"window": 1, "soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_equals_dense_masked_softmax_in_float64(heads: int, kv_heads: int, options: dict[str, float]) -> None:
    case = Case(heads, kv_heads, torch.float64)
    torch.testing.assert_close(case.run(**options), case.expected(**options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_accumulates_in_float32(dtype: torch.dtype) -> None:
    case = Case(4, 2, dtype)
    out, expected = case.run(soft_cap=5.0), case.expected(soft_cap=5.0)
    assert out.dtype == dtype
    # One rounding to the output's dtype, plus float32 sums of up to 70 terms.
    bound = torch.finfo(dtype).eps * expected.abs() + 1e-5
    assert ((out.double() - expected).abs() <= bound).all()


def test_a_pruned_row_sees_its_context_and_itself() -> None:
    case = Case(2, 2, torch.float64)
    parents = torch.tensor(PARENTS)
    parents[3] = -1
    case.tree = build_tree(parents, case.row_start, max_rows=70, check=False)
    slots = case.slots[0, [0, 1, 2, 3, 4, 5, 6, 10]].long()
    for head in range(2):
        weights = (case.k_pool[slots, head] @ case.q[3, head] * case.scale).softmax(0)
        torch.testing.assert_close(case.run()[3, head], weights @ case.v_pool[slots, head])


def test_strided_inputs_give_the_same() -> None:
    case = Case(4, 2, torch.float32)
    expected = case.run()
    case.q = torch.stack([case.q, case.q], 1)[:, 1]
    case.k_pool = case.k_pool.transpose(0, 1).contiguous().transpose(0, 1)
    assert not case.q.is_contiguous()
    assert not case.k_pool.is_contiguous()
    assert torch.equal(case.run(), expected)


def test_arguments_are_checked() -> None:
    case = Case(4, 2, torch.float32)
    case.slots[2, 3] = -1
    with pytest.raises(ValueError, match=r"slots must be in \[0, 116\), got -1"):
        case.run()
    case = Case(4, 2, torch.float32)
    case.context_len = torch.tensor([7, 3, 3, 20])
    with pytest.raises(ValueError, match="at most max_len = 72"):
        case.run()
    case = Case(4, 2, torch.float32)
    case.tree = case.tree._replace(ancestors=case.tree.ancestors[:, :1].contiguous())
    with pytest.raises(ValueError, match="a bit for each of 70 rows, got 1 words"):
        case.run()
    with pytest.raises(ValueError, match="window must be >= 1 or None, got 0"):
        Case(4, 2, torch.float32).run(window=0)
    with pytest.raises(ValueError, match="soft_cap must be above 0 or None, got -1"):
        Case(4, 2, torch.float32).run(soft_cap=-1.0)
    with pytest.raises(ValueError, match="divides 5, got 2"):
        Case(5, 2, torch.float32).run()
    with pytest.raises(NotImplementedError, match="no 'native' implementation for cpu"):
        Case(4, 2, torch.float16).run(impl="native")
