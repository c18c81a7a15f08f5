"""The program keeps gradients of a GPU, as in tests/parity/test_kept_grads.py. No race."""

from __future__ import annotations

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.kept_grads import FourLayers, Program
from tests.helpers.pairwise import in_turn


@in_turn(
    settings=[{"grads": "device"}, {"grads": "device", "optimizer": "device"}, {"grads": "cpu"}],
    policy=[Policy.LATE, Policy.SIDE_LATE, Policy.RANDOM],
    seed=[1000, 1100, 1200],
)
def test_programs_find_the_gradients_of_plain_torch(settings: dict[str, str], policy: Policy, seed: int) -> None:
    for each in range(seed, seed + 8):
        device.policy(policy, each)
        model = zo.offload(FourLayers(), zo.OffloadConfig(precision="fp32", params="cpu", **settings))
        Program(model, each, device=TYPE, in_memory=settings["grads"] == "device").run()
        zo.close(model)
