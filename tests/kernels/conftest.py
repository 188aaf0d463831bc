"""Fixtures of the kernel tests."""

import importlib.util
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import hf_mapping
import pybind11
import pytest
import torch
from native_cases import cpu_level

from viasd_kernels.acceptance import native as acceptance_native
from viasd_kernels.tree_verify import native as tree_native


@pytest.fixture
def one_thread():
    """Many small tensor operations: on a busy machine torch's threads wait for each other far longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(name="cpu_level", params=["portable", "avx2", "avx512"])
def each_cpu_level(request):
    """The test runs on each compiled variant that this processor supports."""
    with cpu_level(request.param):
        yield request.param


@pytest.fixture(scope="session")
def host_team(tmp_path_factory):
    """What viasd_kernels._cuda is, compiled for the CPU: see host_team.cpp."""
    csrc, target = Path(__file__).parents[2] / "csrc", tmp_path_factory.mktemp("host_team") / "_cuda.so"
    includes = [f"-I{path}" for path in (csrc, pybind11.get_include(), sysconfig.get_path("include"))]
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
    sources = [str(Path(__file__).parent / "host_team.cpp"), str(csrc / "cuda/binding_cuda.cpp")]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, *flags, *includes, *sources, "-o", str(target)], check=True)
    spec = importlib.util.spec_from_file_location("_cuda", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_host_team(host_team, monkeypatch):
    """impl="native" calls the kernels of GPUs, on a team that is simulated."""
    for module in (acceptance_native, tree_native):
        monkeypatch.setattr(module, "launch_place", lambda device: (0, 0))
        monkeypatch.setattr(module, "load_cuda", lambda: host_team)


@pytest.fixture
def poisoned():
    """Memory that torch hands out uninitialised holds NaN, or the largest integer: what an op leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(params=["reference", "auto"])
def each_implementation(request, monkeypatch):
    """The reference, then what a user gets: native where there is one for the dtype."""
    monkeypatch.setattr(hf_mapping, "IMPLEMENTATION", request.param)
