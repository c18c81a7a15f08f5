"""The site of the docs builds: each of its references leads somewhere, which only Sphinx can tell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytest.importorskip("sphinx")  # `make test` installs it


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does, without the pages as HTML."""
    flags = ["-q", "-W", "-n", "--keep-going", "-b", "dummy", "-c", DOCS, "-d", out / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *flags, source, out]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_references_of_the_site_lead_somewhere(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "broken",
    ["[there](#nowhere)", "[there](nowhere.md)", "```{eval-rst}\n.. autofunction:: zero_offload.nowhere\n```"],
)
def test_a_reference_that_leads_nowhere_fails(tmp_path: Path, broken: str) -> None:
    source = tmp_path / "docs"
    shutil.copytree(DOCS / "drawings", source / "drawings")
    shutil.copy(DOCS / "glossary.md", source)
    (source / "index.md").write_text(f"# Start\n\n{broken}\n\n```{{toctree}}\nglossary\n```\n")
    done = build(source, tmp_path / "out")
    assert (done.returncode, done.stderr.count("WARNING")) == (1, 1) and "nowhere" in done.stderr
