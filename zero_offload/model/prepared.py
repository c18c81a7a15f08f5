"""The one attribute that an offloaded model gets, `_is_accelerate_prepared`, and what happens when accelerate reads it.

`Accelerator.prepare` and `prepare_model` move a model to a device and wrap it in DistributedDataParallel. They leave a
model alone where this attribute is true. Then they apply no mixed precision and no compilation either. So the mark asks
the same accelerator for those two alone, with `evaluation_mode=True`. The attribute is True from then on.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from zero_offload.base.errors import ConfigError

_NAME = "_is_accelerate_prepared"


def mark_prepared(model: nn.Module, device_type: str) -> None:
    """Let accelerate leave `model`, which computes on a device of this type, as it is. Once is enough."""
    if not getattr(model, _NAME, False):
        setattr(model, _NAME, PreparedMark(device_type))


class PreparedMark:
    """True. Copies are False: the copy of a model that was made in `zo.gathered` is an ordinary model."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __bool__(self) -> bool:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "prepare_model":
            self._prepare(caller.f_locals["self"], caller.f_locals["model"])
        return True

    def _prepare(self, accelerator: Any, model: nn.Module) -> None:
        """Apply the accelerator's mixed precision and compilation to `model`, in place. Raises ConfigError for what an
        offloaded model cannot do."""
        if problems := self._problems(accelerator):
            raise ConfigError("accelerate cannot prepare an offloaded model: " + "; ".join(problems))
        after: Any = self
        setattr(model, _NAME, False)  # the call below goes on where the caller returns
        try:
            prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            if prepared is not model:
                # A compiled module around the model, which the caller would lose. It has compiled nothing yet.
                model.compile(**accelerator.state.dynamo_plugin.to_kwargs())
            after = True
        finally:
            setattr(model, _NAME, after)

    def _problems(self, accelerator: Any) -> list[str]:
        found = []
        kind, device = accelerator.distributed_type.value, accelerator.device
        if kind != "NO" and not kind.startswith("MULTI_"):
            found.append(
                f"it is configured for {kind}, and zo.offload itself divides the model over the ranks (stage=). Use "
                "the plain configuration of several processes (accelerate launch --multi_gpu, or --cpu)"
            )
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if accelerator.num_processes != num_ranks:
            found.append(
                f"its number of processes is {accelerator.num_processes}, and {num_ranks} ranks train the model: data "
                "would not be divided between them. On CPUs say Accelerator(cpu=True), "
                "TrainingArguments(use_cpu=True) or ACCELERATE_USE_CPU=true"
            )
        if accelerator.mixed_precision == "fp8":
            found.append('mixed_precision="fp8" replaces modules; use "bf16" or "no"')
        if device.type != self._device_type:
            found.append(
                f"its device is {device}, and the model computes on {self._device_type}; let both find the same one "
                "(Accelerator(cpu=True) and CUDA_VISIBLE_DEVICES='' for a CPU)"
            )
        if accelerator.state.dynamo_plugin.use_regional_compilation:
            found.append(
                "use_regional_compilation puts other modules in the place of the blocks; leave it out, and compile "
                "each block in place (block.compile())"
            )
        hook = getattr(accelerator.ddp_handler, "comm_hook", None)
        if hook is not None and hook.value != "no":
            found.append(
                f"DistributedDataParallelKwargs(comm_hook={hook.value!r}) would compress gradients, and zo.offload "
                "reduces them; set OffloadConfig(precision=zo.Precision(reduce=...)) instead"
            )
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        return bool, ()
