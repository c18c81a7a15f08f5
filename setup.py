"""Builds csrc/ into zero_offload/_native.so, a plain shared library that ctypes loads.

Needs a C++17 compiler and nothing else: no torch, no Python headers, so one wheel serves every Python. The
AVX files alone get AVX flags; which of them runs is decided at run time. Without a compiler that works the
package installs and warns; ZERO_OFFLOAD_REQUIRE_NATIVE=1 makes that an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# A contracted multiply-add would change bits between instruction sets; errno from sqrt would cost a branch.
COMPILE_FLAGS = [
    *["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"],
    *["-ffp-contract=off", "-fno-math-errno"],
    f"-I{CSRC}",
    f"-I{CSRC / 'include'}",
]
LINK_FLAGS = ["-shared", "-pthread", "-static-libgcc", "-static-libstdc++", "-Wl,--no-undefined"]
LIBRARIES = ["-lgomp"]  # after the objects: linkers take from a library what is still missing
# GCC 12 warns about its own AVX-512 headers, which start from an undefined register on purpose.
ISA_FLAGS = {
    "kernel_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "kernel_avx512.cpp": [
        *["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
        *["-Wno-uninitialized", "-Wno-maybe-uninitialized"],
    ],
}


def find_compiler() -> str | None:
    """The C++ compiler to use: $CXX, else g++, else clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


def is_for_x86(compiler: str) -> bool:
    """True if the compiler makes code for x86, as a cross compiler may not."""
    machine = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True).stdout
    return machine.startswith(("x86_64", "amd64"))


def isa_flags(source: Path, *, x86: bool) -> list[str]:
    return ISA_FLAGS.get(source.name, []) if x86 else []


def newest(paths: list[Path]) -> float:
    return max(path.stat().st_mtime for path in paths)


def headers() -> list[Path]:
    return [*CSRC.rglob("*.h"), *CSRC.rglob("*.inl")]


def compile_native(compiler: str, build_dir: Path, target: Path) -> None:
    """Compile what is older than its sources, two files at a time, and link."""
    sources = sorted(CSRC.rglob("*.cpp"))
    # Few and small: any changed header, or this file with its flags, rebuilds all.
    shared = newest([*headers(), Path(__file__)])
    build_dir.mkdir(parents=True, exist_ok=True)
    x86 = is_for_x86(compiler)
    objects = {source: build_dir / ("_".join(source.relative_to(CSRC).parts) + ".o") for source in sources}

    def compile_one(source: Path) -> None:
        output = objects[source]
        if output.exists() and output.stat().st_mtime > max(shared, source.stat().st_mtime):
            return
        run([compiler, *COMPILE_FLAGS, *isa_flags(source, x86=x86), "-c", str(source), "-o", str(output)])

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(compile_one, sources))
    if target.exists() and target.stat().st_mtime > newest(list(objects.values())):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Linked beside and renamed: a process that has the old library mapped keeps it whole.
    linked = target.with_name(f".{target.name}.{os.getpid()}")
    run([compiler, *LINK_FLAGS, *map(str, objects.values()), *LIBRARIES, "-o", str(linked)])
    os.replace(linked, target)


def run(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise CompileError("the command above failed; its output says why")


class BuildNative(build_ext):
    """`build_ext` whose only extension is a shared library without Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            compiler = find_compiler()
            if compiler is None:
                raise CompileError(
                    "no C++ compiler found (tried $CXX, g++, clang++); install one, for example: apt install g++"
                )
            compile_native(compiler, Path(self.build_temp) / "native", target)
        except CompileError as error:
            if os.environ.get("ZERO_OFFLOAD_REQUIRE_NATIVE") == "1":
                raise
            ext.optional = True
            target.unlink(missing_ok=True)  # of an earlier build: it would not fit these sources
            print(
                f"warning: {error}; zero_offload is installed without its native library, and its kernels run slower, "
                "by numba",
                file=sys.stderr,
            )


class NativeWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: bound to the machine, not to an interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if __name__ != "flags":  # tests/native/build.py reads the flags above
    setup(
        # Sources and headers are listed so that a source distribution holds them.
        ext_modules=[
            Extension(
                "zero_offload._native",
                sources=sorted(str(path.relative_to(ROOT)) for path in CSRC.rglob("*.cpp")),
                depends=sorted(str(path.relative_to(ROOT)) for path in headers()),
            )
        ],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
        distclass=NativeDistribution,
    )
