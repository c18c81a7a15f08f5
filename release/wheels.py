"""Builds the source distribution and, from it alone, a wheel for x86-64 and one for arm64, and checks them.

    python release/wheels.py [--out dist] [--machine x86_64] [--oldest FOLDER]

The compiler is clang as the package ziglang brings it: it has headers and stubs of every glibc, for both machines, so
that the wheels run where the oldest glibc of their tag is. libgomp is not in a wheel. torch, which the package needs,
loads one, and a second one would be a second pool of threads. `--oldest` takes a folder with the libc6 and libgomp1
packages of an old distribution, unpacked, and calls each wheel's library there. A wheel for another machine is called
in its emulator. Needs the packages of the extra `release`, and no network.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.17"
"""The oldest one that the library is built for; torch's own wheels need 2.28."""
GOMP_STUB = "void GOMP_parallel() {} int omp_get_num_threads() { return 1; } int omp_get_thread_num() { return 0; }"
LOADER = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}


def run(*command: str | Path, **settings: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(each) for each in command], check=True, **settings)  # type: ignore[call-overload]


def compiler_of(work: Path, machine: str) -> Path:
    return work / f"{machine}-c++"


def write_compiler(work: Path, machine: str) -> None:
    """A command that compiles C++ for a machine and GLIBC, and links against a libgomp that has names alone."""
    zig = f"{sys.executable} -m ziglang"
    target = f"-target {machine}-linux-gnu.{GLIBC}"
    (work / "gomp.c").write_text(GOMP_STUB)
    stub = work / f"libgomp-{machine}" / "libgomp.so"
    stub.parent.mkdir()
    run(*zig.split(), "cc", *target.split(), "-shared", "-Wl,-soname,libgomp.so.1", "-o", stub, work / "gomp.c")
    command = compiler_of(work, machine)
    command.write_text(f'#!/bin/sh\nexec {zig} c++ {target} -g0 -Wl,-s -L{stub.parent} "$@"\n')
    command.chmod(0o755)


def source_distribution(out: Path) -> Path:
    """Of the folders and files that MANIFEST.in names."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT)
    (made,) = out.glob("*.tar.gz")
    return made


def wheel(sdist: Path, machine: str, out: Path, work: Path) -> Path:
    """A wheel of the unpacked source distribution, with the tag that auditwheel finds for it."""
    source = work / machine
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (folder,) = source.iterdir()
    write_compiler(work, machine)
    env = {**os.environ, "CXX": str(compiler_of(work, machine)), "ZERO_OFFLOAD_REQUIRE_NATIVE": "1"}
    env["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    raw, named = work / f"raw-{machine}", work / f"named-{machine}"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", raw, folder, env=env)
    (built,) = raw.glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    run("auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", named, built)
    (made,) = named.glob("*.whl")
    if tag not in made.name:
        sys.exit(f"{made.name} is not {tag}: auditwheel show {built} names the symbols that a newer glibc brought")
    return Path(shutil.move(made, out / made.name))


def call(made: Path, machine: str, libraries: Path | None, work: Path) -> None:
    """Loads the wheel's library in a program without Python, and has it add up squares on three threads."""
    with zipfile.ZipFile(made) as archive:
        library = Path(archive.extract("zero_offload/_native.so", work / f"called-{machine}"))
    program = work / f"call-{machine}"
    run(compiler_of(work, machine), "-x", "c++", ROOT / "release" / "call.cpp", "-o", program, "-ldl")
    if libraries is not None:
        loader = next(libraries.rglob(LOADER[machine]))
        folders = {each.parent for pattern in ("libc.so.6", "libgomp.so.1") for each in libraries.rglob(pattern)}
        start: list[str | Path] = [loader, "--library-path", ":".join(map(str, sorted(folders)))]
    else:
        start = []
    if machine != platform.machine():
        start = [f"qemu-{machine}-static", *(["-L", f"/usr/{machine}-linux-gnu"] if libraries is None else []), *start]
    run(*start, program, library)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="one machine alone; may be given twice")
    parser.add_argument("--oldest", type=Path, help="libc6 and libgomp1 of an old distribution for x86-64, unpacked")
    parser.add_argument("--no-call", action="store_true", help="build and check, call nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for old in [*args.out.glob("*.whl"), *args.out.glob("*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        work = Path(folder)
        sdist = source_distribution(args.out)
        for machine in args.machine or MACHINES:
            made = wheel(sdist, machine, args.out, work)
            if not args.no_call:
                call(made, machine, args.oldest if machine == "x86_64" else None, work)


if __name__ == "__main__":
    main()
