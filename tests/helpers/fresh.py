"""Scripts in new processes that have imported the package and done nothing else: forks of such a process.

A start of Python imports torch for two seconds, a fork takes milliseconds. It ends as Python does.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe

# The script ends the program itself: callbacks at exit and threads see what they see in a program that was started.
SERVER = """
import os, sys
from multiprocessing.connection import Connection
import zero_offload
[getattr(zero_offload, name) for name in zero_offload.__all__]  # imported at its first use

def script(requests):
    while True:
        try:
            script, arguments, environment, outputs = requests.recv()
        except EOFError:
            os._exit(0)
        if child := os.fork():
            requests.send(child)
            requests.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        requests.close()
        for fd, path in enumerate((os.devnull, *outputs)):
            os.dup2(os.open(path, os.O_RDWR), fd)
        sys.argv[1:] = arguments
        os.environ.clear()
        os.environ.update(environment)
        return script

exec(script(Connection(int(sys.argv[1]))))
"""


@functools.cache
def _server() -> tuple[Connection, subprocess.Popen[bytes]]:
    mine, theirs = Pipe()
    path = os.pathsep.join(path for path in sys.path if path)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(theirs.fileno())],
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return mine, server


def run_script(
    script: str, *arguments: str, environment: Mapping[str, str] = os.environ, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -c script arguments`; the environment counts for what is not imported yet.

    Raises:
        subprocess.TimeoutExpired: The script has not ended; it is killed.
    """
    server, _ = _server()
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        server.send((script, arguments, dict(environment), (out.name, err.name)))
        child = server.recv()
        ended = server.poll(timeout_s)
        if not ended:
            os.kill(child, 9)
        code = server.recv()
        if not ended:
            raise subprocess.TimeoutExpired(script, timeout_s, out.read(), err.read())
        return subprocess.CompletedProcess(script, code, out.read(), err.read())
