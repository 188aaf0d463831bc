"""Triton kernels without a GPU: run in the interpreter, and compiled ahead of time for each target.

The interpreter must be chosen before Triton is imported, and then nothing can be compiled: it has a process of its own.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from viasd_kernels import accept_chain

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SHARED_LIMITS = {80: 166_912, 90: 232_448, 100: 232_448, "gfx942": 65_536}
POINTERS = {
    "*i64": (
        *("tokens_ptr", "row_tokens_ptr", "row_start_ptr", "where_ptr", "final_ptr"),
        *("parents_ptr", "ancestors_ptr", "start_ptr"),
    ),
    "*i32": (
        *("num_accepted_ptr", "next_token_ptr", "status_ptr", "argmax_ptr", "num_emitted_ptr"),
        *("depth_ptr", "first_child_ptr", "next_sibling_ptr", "path_ptr", "slots_ptr", "context_len_ptr"),
    ),
    "*i16": ("cache_ptr", "staging_ptr"),
    "*i8": ("regions_ptr",),
    "*i1": ("escalated_ptr", "keep_ptr"),
    "*fp64": ("uniforms_ptr", "sums_ptr"),
}
ACTIVATIONS = (
    *("target_ptr", "draft_ptr", "slim_ptr", "q_ptr", "k_ptr", "v_ptr", "out_ptr"),
    *("hidden_ptr", "delta_ptr", "delta_weight_ptr", "hidden_out_ptr", "normed_ptr", "x_ptr", "weight_ptr", "bias_ptr"),
    *("residual_ptr", "packed_ptr", "q_norm_ptr", "k_norm_ptr", "keys_ptr", "values_ptr"),
)
FLOATS = ("log_alpha", "log_beta", "scale", "soft_cap", "eps", "weight_offset")
DTYPES = ("*fp32", "*bf16")


def entries(family, kernel):
    """A kernel's configurations, of every device."""
    from viasd_kernels.configurations import load_configurations

    return [entry for found in load_configurations(family)[kernel].values() for entry in found]


def acceptance_cases():
    """Every acceptance kernel with every constant that changes its code: (kernel, constants, dtype, options)."""
    from viasd_kernels.acceptance import triton_chain, triton_gate, triton_rows, triton_stats

    (rows,), (gate,) = entries("acceptance", "rows"), entries("acceptance", "gate_tiers")
    block, splits = {"BLOCK": rows["BLOCK"]}, {"SPLITS": triton_rows.MAX_SPLITS}
    options, found = {"num_warps": rows["num_warps"]}, []
    for has_draft, dtype in zip((False, True), DTYPES, strict=True):
        draft = {"HAS_DRAFT": has_draft}
        constants = {**draft, "UNDERSHOOT": has_draft, **block}
        found.append((triton_stats.acceptance_stats_kernel, constants, dtype, options))
        for kernel in ("chain_partials_kernel", "chain_walk_kernel", "chain_draw_kernel"):
            found.append((getattr(triton_chain, kernel), {**draft, **splits, **block}, dtype, options))
    for criterion in sorted(triton_gate.CRITERION_ROWS.values()):
        constants = {"CRITERION": criterion, "BLOCK": gate["BLOCK"]}
        found.append((triton_gate.gate_walk_kernel, constants, "*bf16", {"num_warps": gate["num_warps"]}))
    return found


def tree_cases():
    """The tree kernels; attention in every configuration, for the widest heads that one serves without a spill."""
    from viasd_kernels.tree_verify import triton_attention, triton_build, triton_compact, triton_walk

    found = [
        (triton_build.build_tree_kernel, {"BLOCK_W": 4, "BLOCK": triton_build.BLOCK}, None, {"num_warps": 1}),
        (
            triton_compact.compact_kv_kernel,
            {"PATH_BLOCK": triton_compact.PATH_BLOCK, "BLOCK": triton_compact.BLOCK},
            None,
            {"num_warps": 4},
        ),
        (
            triton_attention.combine_splits_kernel,
            {"HEAD_DIM": 256, "SPLITS": triton_attention.MAX_SPLITS, "BLOCK_D": 256},
            "*bf16",
            {"num_warps": 4},
        ),
    ]
    for kernel, dtype, widest in (("tree_attention", "*bf16", 256), ("tree_attention_float32", "*fp32", 128)):
        for entry in entries("tree_verify", kernel):
            head_dim = entry.get("up_to", widest)
            constants = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "GROUP": 4}
            constants |= {"BLOCK_M": entry["MAX_BLOCK_M"], "BLOCK_N": entry["BLOCK_N"]}
            options = {"num_warps": entry["num_warps"], "num_stages": entry["num_stages"]}
            for flag in (False, True):
                flags = dict.fromkeys(("CAPPED", "WINDOWED", "SPLIT"), flag)
                found.append((triton_attention.tree_attention_kernel, constants | flags, dtype, options))
    (walk,) = entries("tree_verify", "verify_tree")
    sizes = {"BLOCK_ROWS": triton_walk.BLOCK_ROWS, "BLOCK": walk["BLOCK"]}
    for has_target, proposal, dtype in ((False, 0, None), (True, 0, "*bf16"), (True, 1, "*bf16"), (True, 2, "*fp32")):
        constants = {"HAS_TARGET": has_target, "HAS_ARGMAX": proposal != 1, "PROPOSAL": proposal, **sizes}
        found.append((triton_walk.verify_tree_kernel, constants, dtype, {"num_warps": walk["num_warps"]}))
    return found


