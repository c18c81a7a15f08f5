"""`zo.accumulate`: what crosses between host and device does not grow with the number of micro-batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.fake_gpu import device
from tests.helpers.accumulating import batches_of, loop, third
from tests.helpers.models import TinyLM, build
from tests.helpers.reference import param_groups

pytestmark = pytest.mark.usefixtures("late")

make = partial(TinyLM, num_blocks=4)


def crossing(run: Any, count: int, nvme: Path, **settings: Any) -> tuple[int, int]:
    """Uploads of values, and bytes of downloads of gradients, in the third step of so many micro-batches."""
    config = zo.OffloadConfig(precision="fp32", device_memory="8MiB", nvme=nvme, durability="scratch", **settings)
    model = zo.offload(build(make), config)
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    for step in range(3):
        batches = [batch.to(device.TYPE) for batch in batches_of(count, 5 * step)]
        with device.counting() as counts:
            run(model, batches, third)
        optimizer.step()
        optimizer.zero_grad()
    zo.close(model)
    return counts["uploads"] - counts["pageable_copies"], counts["download_bytes"]


def test_every_micro_batch_finds_the_unit_there(nvme: Path) -> None:
    """Uploads of a step do not grow with their number."""
    one, five = (crossing(zo.accumulate, count, nvme / str(count))[0] for count in (1, 5))
    assert one == five > 0


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_gradients_leave_once_per_step(grads: str, nvme: Path) -> None:
    """Added up on the device, however many micro-batches there are; a loop has each of them leave."""
    once, two, five, both = (
        crossing(run, count, nvme / f"{run.__name__}{count}", grads=grads)[1]
        for run, count in ((zo.accumulate, 1), (zo.accumulate, 2), (zo.accumulate, 5), (loop, 2))
    )
    numel = sum(param.numel() for param in make().parameters())
    assert 4 * numel <= once < 4 * numel * 1.25  # with padding
    assert once == two == five
    assert 8 * numel <= both < 8 * numel * 1.25


def test_a_round_that_breaks_off_leaves_no_sums_behind() -> None:
    results = []
    for breaks in (True, False):
        model: Any = zo.offload(build(make), zo.OffloadConfig(precision="bf16", device_memory="8MiB"))
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        if breaks:
            hook = model.blocks[0].up.register_full_backward_hook(fail_at_the_second(backwards := []))
            with pytest.raises(ZeroDivisionError):
                zo.accumulate(model, batches_of(3), third)
            hook.remove()
            assert len(backwards) == 2
        zo.accumulate(model, batches_of(2, 7), third)
        results.append(zo.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        zo.accumulate(model, batches_of(2, 9), third)
        results.append(zo.clip_grad_norm_(model, 0.5).item())
        zo.close(model)
    assert results[:2] == results[2:]


def fail_at_the_second(calls: list[int]) -> Any:
    def hook(*arguments: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ZeroDivisionError

    return hook
