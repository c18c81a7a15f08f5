"""Help and errors of usage come before torch is imported, which takes seconds; public names at their first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zero_offload as zo
from zero_offload.cli.main import build_parser

USES = """
import contextlib, io, sys
from zero_offload.cli.main import main

def answer(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main(arguments)
        except SystemExit as end:
            return end.code, out.getvalue()
"""


def _run(code: str) -> None:
    """In a new process, which has imported nothing."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_and_errors_of_usage_come_without_torch() -> None:
    commands = [*next(each.choices for each in build_parser()._actions if isinstance(each.choices, dict))]
    assert len(commands) == 11
    _run(
        USES
        + f"""
for command in {commands}:
    assert answer(command, "--help")[0] == 0, command
    code, text = answer(command, "x", "y", "z", "--no-such-flag")
    assert code == 2 and "error: " in text, (command, text)
assert answer("--help")[0] == answer("--version")[0] == 0
assert "invalid choice" in answer("no-such-command")[1]
assert "required: COMMAND" in answer()[1]
assert "required: RUN" in answer("verify")[1]
assert "expected one argument" in answer("plan", "--tbw")[1]
assert "did you mean rtx4090" in answer("plan", "--gpu", "4090")[1]
found = {{"torch", "numpy", "transformers", "numba"}} & set(sys.modules)
assert not found, found
"""
    )


def test_a_command_runs_with_torch() -> None:
    _run(USES + "answer('clean', 'no-such-directory')\nassert 'torch' in sys.modules")


@pytest.mark.parametrize("name", ["plan", "checkpoint"])
def test_a_function_is_not_hidden_by_the_folder_of_its_name(name: str) -> None:
    _run(
        f"import types, zero_offload.{name}, zero_offload as zo\n"
        f"assert isinstance(zo.{name}, types.FunctionType)\n"
        f"import zero_offload.{name}\n"
        f"assert isinstance(zo.{name}, types.FunctionType) and zo.{name}.__module__.startswith('zero_offload.model')"
    )


def test_all_names_come_by_a_star_and_are_listed() -> None:
    _run(
        "import sys, zero_offload as zo\n"
        "assert 'torch' not in sys.modules and {*zo.__all__, 'nn'} <= {*dir(zo)}\n"
        "from zero_offload import *\n"
        "assert all(globals()[name] is getattr(zo, name) for name in zo.__all__)\n"
        "assert zo.nn.TiledLinear and zo.OffloadConfig.from_deepspeed({'zero_optimization': {'stage': 3}}).stage == 3"
    )


def test_the_first_name_brings_all() -> None:
    """A run of weeks imports nothing of another version at its end."""
    _run(
        "import sys, zero_offload as zo\n"
        "zo.AdamW\n"
        "before = {*sys.modules}\n"
        "for name in (*zo.__all__, 'nn'): getattr(zo, name)\n"
        "assert not {*sys.modules} - before, {*sys.modules} - before"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zero_offload' has no attribute 'no_such_name'"):
        zo.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_names_come_from_where_a_type_checker_finds_them() -> None:
    assert zo.__file__ is not None
    for node in ast.walk(ast.parse(Path(zo.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("zero_offload."):
            module = __import__(node.module, fromlist=["_"])
            assert all(getattr(zo, each.name) is getattr(module, each.name) for each in node.names if each.name != "_")
