"""The native SkipDecoder against the reference, on random configurations, weights and passes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from decoder_configs import STABLE, configs
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import DTYPES, LEVELS, cpu_level
from random_passes import check_decoder

from viasd_kernels.layer_skip import DecoderConfig


@pytest.mark.parametrize(("level", "dtype"), [*product(LEVELS, DTYPES), ("amx", torch.bfloat16)], ids=str)
@settings(STABLE, max_examples=40)
@given(config=configs(), seed=st.integers(0, 2**20))
def test_errs_at_most_twice_as_much_as_the_reference(
    level: str, dtype: torch.dtype, config: DecoderConfig, seed: int
) -> None:
    with cpu_level(level):
        check_decoder("native", config, dtype, seed)
