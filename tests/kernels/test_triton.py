"""Triton kernels without a GPU: run in the interpreter, and compiled ahead of time for each target.

The interpreter must be chosen before Triton is imported, and then nothing can be compiled: it has a process of its own.
"""

import importlib.util
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
    "*i64": ("tokens_ptr", "row_tokens_ptr", "row_start_ptr", "where_ptr", "final_ptr"),
    "*i32": ("num_accepted_ptr", "next_token_ptr", "status_ptr", "argmax_ptr", "num_emitted_ptr"),
    "*i8": ("regions_ptr",),
    "*i1": ("escalated_ptr",),
    "*fp64": ("uniforms_ptr", "sums_ptr"),
}
LOGITS = ("target_ptr", "draft_ptr", "slim_ptr")


def cases():
    """Every acceptance kernel with every constant that changes its code."""
    if importlib.util.find_spec("triton") is None:
        return []
    from viasd_kernels.acceptance import triton_chain, triton_gate, triton_rows, triton_stats

    block, splits = {"BLOCK": triton_rows.BLOCK}, {"SPLITS": triton_rows.MAX_SPLITS}
    warps, found = triton_rows.NUM_WARPS, []
    for has_draft in (False, True):
        draft = {"HAS_DRAFT": has_draft}
        found.append((triton_stats.acceptance_stats_kernel, {**draft, "UNDERSHOOT": has_draft, **block}, warps))
        for kernel in ("chain_partials_kernel", "chain_walk_kernel", "chain_draw_kernel"):
            found.append((getattr(triton_chain, kernel), {**draft, **splits, **block}, warps))
    for criterion in sorted(triton_gate.CRITERION_ROWS.values()):
        constants = {"CRITERION": criterion, "BLOCK": triton_gate.GATE_BLOCK}
        found.append((triton_gate.gate_walk_kernel, constants, triton_gate.GATE_WARPS))
    return found


def signature(kernel, constants, logits):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name in LOGITS:
            return logits
        if name == "tokens_ptr" and kernel.fn.__name__ == "gate_walk_kernel":
            return "*i32"
        own = [pointer for pointer, names in POINTERS.items() if name in names]
        if own:
            return own[0]
        return "*fp32" if name.endswith("_ptr") else "fp32" if name.startswith("log_") else "i32"

    return {name: kind(name) for name in kernel.arg_names}


@needs_triton
@pytest.mark.parametrize("target", SHARED_LIMITS, ids=str)
def test_every_kernel_compiles_without_a_spill(target):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    table = []
    for kernel, constants, num_warps in cases():
        for logits in ("*fp32", "*bf16"):
            gpu = GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", target, 32)
            source = ASTSource(kernel, signature(kernel, constants, logits), constants)
            compiled = triton.compile(source, target=gpu, options={"num_warps": num_warps})
            table.append((kernel.fn.__name__, constants, logits, *resources(compiled), compiled.metadata.shared))
    report = "\n".join(map(str, table))
    assert len(table) == 22
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
def test_every_kernel_runs_in_the_interpreter():
    folder = Path(__file__).parent / "interpreted"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 28


def test_cpu_tensors_need_the_interpreter():
    arguments = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="no 'triton' implementation for cpu tensors"):
        accept_chain(*arguments, torch.tensor([0, 1]), temperature=torch.ones(1), impl="triton")


def test_importing_the_package_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import viasd_kernels, viasd; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr
