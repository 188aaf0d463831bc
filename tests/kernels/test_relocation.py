"""The package under another name, from another place, out of an archive, and as kernel hubs load it."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import viasd_kernels

ROOT = Path(__file__).parents[2]
PACKAGE = Path(viasd_kernels.__file__).parent

# What a copy of the package is asked to do: two ops, and one of the functions with another engine's signature.
CALLS = """
import importlib, importlib.util, sys, torch
def load(name, init):
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[init.rpartition("/")[0]])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
def outcome(kernels, impl):
    logits = torch.arange(35.0).view(5, 7).sin()
    rows = (torch.tensor([0, 6, 2, 3, 4]), logits, torch.linspace(0.05, 0.9, 5).double(), torch.tensor([0, 3, 5]))
    chain = kernels.accept_chain(*rows, temperature=torch.ones(2), draft_logits=logits.cos(), impl=impl)
    tree = kernels.build_tree(torch.tensor([-1, 0, 0, -1, 0]), rows[3], max_rows=3, impl=impl)
    sglang = importlib.import_module(kernels.__name__ + ".compat.sglang")
    out = torch.zeros(5).int(), torch.full((1, 3), -1).int(), torch.zeros(1).int()
    links = torch.tensor([[[0, 1, 2, 3, 4]], [[1, 3, -1, -1, -1]], [[-1, 2, -1, 4, -1]]])
    sglang.verify_tree_greedy(*out, torch.arange(5)[None], *links, torch.tensor([[1, 4, 0, 0, 6]]), impl=impl)
    return [field.tolist() for field in (*chain, *tree, *out)]
"""


def run(code: str, *arguments: object, isolated: bool = False, **environment: str) -> str:
    """In a process of its own; isolated, it finds no package but those installed, and no setting of ours."""
    command = [sys.executable, *(["-I"] if isolated else []), "-c", CALLS + code, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "source"
    subprocess.run([sys.executable, str(ROOT / "csrc/hub/assemble.py"), str(folder)], check=True)
    return folder


def test_two_copies_run_beside_each_other(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "other_name", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
sys.path[:0] = sys.argv[1:]
import viasd_kernels, other_name
assert other_name.__file__.startswith(sys.argv[1]) and not viasd_kernels.__file__.startswith(sys.argv[1])
for impl in ("reference", "native", "triton"):
    assert outcome(viasd_kernels, impl) == outcome(other_name, impl) == outcome(viasd_kernels, "reference"), impl
assert torch.ops.other_name.accept_chain.default is not torch.ops.viasd_kernels.accept_chain.default
own = [name for name in sys.modules if name.startswith("other_name.")]
assert {"other_name._native", "other_name.acceptance.triton_chain"} <= set(own)
print("fine")
"""
    pytest.importorskip("triton")
    assert run(code, tmp_path, PACKAGE.parent, TRITON_INTERPRET="1") == "fine\n"


def test_the_assembled_folder_works_in_a_clean_process(assembled):
    # As a hub's loader does it: by path, under a name made up for the build, with nothing on sys.path.
    code = """
kernels = load("viasd_kernels_0a1b2c3", sys.argv[1])
reference = outcome(kernels, "reference")
assert outcome(kernels, "auto") == reference  # without the compiled modules
for impl, reason in (("native", "was not built with it"), ("triton", "takes CPU tensors in its interpreter only")):
    try:
        outcome(kernels, impl)
    except NotImplementedError as error:
        assert f"no {impl!r} implementation for cpu tensors" in str(error) and reason in str(error), error
    else:
        raise AssertionError(impl)
assert torch.ops.viasd_kernels_0a1b2c3.accept_chain.default
assert not {"viasd_kernels", "viasd", "transformers", "triton.compiler"} & (set(sys.modules) - before)
print("fine")
"""
    init = assembled / "torch-ext/viasd_kernels/__init__.py"
    assert run("before = set(sys.modules)" + code, init, isolated=True) == "fine\n"
    assert {path.suffix for path in (assembled / "torch-ext").rglob("*.*")} <= {".py", ".json", ".md", ".pyc"}
    assert {path.name for path in assembled.iterdir()} == {"build.toml", "LICENSE", "torch-ext"}


def test_the_assembled_folder_runs_out_of_an_archive(assembled, tmp_path):
    pytest.importorskip("triton")
    archive = shutil.make_archive(str(tmp_path / "kernels"), "zip", assembled / "torch-ext")
    code = """
sys.path.insert(0, sys.argv[1])
import viasd_kernels
assert viasd_kernels.__file__.startswith(sys.argv[1])
assert outcome(viasd_kernels, "triton") == outcome(viasd_kernels, "reference")
print("fine")
"""
    assert run(code, archive, TRITON_INTERPRET="1", PYTHONPATH="") == "fine\n"


def test_an_existing_folder_is_left_alone(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "csrc/hub/assemble.py"), str(tmp_path)], capture_output=True)
    assert done.returncode == 1
    assert b"must not exist yet" in done.stderr
    assert not list(tmp_path.iterdir())


def test_kernel_builder_reads_the_configuration(assembled):
    builder = pytest.importorskip(
        "kernels._rust", reason="the package `kernels`, which has the parser, is not installed"
    )
    assert builder.Build.open(assembled).general is not None


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_relative_or_of_what_every_hub_has(path):
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    foreign = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign <= {"torch", "triton"}
    assert "triton" not in foreign or path.name.startswith("triton")
