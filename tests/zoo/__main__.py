"""How families are built and fed: `python -m tests.zoo NAME ...`."""

from __future__ import annotations

import sys
import traceback

from tests.zoo import conftest  # noqa: F401  off the network
from tests.zoo.checks import NotTrainedError, find
from tests.zoo.families import families

for name in sys.argv[1:]:
    try:
        subject = find(families()[name])
    except NotTrainedError as error:
        print(f"{name}: {error}", *dict.fromkeys(error.errors), sep="\n  ")
        if error.__cause__ is not None:
            print(*traceback.format_tb(error.__cause__.__traceback__)[-3:], sep="")
    else:
        print(f"{name}: {subject.family.kind} of {subject.params} parameters trains on {subject.fed}")
