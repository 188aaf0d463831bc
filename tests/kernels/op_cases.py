"""Every op with each optional argument alone and all of them together, and what torch.library must find right in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from viasd_kernels import build_tree
from viasd_kernels.acceptance import op as acceptance
from viasd_kernels.layer_skip.op import bypass_linear_op, bypass_norm_op
from viasd_kernels.sampling import uniforms_op
from viasd_kernels.tree_verify.op import build_tree_op, compact_kv_op, tree_attention_op, verify_tree_op

ROWS, VOCAB, WIDTH = 5, 7, 6
ROW_START = torch.tensor([0, 3, 5])


@dataclass
class OpCase:
    """An op, the arguments that every call gives, and those that a call may change."""

    op: torch._ops.OpOverload
    required: dict[str, object]
    optional: dict[str, dict[str, object]]  # by what is given

    def calls(self) -> Iterator[tuple[str, dict[str, object]]]:
        yield "nothing", self.required
        for given, changes in self.optional.items():
            yield given, self.required | changes


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def chain_arguments(dtype: torch.dtype, index_dtype: torch.dtype) -> dict[str, object]:
    coins = torch.rand(ROWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "row_tokens": torch.arange(ROWS, dtype=index_dtype),
        "logits": random(ROWS, VOCAB, dtype=dtype),
        "uniforms": coins,
        "row_start": ROW_START,
    }


def acceptance_cases(dtype: torch.dtype, index_dtype: torch.dtype) -> dict[str, OpCase]:
    temperature, draft = torch.tensor([0.0, 1.0]), random(ROWS, VOCAB - 1, dtype=dtype)
    rows = chain_arguments(dtype, index_dtype)
    stats = {
        "draft_logits": draft,
        "target_logits": rows["logits"],
        "tokens": rows["row_tokens"],
        "temperature": torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0]),
        "alpha": 0.5,
        "beta": 0.3,
        "undershoot": False,
    }
    stats_options = {"alpha": {"alpha": 0.2}, "beta": {"beta": 0.7}, "undershoot": {"undershoot": True}}
    thresholds = {"criterion": "ratio", "accept": torch.full((2,), 0.5), "escalate": torch.full((2,), 0.5)}
    drafted = {"draft_logits": draft}
    return {
        "acceptance_stats": OpCase(acceptance.acceptance_stats, stats, together(stats_options)),
        "accept_chain": OpCase(
            acceptance.accept_chain,
            rows | {"temperature": temperature, "draft_logits": None},
            {"draft_logits": drafted},
        ),
        "gate_tiers": OpCase(
            acceptance.gate_tiers,
            rows | thresholds | {"temperature": temperature, "draft_logits": None},
            {"draft_logits": drafted} | {kind: drafted | {"criterion": kind} for kind in ("tv", "kl")},
        ),
    }


def layer_skip_cases(dtype: torch.dtype) -> dict[str, OpCase]:
    keep = torch.tensor([True, False, True, True, False])
    delta = {"delta": random(ROWS, WIDTH, dtype=dtype)}
    norm = {
        "hidden": random(ROWS, WIDTH, dtype=dtype),
        "delta": None,
        "keep": keep,
        "weight": random(WIDTH, dtype=dtype),
    }
    norm |= {"eps": 1e-6, "weight_offset": 0.0, "delta_weight": None}
    offset, post = {"weight_offset": 1.0}, delta | {"delta_weight": random(WIDTH, dtype=dtype)}
    linear = {"x": random(ROWS, WIDTH, dtype=dtype), "weight": random(8, WIDTH, dtype=dtype), "keep": keep}
    linear |= {"bias": None, "residual": None, "activation": None}
    bias, residual = {"bias": random(8, dtype=dtype)}, {"residual": random(ROWS, 8, dtype=dtype)}
    activations = {kind: {"activation": kind} for kind in ("silu_mul", "gelu_tanh_mul")}
    return {
        "bypass_norm": OpCase(
            bypass_norm_op,
            norm,
            {"delta": delta, "weight_offset": offset, "delta_weight": post, "all": post | offset},
        ),
        "bypass_linear": OpCase(  # an activation leaves no room for a residual
            bypass_linear_op,
            linear,
            {"bias": bias, "residual": residual, "all": bias | residual, **activations}
            | {f"bias and {kind}": bias | changes for kind, changes in activations.items()},
        ),
    }


def tree_cases(dtype: torch.dtype, index_dtype: torch.dtype) -> dict[str, OpCase]:
    parents, row_start = torch.tensor([-1, 0, 0, -1, 0], dtype=index_dtype), ROW_START.to(index_dtype)
    tree = build_tree(parents, row_start, max_rows=3, impl="reference")
    rows = chain_arguments(dtype, index_dtype)
    walk = dict(zip(("depth", "first_child", "next_sibling"), tree[1:], strict=True))
    walk |= {"row_tokens": rows["row_tokens"], "full_logits": rows["logits"], "uniforms": rows["uniforms"]}
    walk |= {"row_start": row_start, "temperature": torch.tensor([0.0, 1.0]), "draft_logits": None}
    walk |= {"proposal": "deterministic", "full_argmax": None}
    argmax = {"full_argmax": torch.tensor([1, 2, 0, 4, 3], dtype=index_dtype)}
    draft = {"draft_logits": random(ROWS, VOCAB - 1, dtype=dtype)}
    drawn = {kind: draft | {"proposal": kind} for kind in ("without_replacement", "with_replacement")}
    alone = argmax | {"full_logits": None, "temperature": torch.zeros(2)}
    wants_gradient = {"full_logits": random(ROWS, VOCAB, dtype=dtype).requires_grad_()}
    attention = {"q": random(ROWS, 4, 8, dtype=dtype), "k_pool": random(12, 2, 8, dtype=dtype)}
    attention |= {"v_pool": random(12, 2, 8, dtype=dtype) + 1, "slots": torch.arange(12, dtype=torch.int32).view(2, 6)}
    attention |= {"context_len": torch.tensor([3, 1]), "row_start": ROW_START, "ancestors": tree.ancestors}
    attention |= {"scale": 0.35, "soft_cap": None, "window": None}
    caches = {"k": random(2, 6, 2, 3, dtype=dtype), "v": random(2, 6, 2, 3, dtype=dtype) + 1}
    moves = {"path": torch.tensor([0, 2, -1, 0, 1], dtype=index_dtype), "num_accepted": torch.tensor([1, 1])}
    return {
        "build_tree": OpCase(build_tree_op, {"parents": parents, "row_start": row_start, "max_rows": 70}, {}),
        "tree_attention": OpCase(
            tree_attention_op, attention, together({"soft_cap": {"soft_cap": 0.7}, "window": {"window": 2}})
        ),
        "verify_tree": OpCase(
            verify_tree_op,
            walk,
            {"full_argmax": argmax, "full_argmax alone": alone, "logits that need a gradient": wants_gradient, **drawn}
            | {f"all, {kind}": argmax | changes for kind, changes in drawn.items()},
        ),
        "compact_kv": OpCase(
            compact_kv_op, caches | moves | {"row_start": row_start, "start": torch.tensor([2, 4])}, {}
        ),
    }


def together(optional: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    everything = {name: value for changes in optional.values() for name, value in changes.items()}
    return optional | {"all": everything}


def op_cases(dtype: torch.dtype = torch.float32, index_dtype: torch.dtype = torch.int64) -> dict[str, OpCase]:
    seeds = {"seeds": torch.arange(3), "draws": torch.arange(3), "n": 5}
    return {
        "uniforms": OpCase(uniforms_op, seeds, {}),
        **acceptance_cases(dtype, index_dtype),
        **layer_skip_cases(dtype),
        **tree_cases(dtype, index_dtype),
    }


CALLS = [(name, given) for name, case in op_cases().items() for given, _ in case.calls()]


def opcheck(name: str, given: str, impl: str, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """Schema, fake, autograd registration and tracing of one call."""
    case = op_cases(dtype, index_dtype)[name]
    values = (*dict(case.calls())[given].values(), impl)
    if name != "gate_tiers":
        torch.library.opcheck(case.op, values)
        return
    # opcheck's own comparison under tracing takes NaN, which every unjudged row has, for a difference: ours does not.
    torch.library.opcheck(case.op, values, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    torch.compiler.reset()  # every test compiles the same function: they would count as its recompilations
    traced = torch.compile(case.op, backend="aot_eager", dynamic=True, fullgraph=True)(*values)
    for found, expected in zip(traced, case.op(*values), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
