"""Builds the device's library with g++ against the headers of this Python's torch: `python -m tests.fake_gpu.build`.

The result is in `build/fake_gpu`, by a digest of sources, flags and torch's version. So are the object files, so that a
change compiles what it touches. Two compilers run at a time. A lock lets one process build, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
_ROOT = Path(__file__).parents[2]
_BUILD = _ROOT / "build" / "fake_gpu"
_FLAGS = ("-std=c++20", "-O1", "-fPIC")
_JOBS = 2


class BuildError(RuntimeError):
    """The compiler refused; the message is its output."""


def compiler() -> str | None:
    """CXX, or g++; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def library() -> Path:
    """Where the library of these sources is, or will be."""
    return _BUILD / f"fake_gpu-{_digest(_files('*.cpp'))}.so"


def build() -> Path:
    """The library, made if it is missing. Raises BuildError."""
    if not library().exists():
        with _lock():
            if not library().exists():
                _make()
    return library()


def start() -> subprocess.Popen[bytes] | None:
    """A build in a process of its own; None if there is nothing to do, or nothing to do it with.

    Its errors are not shown: who needs the library builds what is missing, and then sees them.
    """
    if library().exists() or compiler() is None:
        return None
    command = [sys.executable, "-m", "tests.fake_gpu.build"]
    return subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make() -> None:
    # Those with most headers first.
    sources = sorted(_files("*.cpp"), key=lambda source: "torch/library.h" not in source.read_text())
    with ThreadPoolExecutor(_JOBS) as pool:
        objects = list(pool.map(_compile, sources))
    libraries = _torch() / "lib"
    link = ("-shared", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10")
    _call([*map(str, objects), *link], library())
    for old in set(_BUILD.glob("*.o")) - set(objects):
        old.unlink(missing_ok=True)


def _compile(source: Path) -> Path:
    target = _BUILD / f"{source.stem}-{_digest([source])}.o"
    if not target.exists():
        include = _torch() / "include"
        paths = ("-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include"))
        _call([*_FLAGS, *paths, "-c", str(source)], target)
    return target


def _call(arguments: Sequence[str], target: Path) -> None:
    """Run the compiler; the target is there whole or not at all."""
    beside = target.with_suffix(f".{os.getpid()}")
    command = [compiler() or "g++", *arguments, "-o", str(beside)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        beside.unlink(missing_ok=True)
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    beside.rename(target)


def _digest(sources: Sequence[Path]) -> str:
    found = hashlib.sha256("\0".join([*_FLAGS, _torch_version(), compiler() or ""]).encode())
    for path in [*_files("*.h"), *sources]:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _files(pattern: str) -> list[Path]:
    return sorted(_SOURCES.glob(pattern))


@functools.cache
def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _torch_version() -> str:
    # Without importing torch, which takes seconds.
    return (_torch() / "version.py").read_text() + str(_torch())


if __name__ == "__main__":
    print(build())
