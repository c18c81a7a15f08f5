"""Programs and commands of README, docs and examples, as they stand, on a machine with a GPU: those that use tools."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_gpu.device import TYPE
from tests.helpers import programs
from tests.helpers.pairwise import full
from zero_offload.cli.main import main

pytestmark = [pytest.mark.tools, pytest.mark.usefixtures("late")]

tools: Any = pytest.importorskip("tests.helpers.tools")
LONG = {"diffusion_full.py", "diffusion_lora.py", "trl_sft.py", "README.md"}
LONG |= {f"docs/{name}.md" for name in ("choose/hardware", "choose/plan", "choose/recipes")}
LONG |= {f"docs/use/{name}.md" for name in ("fine-tune", "lora-and-quantization", "moe")}
"""Examples, and pages whose commands train or plan several times."""
EXAMPLES = [name for name in programs.EXAMPLES if name not in (*programs.PLAIN_EXAMPLES, *programs.EXAMPLES_NOT_RUN)]


@pytest.fixture(autouse=True)
def _computes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate and Lightning find the device, as they find CUDA's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", TYPE)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)  # torch has none for this device
    with tools.launched(0, 1):
        yield


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    class Fake(Accelerator):  # type: ignore[misc]
        parse_devices = staticmethod(range)
        auto_device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: TYPE)

        @staticmethod
        def get_parallel_devices(devices: range) -> list[torch.device]:
            return [torch.device(TYPE, index) for index in devices]

        def setup_device(self, device: torch.device) -> None:
            pass

        def teardown(self) -> None:
            pass

        def get_device_stats(self, device: torch.device) -> dict[str, Any]:
            return {}

    monkeypatch.setitem(AcceleratorRegistry, TYPE, {"accelerator": Fake, "init_params": {}})
    monkeypatch.setattr(_AcceleratorConnector, "_choose_auto_accelerator", staticmethod(lambda: TYPE))


@pytest.mark.usefixtures("lightning")
@pytest.mark.parametrize(("page", "chapter"), sorted(programs.OF_TOOLS))
def test_a_chapter(page: str, chapter: str) -> None:
    programs.run_page(page, chapter)


@pytest.mark.usefixtures("lightning")
@pytest.mark.parametrize("page", programs.pages_of_tools())
def test_a_page(page: str) -> None:
    programs.run_page(page)


@pytest.mark.usefixtures("lightning")
@pytest.mark.parametrize("name", [full(name) if name in LONG else name for name in EXAMPLES])
def test_an_example(name: str) -> None:
    programs.run_example(name)


def commands(page: str) -> list[str]:
    return [command for command in programs.commands(page) if programs.reason(command) is None]


@pytest.mark.parametrize("page", [full(page) if page in LONG else page for page in programs.PAGES if commands(page)])
def test_commands(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        monkeypatch.setattr("sys.stdin", io.StringIO("What does abs do?\n"))
        code = main(programs.words(command))
        assert code == 0 or (code == 3 and command.startswith("zero-offload plan")), (command, capsys.readouterr())
