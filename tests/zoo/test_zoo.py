"""A tiny model of each family of transformers, diffusers and timm: what holds of it when it is offloaded.

`known.toml` has what does not hold. Other outcomes fail, those that hold again too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.pairwise import in_turn
from tests.zoo.checks import CHECKS, HOLDS, LEFT_OUT, NotTrainedError, Subject, find, outcome
from tests.zoo.families import families
from tests.zoo.known import PATH, known, reasons
from tests.zoo.libraries import missing

pytestmark = pytest.mark.tools
Record = Callable[[str, object], None]
TRAINED = [name for name in families() if known(name) is None]
UNTRAINED = [name for name in families() if known(name) is not None]


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`",
    between="a tiny model of each family ([ZOO.md](ZOO.md))",
    save="`zo.export_pretrained`",
    outcome="right",
)
@in_turn(family=TRAINED, check=[*CHECKS])
def test_check(family: str, check: str, tmp_path: Path, record_property: Record) -> None:
    try:
        subject = found_one(family)
    except NotTrainedError as error:
        record_property("zoo", (family, families()[family].kind, "", False, "", str(error)))
        raise
    found, reason = outcome(check, subject, tmp_path), known(family, check)
    record_property("zoo", (family, subject.family.kind, subject.fed, subject.own_loss, check, found))
    if reason is None:
        assert found in (HOLDS, LEFT_OUT)
    else:
        assert reason.says in found, f"{PATH.name} says otherwise"


def found_one(name: str) -> Subject:
    if library := missing(families()[name]):
        pytest.skip(f"needs {library}, which `make zoo` brings")
    return find(families()[name])


@pytest.mark.full
@pytest.mark.parametrize("family", UNTRAINED)
def test_a_family_that_is_left_out_does_not_train(family: str, record_property: Record) -> None:
    reason = known(family)
    assert reason is not None
    with pytest.raises(NotTrainedError) as caught:
        found_one(family)
    record_property("zoo", (family, families()[family].kind, "", False, "", str(caught.value)))
    assert reason.says in str(caught.value)


def test_reasons_are_of_families_that_exist() -> None:
    """Families that are gone, checks that are not named so, and words that any outcome would have, are errors."""
    assert all(each.says for each in reasons())
    assert {each.check for each in reasons()} <= {"", *CHECKS}
    assert {name for each in reasons() for name in each.families} <= {*families()}
