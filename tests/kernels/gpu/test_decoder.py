"""Random decoders of GPUs, against the reference."""

import pytest
import torch
from on_device import DEVICE, HALF, INTERPRETED
from random_passes import check_decoder

pytest.importorskip("hypothesis")

from decoder_configs import STABLE, configs
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about infinities that are meant


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@settings(STABLE, max_examples=2 if INTERPRETED else 3)  # each has kernels of its own to compile
@given(config=configs(), seed=st.integers(0, 2**20))
def test_the_decoder(dtype, config, seed):
    check_decoder("triton", config, dtype, seed, prompts=(0, 1, 3, 40, 70), device=DEVICE)
