"""serve.py PROGRAM FOLDER: starts of a program, one for each line of FOLDER/jobsRANK, forked where torch is imported.

A line is a list: the file for the output, variables of the environment, and arguments. Behind the program's end
OUTPUT.code has its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  # as the first optimizer does

import tests.helpers.ranks
import tests.helpers.two_models  # noqa: F401

program, folder = sys.argv[1:]
jobs = Path(folder, f"jobs{os.environ['RANK']}")
os.mkfifo(jobs)
while True:
    for line in jobs.open():
        out, environment, arguments = json.loads(line)
        if (pid := os.fork()) == 0:
            fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.environ.update(environment)
            sys.argv = [program, *arguments]
            runpy.run_path(program, run_name="__main__")
            sys.exit()
        _, status = os.waitpid(pid, 0)
        part = Path(f"{out}.part")
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.rename(f"{out}.code")
