"""The zoo off the network; `--page` writes what a run has found into docs/ZOO.md."""

from __future__ import annotations

import os
from typing import Any

# Before transformers is imported.
os.environ.update(HF_HUB_OFFLINE="1", DIFFUSERS_VERBOSITY="error", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")

import pytest  # noqa: E402
import torch  # noqa: E402

try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    # timm imports it for transforms, which no model uses. Beside another build of torch it lacks its operators: the
    # import then ends at the first of two that it looks up by name.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_found: list[Any] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", action="store_true", help="write what is found into docs/ZOO.md")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that starts the workers, if there are some."""
    if report.when == "call":
        _found.extend(value for name, value in report.user_properties if name == "zoo")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--page") and not hasattr(session.config, "workerinput"):
        from tests.zoo import page

        page.write(_found)
