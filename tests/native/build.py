"""Builds driver.cpp with the whole of csrc/ under sanitizers: build.py SANITIZERS OUTPUT.

Uses the compiler and flags of setup.py, so that what is checked is what is shipped.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    sanitizers, output = sys.argv[1], Path(sys.argv[2])
    build = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
    flags = [*build["COMPILE_FLAGS"], f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1"]
    objects_dir = output.with_name(output.name + ".objects")
    objects_dir.mkdir(parents=True, exist_ok=True)
    sources = [*sorted((ROOT / "csrc").rglob("*.cpp")), ROOT / "tests/native/driver.cpp"]

    def compile_one(source: Path) -> str:
        target = objects_dir / ("_".join(source.relative_to(ROOT).parts) + ".o")
        extra = build["isa_flags"](source)
        subprocess.run([build["find_compiler"](), *flags, *extra, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    link = ["-fopenmp", "-pthread", f"-fsanitize={sanitizers}", "-o", output]
    subprocess.run([build["find_compiler"](), *objects, *link], check=True)


if __name__ == "__main__":
    main()
