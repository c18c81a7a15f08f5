"""The table of optimizers: `python -m tests.optimizers [--install] [--again] [MODULE ...]`.

Classes that results.json has with the same version are left out; `--again` tries them too. A module that is not
installed keeps its rows. `--install` puts the packages of constraints.txt into a folder of the environment first.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.optimizers import checks, page
from tests.optimizers.classes import PACKAGES, entries
from tests.unit.optim.unitwise.test_grades import TRAPS, verdict

FOLDER = Path(sys.prefix) / "optimizers"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
OTHERS = ("einops", "opt_einsum")
"""Packages that those need, beside torch."""


def install() -> None:
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(FOLDER)]
    subprocess.run([*command, *pins, *OTHERS], check=True)


def main(arguments: list[str]) -> None:
    again, modules = "--again" in arguments, [each for each in arguments if not each.startswith("-")] or list(PACKAGES)
    if "--install" in arguments:
        install()
    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    torch.set_num_threads(1)
    results = page.load() if page.RESULTS.exists() else {"rows": []}
    rows = {row["name"]: row for row in results["rows"]}
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            print(f"{module} is not installed: --install")
            continue
        for entry in entries(module):
            if not again and rows.get(entry.name, {}).get("version") == entry.version:
                continue
            with tempfile.TemporaryDirectory() as folder:
                rows[entry.name] = checks.look(entry, Path(folder))
            print(json.dumps(rows[entry.name]), flush=True)
            write(rows)
    write(rows)


def write(rows: dict[str, checks.Row]) -> None:
    order = list(PACKAGES)
    kept = sorted(rows.values(), key=lambda row: (order.index(row["module"]), row["name"].lower()))
    results = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "rows": kept,
        "traps": {name: verdict(make).describe() for name, (make, _, _) in TRAPS.items()},
    }
    page.RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    page.PAGE.write_text(page.text(results))


if __name__ == "__main__":
    main(sys.argv[1:])
