"""torch.compile of each public function, whole, before the process has called anything else of the package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from first_calls import FUNCTIONS, OF_ENGINES

import viasd_kernels


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_each_function_compiles_as_the_first_call_of_a_process(backend, tmp_path):
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("first_calls.py")
    done = subprocess.run(
        [sys.executable, str(script), backend], env={**os.environ, **settings}, capture_output=True, text=True
    )
    expected = [f"{function.__name__} same" for function in FUNCTIONS + OF_ENGINES]
    assert done.stdout.splitlines() == expected, done.stderr[-4000:]
    assert done.returncode == 0


def test_the_functions_are_all_that_are_public():
    public = {name for name in viasd_kernels.__all__ if type(getattr(viasd_kernels, name)).__name__ == "function"}
    # Of the engines' functions only vLLM's for its runner V1 is missing: it takes torch's generators one by one.
    # weight_shapes takes a configuration and yields names and shapes, digest yields a number: nothing to compile.
    assert {function.__name__ for function in FUNCTIONS} == public - {"weight_shapes", "digest"}
