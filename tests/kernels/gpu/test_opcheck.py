"""torch.library.opcheck of the Triton ops in the interpreter, with every optional argument."""

import pytest
import torch
from on_device import INTERPRETED
from op_cases import CALLS, opcheck

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on CPU tensors"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about infinities that are meant
]


@pytest.mark.parametrize(("name", "given"), [call for call in CALLS if call[0] != "uniforms"])
def test_opcheck(name, given):
    opcheck(name, given, "triton", torch.float32, torch.int64)
