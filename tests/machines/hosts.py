"""Several machines on one: a network of namespaces, in which each has its own address, name, processes and directory.

Needs root and iproute2, and a system that allows it; see `unsupported`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORT = 29511


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def unsupported() -> str:
    """Why this system has no such machines; or empty."""
    if os.geteuid() != 0:
        return "namespaces need root"
    name, peer = f"zt{os.getpid() % 100000}", f"zv{os.getpid() % 100000}"
    alone = ["unshare", "-m", "-u", "-p", "-f", "--mount-proc", "bash", "-c", "mount --make-rprivate / && hostname x"]
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", name, "type", "bridge")
            _ip("link", "add", peer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", peer, "master", name, "up")
            subprocess.run(["ip", "netns", "exec", name, *alone], check=True, capture_output=True, text=True)
        finally:
            _ip("netns", "del", name)
            for link in (peer, name):
                subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces are forbidden here: {getattr(error, 'stderr', error)}"
    return ""


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    address: str
    folder: Path
    """Its own directory, which programs see as `Hosts.drive`."""


class Hosts:
    """A network of machines."""

    def __init__(self, folder: Path, count: int) -> None:
        # The kernel's names of links have 15 letters at most.
        self._tag, number = f"z{os.getpid() % 100000}", os.getpid() % 200
        self.drive = folder / "drive"
        self.drive.mkdir()
        self.hosts = [Host(f"{self._tag}h{i}", f"10.88.{number}.{i + 1}", folder / f"host{i}") for i in range(count)]
        self._folder = folder

    def open(self) -> None:
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("link", "set", self._tag, "up")
        for i, host in enumerate(self.hosts):
            host.folder.mkdir()
            _ip("netns", "add", host.name)
            _ip("link", "add", f"{self._tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", f"{self._tag}v{i}", "master", self._tag, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", "eth0", "up")

    def close(self) -> None:
        for i, host in enumerate(self.hosts):
            for words in (("netns", "del", host.name), ("link", "del", f"{self._tag}v{i}")):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*words)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._tag)

    def cut(self, index: int) -> None:
        """From now on nothing comes to this machine or from it."""
        _ip("-n", self.hosts[index].name, "link", "set", "eth0", "down")

    def mend(self, index: int) -> None:
        _ip("-n", self.hosts[index].name, "link", "set", "eth0", "up")

    def start(
        self,
        program: Path,
        *arguments: object,
        order: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> list[Program]:
        """One rank of a program on each machine, in the environment that torchrun sets; or on these, in their order."""
        started, hosts = [], [self.hosts[number] for number in order] or self.hosts
        for rank, host in enumerate(hosts):
            given = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            setup = f'hostname {host.name}; mount --make-rprivate /; mount --bind {host.folder} {self.drive}; exec "$@"'
            command = [
                "ip",
                "netns",
                "exec",
                host.name,
                "unshare",
                "-m",
                "-u",
                "-p",
                "-f",
                "--kill-child",
                "--mount-proc",
            ]
            command += ["bash", "-c", setup, "_", sys.executable, "-u", str(program), *map(str, arguments)]
            out = self._folder / f"{host.name}.txt"
            out.unlink(missing_ok=True)
            with out.open("w") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | given | dict(environment or {})
                )
            started.append(Program(process, out))
        return started


@dataclass(frozen=True)
class Program:
    """A rank that was started."""

    process: subprocess.Popen[bytes]
    out: Path

    @property
    def said(self) -> str:
        return self.out.read_text()

    def wait_for(self, text: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.said:
            assert time.monotonic() < deadline and self.process.poll() is None, self.said
            time.sleep(0.1)

    def send(self, number: int) -> None:
        """A signal to the rank itself, below the processes that made its machine."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
            if b"-u" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                break
        os.kill(pid, number)

    def end(self, limit_s: float) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the program hangs: {self.said}") from None


@contextlib.contextmanager
def hosts_of(folder: Path, count: int) -> Iterator[Hosts]:
    hosts = Hosts(folder, count)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()
