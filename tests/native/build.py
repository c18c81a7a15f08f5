"""Builds the driver with the whole of csrc/: build.py SANITIZERS OUTPUT; no sanitizers: -.

Uses the compiler ($CXX) and flags of setup.py, so that what is checked is what is shipped. For another machine the
result needs none of its libraries.
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
    compiler = build["find_compiler"]()
    x86 = build["is_for_x86"](compiler)
    checks = [] if sanitizers == "-" else [f"-fsanitize={sanitizers}"]
    flags = [*build["COMPILE_FLAGS"], *checks, *(["-fno-sanitize-recover=all", "-g", "-O1"] if checks else [])]
    objects_dir = output.with_name(output.name + ".objects")
    objects_dir.mkdir(parents=True, exist_ok=True)
    sources = [*sorted((ROOT / "csrc").rglob("*.cpp")), *sorted((ROOT / "tests/native").glob("*.cpp"))]

    def compile_one(source: Path) -> str:
        target = objects_dir / ("_".join(source.relative_to(ROOT).parts) + ".o")
        extra = build["isa_flags"](source, x86=x86)
        subprocess.run([compiler, *flags, *extra, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    link = [*build["LIBRARIES"], "-pthread", *(checks or ["-static"]), "-o", output]
    subprocess.run([compiler, *objects, *link], check=True)


if __name__ == "__main__":
    main()
