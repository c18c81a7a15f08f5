"""The compute device: the only file that says `torch.cuda`. Nothing is initialised at import."""

from __future__ import annotations

import torch


def describe_device() -> str:
    """One line for people: the GPU's name and memory, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu (no CUDA device)"
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"


def device_rng_states() -> list[torch.Tensor]:
    """The generators of all CUDA devices this process uses; none without CUDA."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if used else []


def set_device_rng_states(states: list[torch.Tensor]) -> None:
    """Restore what `device_rng_states` gave; devices that are not here are skipped."""
    for index, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
