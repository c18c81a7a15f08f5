#!/bin/sh
# datasets 5.2.0, Dataset.from_dict, from_list and from_generator with `features`: a fraction in a column of integers
# is cut off without a message.
#
# These encode each value by `Value.encode_example` (datasets/features/features.py), which is `int(value)` for all
# integer types. `cast`, `cast_column`, `map(features=)`, `from_pandas` and files of JSON go through Arrow, which
# refuses the same value: "Float value 1.5 was truncated". One would expect the same error from all of them, as for an
# integer that is too large, which all refuse. The documentation of `features` names no rounding.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 numpy==2.4.6 pandas==3.1.1
cd "$work"
HF_HOME="$work" "$venv/bin/python" -W ignore - <<'PY'
import sys, datasets, pandas
from datasets import Dataset, Features, Value

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
integers, small = Features({"label": Value("int32")}), Features({"label": Value("int8")})
column = {"label": [1.5, -0.7]}
rows = [{"label": value} for value in column["label"]]


def generate():
    yield from rows


def outcome(make):
    try:
        return make()["label"][:]
    except Exception as error:
        return type(error).__name__


found = {
    "from_dict": outcome(lambda: Dataset.from_dict(column, features=integers)),
    "from_list": outcome(lambda: Dataset.from_list(rows, features=integers)),
    "from_generator": outcome(lambda: Dataset.from_generator(generate, features=integers)),
    "from_pandas": outcome(lambda: Dataset.from_pandas(pandas.DataFrame(column), features=integers)),
    "cast": outcome(lambda: Dataset.from_dict(column).cast(integers)),
    "map": outcome(lambda: Dataset.from_dict(column).map(lambda row: row, features=integers)),
    "from_dict, 300 as int8": outcome(lambda: Dataset.from_dict({"label": [300]}, features=small)),
}
for name, value in found.items():
    print(f"{name}: {value}")
cut = ("from_dict", "from_list", "from_generator")
holds = all(value == ([1, 0] if name in cut else "ArrowInvalid") for name, value in found.items())
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
