"""Builds the native extension with ninja; everything else about the package is in pyproject.toml."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
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


class NinjaBuild(build_ext):
    """One ninja graph per extension: parallel, and incremental in an editable install."""

    def build_extension(self, ext: Extension) -> None:
        import ninja
        from ninja.ninja_syntax import Writer

        root = Path(__file__).parent.resolve()
        build_dir = root / "build" / f"{sys.implementation.cache_tag}-{ext.name}"  # pip's own build_temp does not last
        build_dir.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        includes = [root / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
        link_flags = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        with open(build_dir / "build.ninja", "w", encoding="utf-8") as file:
            graph = Writer(file, width=120)
            graph.variable("cxx", os.environ.get("CXX", "c++"))
            graph.variable("cxxflags", " ".join(FLAGS + [f'-I"{path}"' for path in includes]))
            graph.rule("compile", "$cxx $cxxflags -MMD -MF $out.d -c $in -o $out", depfile="$out.d", deps="gcc")
            graph.rule("link", f"$cxx {' '.join(link_flags)} $in -o $out")
            objects = [str(Path(source).with_suffix(".o")) for source in ext.sources]
            for source, obj in zip(ext.sources, objects, strict=True):
                graph.build(_escape(obj), "compile", _escape(str(root / source)))
            graph.build(_escape(str(target)), "link", [_escape(obj) for obj in objects])
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(build_dir)], check=True)


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _find(pattern: str) -> list[str]:
    return sorted(str(path) for path in Path("csrc").rglob(pattern))


setup(
    packages=find_packages("python") + find_packages(include=["viasd_kernels", "viasd_kernels.*"]),
    package_dir={"": "python", "viasd_kernels": "viasd_kernels"},
    package_data={"viasd": ["py.typed"], "viasd_kernels": ["py.typed", "*/README.md"]},
    ext_modules=[Extension("viasd_kernels._native", _find("*.cpp"), depends=_find("*.h"))],
    cmdclass={"build_ext": NinjaBuild},
)
