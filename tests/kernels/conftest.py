"""Fixtures of the kernel tests."""

import hf_mapping
import pytest
import torch
from native_cases import cpu_level


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
