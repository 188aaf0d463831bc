"""Fixtures of the kernel tests."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Many small tensor operations: on a busy machine torch's threads wait for each other far longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
