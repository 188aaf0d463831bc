"""What runs here, and the build of the kernels in CUDA C++."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gpu.bench import Bench
from gpu.record import Part
from measure import command_output, environment
from viasd_kernels.checks import cuda_runs, triton_runs

ROOT = Path(__file__).parents[2]


def parts(bench: Bench) -> list[Part]:
    return [Part("environment/versions", versions), Part("environment/build", build)]


def versions(bench: Bench) -> dict[str, Any]:
    import triton

    found = environment() | {"triton": triton.__version__, "device": str(bench.device)}
    if not triton_runs(bench.device.type):
        raise RuntimeError("Triton takes no tensors of this device")
    if bench.device.type == "cuda":
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(bench.device)))
    bandwidth = bench.cases.bandwidth
    for _ in range(3):
        bandwidth.sample()
    return found | bandwidth.to_dict()


def build(bench: Bench) -> dict[str, Any]:
    """``python setup.py build_ext --inplace`` where it has not been done, and nvcc is there."""
    nvcc = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    found: dict[str, Any] = {"nvcc": command_output(nvcc, "--version").rpartition("\n")[2] if nvcc else None}
    if importlib.util.find_spec("viasd_kernels._cuda") is not None:
        return found | {"extension": "was there"}
    if nvcc is None:
        return found | {"extension": "left out: nvcc was not found"}
    if bench.plan.rehearsal:
        return found | {"extension": "left out of a rehearsal"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(bench.remaining_s, 1), check=False
    )
    importlib.invalidate_caches()
    if done.returncode or not cuda_runs("cuda"):
        raise RuntimeError(
            f"{' '.join(command[1:])} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
        )
    return found | {"extension": "built"}
