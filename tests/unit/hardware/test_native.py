from __future__ import annotations

import errno
import functools
import os
from pathlib import Path

import pytest

from tests.helpers.fresh import run_script
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.hardware import abi, native


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a fresh process, for one test."""
    for name in ("lib", "missing"):
        monkeypatch.setattr(native, name, functools.cache(getattr(native, name).__wrapped__))
    return monkeypatch


def test_import_loads_nothing_and_openmp_is_loaded_once() -> None:
    result = run_script(
        "import os\n"
        "from zero_offload.hardware import native\n"
        "maps = lambda: {line.split()[-1] for line in open('/proc/self/maps') if line.count('/')}\n"
        "assert not [path for path in maps() if path.endswith('_native.so')]\n"
        "native.lib()\n"
        "assert [path for path in maps() if path.endswith('_native.so')]\n"
        "runtimes = [path for path in maps() if 'gomp' in os.path.basename(path)]\n"
        "assert len(runtimes) == 1, runtimes\n"
    )
    assert result.returncode == 0, result.stderr


def test_a_missing_library_says_how_to_build_it(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unloaded.setattr(native, "LIBRARY_PATH", tmp_path / "_native.so")
    assert not native.available()
    with pytest.raises(native.LibraryMissing, match=r"pip install -e \.") as caught:
        native.lib()
    assert native.missing() == str(caught.value)


def test_a_library_that_cannot_be_opened_now_is_not_missing(unloaded: pytest.MonkeyPatch) -> None:
    """Another would be used for the rest of the process."""

    def refuse(path: str) -> None:
        raise OSError(os.strerror(errno.EMFILE))

    unloaded.setattr(native.C, "CDLL", refuse)
    with pytest.raises(CapacityError, match="ulimit -n"):
        native.available()
    unloaded.undo()
    assert native.available()


def test_another_version_is_refused(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setattr(abi, "VERSION", abi.VERSION + 1)
    with pytest.raises(native.LibraryMissing, match="another build: version"):
        native.lib()
    assert not native.available()


def test_another_struct_size_is_refused(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setitem(abi.STRUCTS, "zo_io_block", abi.IoResultStruct)
    with pytest.raises(CapacityError, match="'zo_io_block': 24"):
        native.lib()


def test_a_wrong_size_field_is_refused() -> None:
    struct = abi.UpdateArgsStruct(size=8)
    assert native.lib().zo_update(struct) == -1
    assert b"8 bytes" in native.lib().zo_last_error()


@pytest.mark.parametrize("isa", native.supported_isas())
def test_the_environment_chooses_the_isa(isa: abi.Isa) -> None:
    environment = os.environ | {"ZERO_OFFLOAD_ISA": isa.name.lower()}
    result = run_script("from zero_offload.hardware import native; print(native.isa().name)", environment=environment)
    assert result.stdout.strip() == isa.name, result.stderr


def test_an_unknown_isa_in_the_environment_is_refused() -> None:
    environment = os.environ | {"ZERO_OFFLOAD_ISA": "altivec"}
    result = run_script("from zero_offload.hardware import native; native.lib()", environment=environment)
    assert result.returncode != 0
    assert "ConfigError: ZERO_OFFLOAD_ISA=altivec cannot run here" in result.stderr


def test_the_widest_isa_is_the_default() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "ZERO_OFFLOAD_ISA"}
    code = "from zero_offload.hardware import native; print(native.isa() == native.supported_isas()[-1])"
    result = run_script(code, environment=environment)
    assert result.stdout.strip() == "True", result.stderr


def test_an_isa_that_cannot_run_is_refused() -> None:
    before = native.isa()
    with pytest.raises(ConfigError, match="cannot run here"):
        native.set_isa(next(isa for isa in abi.Isa if isa not in native.supported_isas()))
    assert native.isa() == before
