"""What the acceptance functions refuse and how they say so; strides, and synchronisations."""

from math import nan

import pytest
import torch
from torch._subclasses import FakeTensorMode

from viasd_kernels.acceptance import Gate, accept_chain, acceptance_stats, gate_tiers, op

ROWS, VOCABULARY = 5, 7
ROW_START = [0, 3, 5]
STRIDED = torch.zeros(VOCABULARY, ROWS).T


def arguments(**changes):
    """A valid call of accept_chain, with changes."""
    generator = torch.Generator().manual_seed(0)
    valid = {
        "row_tokens": torch.tensor([0, 1, 2, 3, 4]),
        "target_logits": torch.randn(ROWS, VOCABULARY, generator=generator),
        "uniforms": torch.rand(ROWS, generator=generator, dtype=torch.float64),
        "row_start": torch.tensor(ROW_START),
        "temperature": torch.tensor([0.0, 1.0]),
        "draft_logits": torch.randn(ROWS, VOCABULARY - 1, generator=generator),
    }
    return valid | changes


def gate_arguments(**changes):
    valid = arguments()
    valid["slim_logits"] = valid.pop("target_logits")
    valid["gate"] = Gate("tv", torch.full((2,), 0.2), torch.full((2,), 0.6))
    return valid | changes


REFUSED = [
    ({"row_tokens": [0, 1]}, TypeError, "row_tokens must be a tensor, got list"),
    ({"row_tokens": torch.zeros(ROWS)}, TypeError, r"row_tokens must be torch.int32 or torch.int64, got torch.float32"),
    ({"row_tokens": torch.zeros(4).long()}, ValueError, r"row_tokens must have shape \[5\], got \[4\]"),
    ({"logits": None}, TypeError, "logits must be a tensor, got NoneType"),
    ({"logits": torch.zeros(ROWS, VOCABULARY).int()}, TypeError, "logits must be .*, got torch.int32"),
    ({"logits": torch.zeros(ROWS)}, ValueError, r"logits must have shape \[any, any\], got \[5\]"),
    ({"logits": torch.zeros(ROWS, 0)}, ValueError, r"logits must have a vocabulary of 1 or more, got shape \[5, 0\]"),
    ({"logits": STRIDED}, ValueError, r"logits must be contiguous in its last dimension, got strides \(1, 5\)"),
    ({"uniforms": torch.rand(ROWS)}, TypeError, "uniforms must be torch.float64, got torch.float32"),
    ({"uniforms": torch.rand(2).double()}, ValueError, r"uniforms must have shape \[5\], got \[2\]"),
    ({"row_start": torch.tensor(ROW_START).int()}, TypeError, "row_start must be torch.int64, got torch.int32"),
    ({"row_start": torch.zeros(0).long()}, ValueError, r"row_start must have one entry more than .* got shape \[0\]"),
    ({"row_start": torch.tensor([0, 3, 4])}, ValueError, "row_start must run from 0 to the number of rows, 5"),
    ({"row_start": torch.tensor([1, 3, 5])}, ValueError, "row_start must run from 0"),
    ({"row_start": torch.tensor([0, 6, 5])}, ValueError, "row_start must run from 0"),
    ({"temperature": torch.ones(2).half()}, TypeError, "temperature must be torch.float32 or torch.float64"),
    ({"temperature": torch.ones(3)}, ValueError, r"temperature must have shape \[2\], got \[3\]"),
    ({"temperature": torch.tensor([1.0, -0.5])}, ValueError, "temperature must be finite and >= 0, got -0.5 at 1"),
    ({"temperature": torch.tensor([nan, 1.0])}, ValueError, "temperature must be finite and >= 0, got nan at 0"),
    ({"draft_logits": torch.zeros(4, 7)}, ValueError, r"draft_logits must have shape \[5, any\], got \[4, 7\]"),
    ({"draft_logits": torch.zeros(ROWS, 8)}, ValueError, r"draft_logits must have between 1 and 7 columns"),
    ({"draft_logits": torch.zeros(ROWS, 0)}, ValueError, r"draft_logits must have between 1 and 7 columns"),
    ({"draft_logits": torch.zeros(ROWS, 7, device="meta")}, ValueError, "draft_logits must be on cpu, got meta"),
    ({"impl": "cuda"}, ValueError, "impl must be 'auto', 'reference', 'triton' or 'native', got 'cuda'"),
    ({"impl": "triton"}, NotImplementedError, "no 'triton' implementation for cpu tensors; available: reference"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_accept_chain_refuses(changes, error, message):
    changes = {"target_logits" if name == "logits" else name: value for name, value in changes.items()}
    with pytest.raises(error, match=f"accept_chain: .*{message}"):
        accept_chain(**arguments(**changes))


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_gate_tiers_refuses(changes, error, message):
    changes = {"slim_logits" if name == "logits" else name: value for name, value in changes.items()}
    with pytest.raises(error, match=f"gate_tiers: .*{message}"):
        gate_tiers(**gate_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gate": "ratio"}, TypeError, "gate must be a Gate, got str"),
        ({"gate": Gate("tv", torch.zeros(3), torch.ones(3))}, ValueError, r"gate.accept must have shape \[2\], got"),
        ({"draft_logits": None}, ValueError, "draft_logits must be given for the criterion 'tv', got None"),
        ({"impl": "triton"}, NotImplementedError, "no 'triton' implementation for cpu tensors; available: reference"),
    ],
)
def test_gate_tiers_refuses_gates(changes, error, message):
    with pytest.raises(error, match=f"gate_tiers: {message}"):
        gate_tiers(**gate_arguments(**changes))


@pytest.mark.parametrize(
    ("criterion", "accept", "escalate", "error", "message"),
    [
        (
            "ratio",
            [0.6, 0.3],
            [0.3, 0.6],
            ValueError,
            "wrong order: 'ratio' needs escalate <= accept .* sequence 1 has",
        ),
        ("ratio", [0.6, nan], [0.3, 0.3], ValueError, "wrong order"),
        ("tv", [0.6], [0.2], ValueError, "wrong order: 'tv' needs accept <= escalate .* accept 0.6 and escalate 0.2"),
        ("kl", [0.6], [0.2], ValueError, "wrong order: 'kl' needs accept <= escalate .* 1 of 1 sequence"),
        ("entropy", [0.6], [0.2], ValueError, "criterion must be 'ratio', 'tv' or 'kl', got 'entropy'"),
        ("tv", [0.1], [0.2, 0.3], ValueError, r"accept and escalate must both be \[B\], got \[1\] and \[2\]"),
        ("tv", [[0.1]], [[0.2]], ValueError, r"accept and escalate must both be \[B\], got \[1, 1\]"),
        ("tv", 0.1, 0.2, TypeError, r"accept must be a float32 or float64 tensor \[B\], got float"),
        ("tv", [1], [2], TypeError, r"accept must be a float32 or float64 tensor \[B\], got torch.int64"),
    ],
)
def test_a_gate_refuses(criterion, accept, escalate, error, message):
    if isinstance(accept, list):
        accept, escalate = torch.tensor(accept), torch.tensor(escalate)
    with pytest.raises(error, match=f"Gate: .*{message}"):
        Gate(criterion, accept, escalate)


def test_a_gate_refuses_thresholds_of_two_dtypes():
    with pytest.raises(TypeError, match="Gate: accept and escalate must have one dtype and device"):
        Gate("tv", torch.zeros(1), torch.ones(1).double())


def test_equal_thresholds_are_allowed_and_a_gate_is_frozen():
    gate = Gate("ratio", torch.full((2,), 0.5), torch.full((2,), 0.5))
    with pytest.raises(AttributeError):
        gate.criterion = "tv"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens": torch.zeros(4).long()}, ValueError, r"tokens must have shape \[5\], got \[4\]"),
        ({"temperature": torch.ones(2)}, ValueError, r"temperature must have shape \[5\], got \[2\]"),
        ({"draft_logits": torch.zeros(ROWS, 8)}, ValueError, "draft_logits must have between 1 and 7 columns"),
        ({"target_logits": [[0.0]]}, TypeError, "target_logits must be a tensor, got list"),
        ({"impl": "triton"}, NotImplementedError, "no 'triton' implementation for cpu tensors"),
    ],
)
def test_acceptance_stats_refuses(changes, error, message):
    logits = torch.zeros(ROWS, VOCABULARY)
    valid = {"draft_logits": logits, "target_logits": logits, "tokens": torch.arange(ROWS)}
    valid["temperature"] = torch.ones(ROWS)
    with pytest.raises(error, match=f"acceptance_stats: {message}"):
        acceptance_stats(**(valid | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("wide", ["draft_logits", "target_logits"])
@pytest.mark.parametrize("impl", ["reference", "native"])
def test_two_dtypes_of_logits_are_computed_in_the_wider(dtype, wide, impl):
    mixed = arguments(impl=impl)
    mixed[wide] = mixed[wide].to(dtype)
    exact = {name: value.double() if name.endswith("logits") else value for name, value in mixed.items()}
    for first, second in zip(accept_chain(**mixed), accept_chain(**exact), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_any_outer_stride(impl):
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(ROWS, 2, VOCABULARY + 3, generator=generator)
    target, draft = base[:, 0, :VOCABULARY], base[:, 1, : VOCABULARY - 2]
    strided = arguments(target_logits=target, draft_logits=draft, impl=impl)
    dense = arguments(target_logits=target.contiguous(), draft_logits=draft.contiguous(), impl=impl)
    for first, second in zip(accept_chain(**strided), accept_chain(**dense), strict=True):
        assert torch.equal(first, second)
    first = gate_tiers(**gate_arguments(slim_logits=target, draft_logits=draft, impl=impl))
    second = gate_tiers(**gate_arguments(slim_logits=target.contiguous(), draft_logits=draft.contiguous(), impl=impl))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.stats.tv.nan_to_num(9), second.stats.tv.nan_to_num(9))


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_inputs_are_left_alone(impl):
    valid = gate_arguments()
    before = {name: value.clone() for name, value in valid.items() if isinstance(value, torch.Tensor)}
    gate_tiers(**valid, impl=impl)
    valid["target_logits"] = valid.pop("slim_logits")
    del valid["gate"]
    accept_chain(**valid, impl=impl)
    for name, value in before.items():
        assert torch.equal(value, valid["target_logits" if name == "slim_logits" else name]), name


# ------------------------------------------------------------------------------------------------------ the ops


def test_without_check_nothing_synchronises_outside_the_op():
    # Fake tensors have no values: whatever looked at one would raise.
    mode = FakeTensorMode()

    def faked(values):
        return {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    valid, gated = faked(arguments()), faked(gate_arguments())
    for name in ("accept", "escalate"):
        object.__setattr__(gated["gate"], name, mode.from_tensor(getattr(gated["gate"], name)))
    with mode:
        assert accept_chain(**valid, check=False).next_token.shape == (2,)
        assert gate_tiers(**gated, check=False).stats.tv.shape == (ROWS,)
        stats = acceptance_stats(
            valid["draft_logits"],
            valid["target_logits"],
            valid["row_tokens"],
            temperature=torch.ones(ROWS),
            check=False,
        )
        assert stats.rkl.shape == (ROWS,)


@pytest.mark.parametrize("name", ["accept_chain", "acceptance_stats", "gate_tiers"])
def test_the_op_itself_refuses_an_unknown_implementation(name):
    valid = arguments()
    rows = tuple(valid[key] for key in ("row_tokens", "target_logits", "uniforms", "row_start"))
    half = torch.full((2,), 0.5)
    values = {
        "accept_chain": (*rows, valid["temperature"], None),
        "gate_tiers": (*rows, "ratio", half, half, valid["temperature"], None),
        "acceptance_stats": (rows[1], rows[1], rows[0], torch.ones(ROWS), 0.5, 0.3, False),
    }[name]
    with pytest.raises(NotImplementedError, match=f"{name}: no 'other' implementation"):
        getattr(op, name)(*values, "other")
