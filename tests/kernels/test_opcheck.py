"""torch.library.opcheck of every op, implementation and optional argument; Triton's are in gpu/."""

import pytest
import torch
from op_cases import CALLS, op_cases, opcheck

pytestmark = pytest.mark.usefixtures("one_thread")

ON_GPUS = ("accept_chain", "build_tree", "verify_tree", "compact_kv")  # in CUDA C++, here on a simulated team


@pytest.mark.parametrize(
    ("dtype", "index_dtype"), [(torch.float32, torch.int64), (torch.bfloat16, torch.int32)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize(("name", "given"), CALLS)
def test_opcheck(name, given, impl, dtype, index_dtype):
    opcheck(name, given, impl, dtype, index_dtype)


@pytest.mark.usefixtures("on_host_team")
@pytest.mark.parametrize(("name", "given"), [call for call in CALLS if call[0] in ON_GPUS])
def test_opcheck_of_what_gpus_run(name, given):
    opcheck(name, given, "native", torch.float32, torch.int64)


@pytest.mark.parametrize("given", [call[1] for call in CALLS if call[0] == "acceptance_stats"])
@pytest.mark.parametrize("impl", ["reference", "native"])
def test_opcheck_of_statistics_in_float64(impl, given):
    opcheck("acceptance_stats", given, impl, torch.float64, torch.int64)


def test_the_table_names_every_argument():
    for name, case in op_cases().items():
        schema = [argument.name for argument in case.op._schema.arguments]
        assert len(case.required) + 1 == len(schema), name
        changed = {argument for changes in case.optional.values() for argument in changes}
        for argument in case.op._schema.arguments:
            if isinstance(argument.type, torch.OptionalType):
                assert argument.name in changed, (name, argument.name)
