"""Generators come back where they were, through JSON."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from zero_offload.checkpoint.extras import capture_rng, restore_rng


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), *torch.rand(3).tolist(), np.random.rand()]


def test_all_generators_go_on_from_the_same_place() -> None:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    _draw()
    saved = json.loads(json.dumps(capture_rng()))
    first, second = _draw(), _draw()
    assert first != second
    restore_rng(saved)
    assert [_draw(), _draw()] == [first, second]


def test_a_gaussian_kept_for_the_next_call_is_kept() -> None:
    random.seed(1), np.random.seed(1)
    random.gauss(0, 1), np.random.randn()
    saved = capture_rng()
    expected = [random.gauss(0, 1), np.random.randn()]
    random.seed(2), np.random.seed(2)
    restore_rng(saved)
    assert [random.gauss(0, 1), np.random.randn()] == expected


def test_capturing_draws_nothing() -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = _draw()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    capture_rng()
    assert _draw() == expected
