"""Storages that torch may not read: an error where their memory is not there, or holds old values.

Some functions ask no class (`torch.tensor(param)`, `x.data = param`, a capsule by torch.utils.dlpack). No stand-in can
answer them, and memory without pages ends the process. So the storages of parameters are closed while values are not
here, and torch itself raises a RuntimeError. Owns the flags of these storages; never their memory.

[Note: a flag of torch's storages]
Each storage of torch has a flag by which access raises. Python has no function for it; builds for CUDA have one, and
none that takes it back. So the flag is written where torch keeps it. Two flags that Python can set lie around it, and
tell the place. A trial on a storage of its own then shows that access raises, and does not any more. If something is
not as expected, nothing is ever closed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_READ = 80
"""Bytes of a storage object in which its flags are; fewer than any version of it has."""


class StorageAccess:
    """Whether torch may reach the memory of some storages; at first it may."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._storages = tuple(storages)  # the flags lie in them
        self._is_checked: list[ctypes.c_bool] = []
        self._raises: list[ctypes.c_bool] = []
        if (places := flags_at()) is not None:
            addresses = [storage._cdata for storage in self._storages]
            self._is_checked, self._raises = (
                [ctypes.c_bool.from_address(address + place) for address in addresses] for place in places
            )
        self.is_open = True

    def open(self) -> None:
        """Access is access again."""
        for flag in self._raises:
            flag.value = False
        self.is_open = True

    def close(self) -> None:
        """Access raises RuntimeError. To be called again where torch has exchanged a storage's memory."""
        for flag in self._raises:
            flag.value = True
        for flag in self._is_checked:  # without it torch asks the other flags at reads alone
            flag.value = True
        self.is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Tensors can be made on the storages, whose memory nothing touches."""
        was_open = self.is_open
        self.open()
        try:
            yield
        finally:
            if not was_open:
                self.close()


@functools.cache
def flags_at() -> tuple[int, int] | None:
    """Where in a storage object torch notes that it has something to check, and that access raises; see
    [Note: a flag of torch's storages]. None where that is not to be found."""
    setters: list[Any] = [
        getattr(torch._C, f"_set_{name}_on_mutable_data_ptr", None) for name in ("throw", "warn_deprecated")
    ]
    if None in setters:
        return None
    throws, warns = map(_set_by, setters)
    if len(throws) != 2 or warns != [throws[0], throws[1] + 2] or throws[1] != throws[0] + 1:
        return None
    found = throws[0], throws[1] + 1
    return found if _works(*found) else None


def _set_by(setter: Callable[[torch.Tensor], None]) -> list[int]:
    """The bytes of a storage object that a function turns from 0 to 1."""
    tensor = torch.zeros(1, dtype=torch.float32, device="cpu")
    storage = tensor.untyped_storage()
    before = ctypes.string_at(storage._cdata, _READ)
    setter(tensor)
    after = ctypes.string_at(storage._cdata, _READ)
    changed = [place for place in range(_READ) if before[place] != after[place]]
    return changed if all((before[place], after[place]) == (0, 1) for place in changed) else []


def _works(check: int, raises: int) -> bool:
    """True if these flags do what is expected of them."""
    tensor = torch.ones(1, dtype=torch.float32, device="cpu")
    storage = tensor.untyped_storage()
    is_checked, is_closed = (ctypes.c_bool.from_address(storage._cdata + place) for place in (check, raises))
    if is_checked.value or is_closed.value:
        return False
    is_checked.value = is_closed.value = True
    try:
        tensor.clone()
    except RuntimeError:
        is_closed.value = False
        return tensor.clone().item() == 1 and tensor.add_(1).item() == 2
    return False