def layer_skip_cases():
    """The decoder's kernels; products in every configuration, with the epilogue that holds most at a time."""
    from viasd_kernels.layer_skip import triton_linear, triton_norm, triton_rotary

    found = []
    for width, flag, dtype in ((576, False, "*bf16"), (8192, True, "*fp32"), (8192, True, "*bf16")):
        block, num_warps = triton_norm.norm_block(width)
        constants = {"HAS_DELTA": flag, "POST_NORM": flag, "BLOCK": block}
        found.append((triton_norm.bypass_norm_kernel, constants, dtype, {"num_warps": num_warps}))
    for i, (entry, dtype) in enumerate(itertools.product(entries("layer_skip", "bypass_linear"), DTYPES)):
        options = {"num_warps": entry["num_warps"], "num_stages": entry["num_stages"]}
        sizes = {"BLOCK_R": entry.get("up_to", triton_linear.MAX_ROWS), "BLOCK_N": entry["BLOCK_N"]}
        sizes |= {"BLOCK_K": entry["BLOCK_K_BYTES"] // (4 if dtype == "*fp32" else 2), "PRECISION": "ieee"}
        for activation in (2, 0) if i == 1 else (2,):
            flags = {"HAS_BIAS": activation > 0, "HAS_RESIDUAL": activation == 0, "ACTIVATION": activation}
            constants = {**flags, "EVEN_DEPTH": activation == 0, **sizes}
            found.append((triton_linear.bypass_linear_kernel, constants, dtype, options))
    for dtype in DTYPES:
        constants = {"NORM": True, "BLOCK": 128}
        found.append((triton_rotary.rotate_and_store_kernel, constants, dtype, {"num_warps": 1}))
    return found


def signature(kernel, constants, dtype):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name in ACTIVATIONS:
            return dtype or "*fp32"
        if name == "tokens_ptr" and kernel.fn.__name__ == "gate_walk_kernel":
            return "*i32"
        if name == "width" and not constants.get("HAS_TARGET", True):
            return "i64"
        own = [pointer for pointer, names in POINTERS.items() if name in names]
        if own:
            return own[0]
        return "*fp32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"

    return {name: kind(name) for name in kernel.arg_names}


@needs_triton
@pytest.mark.parametrize("target", SHARED_LIMITS, ids=str)
@pytest.mark.parametrize(
    ("cases", "count"),
    [(acceptance_cases, 11), (tree_cases, 15), (layer_skip_cases, 12)],
    ids=["acceptance", "tree", "layer-skip"],
)
def test_every_kernel_compiles_without_a_spill(cases, count, target):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    table = []
    for kernel, constants, dtype, options in cases():
        gpu = GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", target, 32)
        # As at a launch on tensors of usual sizes: only then are loads wide, and tiles copied ahead.
        aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith(("_ptr", "_stride"))]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(kernel, signature(kernel, constants, dtype), constants, attributes)
        compiled = triton.compile(source, target=gpu, options=options)
        table.append((kernel.fn.__name__, constants, dtype, *resources(compiled), compiled.metadata.shared))
    report = "\n".join(map(str, table))
    assert len(table) >= count
    assert all(spills == 0 for *_, spills, _ in table), report
    assert all(shared <= SHARED_LIMITS[target] for *_, shared in table), report


def resources(compiled):
    """Registers of a thread, and bytes or registers that did not fit into them."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        return tuple(int(re.search(rf"\.{name}: +(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count"))
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return tuple(int(re.search(rf"{name}:(\d+)", shown.stdout)[1]) for name in ("REG", "STACK"))


@needs_triton
@pytest.mark.parametrize(("whole_passes", "count"), [(True, 43), (False, 132)], ids=["passes", "ops"])
def test_every_kernel_runs_in_the_interpreter(whole_passes, count):
    tests = Path(__file__).parent.glob("gpu/test_*.py")
    chosen = [str(file) for file in tests if (file.name in ("test_decoder.py", "test_layer_skip.py")) == whole_passes]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *chosen],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= count


def test_cpu_tensors_need_the_interpreter():
    arguments = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="no 'triton' implementation for cpu tensors"):
        accept_chain(*arguments, torch.tensor([0, 1]), temperature=torch.ones(1), impl="triton")


def test_without_triton_everything_else_works_and_the_rest_says_why():
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch, viasd, viasd_kernels
from op_cases import op_cases
for name, case in op_cases().items():
    case.op(*case.required.values(), "native")
inputs = (torch.zeros(1).long(), torch.zeros(1, 3), torch.zeros(1).double(), torch.tensor([0, 1]))
print(viasd_kernels.accept_chain(*inputs, temperature=torch.zeros(1)).next_token.tolist())
layer, keep, calls = torch.zeros(1, 3), torch.ones(1).bool(), {}
calls["accept_chain"] = lambda: viasd_kernels.accept_chain(*inputs, temperature=torch.zeros(1), impl="triton")
calls["build_tree"] = lambda: viasd_kernels.build_tree(torch.tensor([-1]), inputs[3], max_rows=1, impl="triton")
calls["bypass_norm"] = lambda: viasd_kernels.bypass_norm(layer, None, keep, layer[0], eps=1e-6, impl="triton")
for name, call in calls.items():
    try:
        call()
    except NotImplementedError as error:
        print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # with Triton CPU tensors would run
    paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths).rstrip(os.pathsep)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    refused = "no 'triton' implementation for cpu tensors; available: reference, native (Triton is not installed)"
    expected = ["[0]", *(f"{name}: {refused}" for name in ("accept_chain", "build_tree", "bypass_norm"))]
    assert done.stdout.splitlines() == expected, done.stderr
