"""Builds the native extensions with ninja; everything else about the package is in pyproject.toml."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# No contraction to fused multiply-adds: the same results on every processor. Floating-point traps are never enabled;
# assuming that changes no result and lets loops with a select vectorise.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]

# A kernel compiled several times says by its file's name for which processors: csrc/cpu_level.h chooses at run time.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
FLAGS_BY_SUFFIX = {
    "_avx2.cpp": AVX2,
    "_avx512.cpp": AVX512,
    "_amx.cpp": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}

# Only objects made from .cu files have code for GPUs; the last architecture's stays portable to later ones.
CUDA_ARCHITECTURES = ("80", "90", "100")
CUDA_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden"]


class NinjaBuild(build_ext):
    """One ninja graph per extension: parallel, and incremental in an editable install."""

    def build_extension(self, ext: Extension) -> None:
        import ninja
        from ninja.ninja_syntax import Writer

        root = Path(__file__).parent.resolve()
        base = self.get_finalized_command("build").build_base  # pip's own build_temp does not last
        build_dir = root / base / f"{sys.implementation.cache_tag}-{ext.name}"
        build_dir.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        cxx = os.environ.get("CXX", "c++")
        macros = _predefined_macros(cxx)
        flags = list(FLAGS)
        if sys.platform == "linux" and "__clang__" not in macros:
            # Compiled for OpenMP, not linked with it: the symbols are those of the one runtime that torch has loaded,
            # with global visibility, so no second one can come in. Elsewhere the pragmas are ignored.
            flags.append("-fopenmp")
        own_flags = os.environ.get("CXXFLAGS", "")
        includes = [f'-I"{path}"' for path in (root / "csrc", _pybind11_include(), sysconfig.get_path("include"))]
        link_flags = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        compile_command = ["$cxx", *flags, *includes, own_flags, "$fileflags"]
        link_command = ["$cxx", *link_flags, own_flags]
        if any(source.endswith(".cu") for source in ext.sources):  # nvcc hands what is not for GPUs on to the compiler
            compile_command = ["$nvcc", *CUDA_FLAGS, *_cuda_targets(), *includes]
            link_command = ["$nvcc", "-shared", "-cudart static"]
        with open(build_dir / "build.ninja", "w", encoding="utf-8") as file:
            graph = Writer(file, width=120)
            graph.variable("cxx", cxx)
            graph.variable("nvcc", f'"{_find_nvcc()}" -ccbin "{cxx}"')
            depfile = "-MMD -MF $out.d -c $in -o $out"
            graph.rule("compile", " ".join([*compile_command, depfile]), depfile="$out.d", deps="gcc")
            graph.rule("link", " ".join([*link_command, "$in -o $out"]))
            objects = [f"{source}.o" for source in ext.sources]
            for source, obj in zip(ext.sources, objects, strict=True):
                file_flags = " ".join(_file_flags(source, macros))
                graph.build(_escape(obj), "compile", _escape(str(root / source)), variables={"fileflags": file_flags})
            graph.build(_escape(str(target)), "link", [_escape(obj) for obj in objects])
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(build_dir)], check=True)


def _pybind11_include() -> str:
    """pybind11's headers: the package's own, or else those that come with torch."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return pybind11.get_include()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("neither pybind11 nor torch, which brings its headers, is installed")
    return str(Path(spec.origin).parent / "include")


def _find_nvcc() -> Path | None:
    found = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    return None if found is None else Path(found).resolve()


def _cuda_targets() -> list[str]:
    last = CUDA_ARCHITECTURES[-1]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHITECTURES]
    return [*targets, f"-gencode=arch=compute_{last},code=compute_{last}"]


def _predefined_macros(cxx: str) -> set[str]:
    """What the compiler defines by itself, which tells its kind and the processor that it compiles for."""
    command = [*shlex.split(cxx), "-dM", "-E", "-x", "c++", os.devnull]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[1] for line in listing.splitlines()}


def _file_flags(source: str, macros: set[str]) -> list[str]:
    """The flags of one file beside those of all. On other processors the files named for x86-64 hold nothing."""
    flags = []
    if "__x86_64__" in macros:
        for suffix, added in FLAGS_BY_SUFFIX.items():
            flags += added if source.endswith(suffix) else []
    if Path(source).match("csrc/layer_skip/*_kernels_*.cpp"):
        flags.append("-ffp-contract=fast")  # matrix products: twice the speed, and no bits are promised there
    return flags


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _find(pattern: str) -> list[str]:
    return sorted(str(path) for path in Path("csrc").rglob(pattern))


def _extensions() -> list[Extension]:
    headers = [*_find("*.h"), *_find("*.inc"), *_find("*.cuh")]
    cuda_sources = [*_find("*.cu"), "csrc/cuda/binding_cuda.cpp"]
    cpu_sources = [source for source in _find("*.cpp") if source not in cuda_sources]
    extensions = [Extension("viasd_kernels._native", cpu_sources, depends=headers)]
    if _find_nvcc() is None:
        print("note: nvcc was not found, so the CUDA C++ kernels (viasd_kernels._cuda) are left out")
    else:
        extensions.append(Extension("viasd_kernels._cuda", cuda_sources, depends=headers))
    return extensions


setup(
    packages=find_packages("python") + find_packages(include=["viasd_kernels", "viasd_kernels.*"]),
    package_dir={"": "python", "viasd_kernels": "viasd_kernels"},
    package_data={
        "viasd": ["py.typed", "integrations/hub/custom_generate/*"],
        "viasd_kernels": ["py.typed", "*/README.md", "*/configurations.json"],
    },
    ext_modules=_extensions(),
    cmdclass={"build_ext": NinjaBuild},
)
