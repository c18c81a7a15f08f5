#!/bin/sh
# datasets 5.2.0, load_dataset("parquet", data_files=[path]): the path of a file that exists is taken for a pattern, and
# the rows of other files come instead or beside.
#
# `resolve_pattern` (datasets/data_files.py) gives each entry to fsspec's `glob` and does not look first whether a file
# has exactly that name. "part[1].parquet" then matches "part1.parquet" and not itself; "s*.parquet" matches
# "s1.parquet" too. A folder "run[1]" gives the files of "run1". `Dataset.from_parquet(path)` does the same. Nothing is
# logged. One would expect the named file, for the documentation of `data_files` says "Path(s) to source data file(s)",
# and a missing match raises. `glob.escape(path)` names the file. Upstream: issue 7468, open, for a folder that is not
# found.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    datasets==5.2.0 pyarrow==26.0.1 fsspec==2026.9.0 numpy==2.4.6
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import glob, os, sys, datasets, pyarrow, pyarrow.parquet
from datasets import Dataset, load_dataset

print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
datasets.disable_progress_bars()


def write(path):
    pyarrow.parquet.write_table(pyarrow.table({"from": [path]}), path)


for name in ("part[1].parquet", "part1.parquet", "s*.parquet", "s1.parquet"):
    write(name)
for folder in ("run[1]", "run1"):
    os.mkdir(folder)
    write(f"{folder}/data.parquet")


def read(path):
    return sorted(load_dataset("parquet", data_files=[path], split="train", cache_dir="cache")["from"])


holds = True
for name, wrong in (
    ("part[1].parquet", ["part1.parquet"]),
    ("s*.parquet", ["s*.parquet", "s1.parquet"]),
    ("run[1]/data.parquet", ["run1/data.parquet"]),
):
    path = os.path.abspath(name)
    found, escaped = read(path), read(glob.escape(path))
    print(f"{name} (a file: {os.path.isfile(path)}): the rows are from {found}; with glob.escape from {escaped}")
    holds &= os.path.isfile(path) and found == wrong and escaped == [name]
by_method = sorted(Dataset.from_parquet(os.path.abspath("part[1].parquet"), cache_dir="cache")["from"])
print("Dataset.from_parquet of part[1].parquet:", by_method)
holds &= by_method == ["part1.parquet"]
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
