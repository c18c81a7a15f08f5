"""The one map from torch dtypes to the element kinds of the native kernels."""

from __future__ import annotations

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.abi import Kind


class _Kinds(dict[torch.dtype, Kind]):
    def __missing__(self, dtype: torch.dtype) -> Kind:
        raise ConfigError(f"the kernels take torch.float32, torch.bfloat16 and torch.float16, not {dtype}")


_KINDS = _Kinds({torch.float32: Kind.FP32, torch.bfloat16: Kind.BF16, torch.float16: Kind.FP16})
FLOATS = tuple(_KINDS)
kind_of = _KINDS.__getitem__
"""The kernel kind of a dtype. Raises ConfigError for any but float32, bfloat16 and float16. Twice for each gradient, so
it is a look-up and no function."""


def address_of(tensor: torch.Tensor, *dtypes: torch.dtype) -> int:
    """The address of a contiguous CPU tensor of one of these dtypes. Raises ConfigError otherwise."""
    if tensor.dtype not in dtypes or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"a CPU kernel needs a contiguous CPU tensor of {' or '.join(map(str, dtypes))}, got "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()
