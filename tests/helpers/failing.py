"""A call that fails at its nth time, and what a model's hooks are before and after."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn


def fail_at(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, nth: int, error: BaseException) -> None:
    """Have the `nth` call of `place.name` raise."""
    real, calls = getattr(place, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, call)


def hooks_of(model: nn.Module) -> list[Any]:
    of_modules = [
        list(found.values())
        for module in model.modules()
        for found in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._state_dict_pre_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        )
    ]
    of_params = [list((param._post_accumulate_grad_hooks or {}).values()) for param in model.parameters()]
    return [hook for found in of_modules + of_params for hook in found]
