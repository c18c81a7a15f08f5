"""Several machines on one: a network of namespaces, in which each has its own address, name, processes and directory.

Needs root and iproute2, and a system that allows it; see `unsupported`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        is_shared: bool = False,
        room: int | None = None,
        delay_s: float = 0.0,
        rate: str = "",
    ) -> None:
        """`is_shared`: all machines have the first one's directory. `room`: bytes of each. `delay_s`: of a packet;
        `rate`: of what each machine sends then, in tc's words, in packets as large as they can be."""
        # The kernel's names of links have 15 letters at most.
        self._tag, number = f"z{os.getpid() % 100000}", os.getpid() % 200
        self.drive = folder / "drive"
        self.drive.mkdir()
        self.hosts = [
            Host(f"{self._tag}h{i}", f"10.88.{number}.{i + 1}", folder / f"host{0 if is_shared else i}")
            for i in range(count)
        ]
        self._folder, self._room, self._delay_s, self._rate = folder, room, delay_s, rate
        self._device = "tun0" if delay_s else "eth0"
        self._relay: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def open(self) -> None:
        for folder in {host.folder for host in self.hosts}:
            folder.mkdir()
            if self._room is not None:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self._room}", "tmpfs", folder], check=True)
        for host in self.hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        if self._delay_s:
            self._open_relay()
        else:
            self._open_bridge()
        for host in self.hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", self._device)
            _ip("-n", host.name, "link", "set", self._device, "up")
            if self._rate:
                _ip("-n", host.name, "link", "set", self._device, "mtu", "65000")
                limit = ["tbf", "rate", self._rate, "burst", "2mb", "latency", "50ms"]
                shape = ["tc", "-n", host.name, "qdisc", "add", "dev", self._device, "root", *limit]
                subprocess.run(shape, check=True, capture_output=True, text=True)

    def _open_bridge(self) -> None:
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("link", "set", self._tag, "up")
        for i, host in enumerate(self.hosts):
            _ip("link", "add", f"{self._tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", f"{self._tag}v{i}", "master", self._tag, "up")

    def _open_relay(self) -> None:
        pairs = [f"{host.name}={host.address}" for host in self.hosts]
        command = [sys.executable, str(Path(__file__).with_name("relay.py")), str(self._delay_s), *pairs]
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None and self._relay.stdout.readline() == "open\n"

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        words = [("netns", "del", host.name) for host in self.hosts]
        words += [("link", "del", f"{self._tag}v{i}") for i in range(len(self.hosts))] + [("link", "del", self._tag)]
        for each in words:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*each)
        if self._room is not None:
            for folder in {host.folder for host in self.hosts}:
                subprocess.run(["umount", "-l", folder], check=False)

    def delay(self, on: bool) -> None:
        """Packets come late, as from the beginning, or at once."""
        assert self._relay is not None
        self._relay.send_signal(signal.SIGUSR2 if on else signal.SIGUSR1)

    def cut(self, index: int) -> None:
        """From now on nothing comes to this machine or from it."""
        _ip("-n", self.hosts[index].name, "link", "set", self._device, "down")

    def mend(self, index: int) -> None:
        _ip("-n", self.hosts[index].name, "link", "set", self._device, "up")

    def silence(self, index: int) -> None:
        """From now on nothing comes from this machine. It hears the others."""
        for host in self.hosts:
            if host is not self.hosts[index]:
                _ip("-n", self.hosts[index].name, "route", "add", "blackhole", f"{host.address}/32")

    def hear(self, index: int) -> None:
        """The end of `silence`."""
        for host in self.hosts:
            if host is not self.hosts[index]:
                _ip("-n", self.hosts[index].name, "route", "del", "blackhole", f"{host.address}/32")

    def start(
        self,
        program: Path,
        *arguments: object,
        order: Sequence[int] = (),
        per_host: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> list[Program]:
        """So many ranks of a program on each machine, in the environment that torchrun sets; or on machines of these
        numbers, in their order. Returns them in the order of ranks."""
        started, hosts = [], [self.hosts[number] for number in order] or self.hosts
        for index, host in enumerate(hosts):
            given = {
                "WORLD_SIZE": str(len(hosts) * per_host),
                "LOCAL_WORLD_SIZE": str(per_host),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
            }
            outs = [self._folder / f"rank{index * per_host + local}.txt" for local in range(per_host)]
            ranks = " ".join(
                f'(RANK={index * per_host + local} LOCAL_RANK={local} exec "$@" > {out} 2>&1) & jobs="$jobs $!";'
                for local, out in enumerate(outs)
            )
            wait = "for job in $jobs; do wait $job || status=$?; done; exit $status"
            for out in outs:
                out.write_text("")
            command = [sys.executable, "-u", str(program), *map(str, arguments)]
            process = self._open(host, f"jobs=; status=0; {ranks} {wait}", command, given | dict(environment or {}))
            started += [Program(process, out) for out in outs]
        return started

    def launch(self, number: int, nnodes: str, *command: object, restarts: int = 0, per_host: int = 1) -> Program:
        """torchrun's agent on this machine, for a script or `-m` and a module with arguments. All agents of a run give
        the same; their store is on the first machine. The output of all starts is one file."""
        out, host = self._folder / f"agent{number}.txt", self.hosts[number]
        options = {
            "nnodes": nnodes,
            "nproc-per-node": per_host,
            "max-restarts": restarts,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{self.hosts[0].name}:{PORT}",
            "rdzv-id": "test",
            # Seconds that a start waits for more machines than the least, and after which one is gone.
            "rdzv-conf": "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=15",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        torchrun = [sys.executable, "-u", "-m", "torch.distributed.run", *words, *map(str, command)]
        out.touch()  # an agent that is started again goes on in it
        # With a shared store, rank 0 tells its address in the first round alone: a later machine waits for it in vain.
        given = {"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        script = f'mount --bind {self._folder / "hosts"} /etc/hosts; exec "$@" >> {out} 2>&1'
        return Program(self._open(host, script, torchrun, given), out)

    def _open(
        self, host: Host, script: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """The script on this machine, whose processes end with it, or with the network."""
        given = {"GLOO_SOCKET_IFNAME": self._device, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        apart = ["unshare", "-m", "-u", "-p", "-f", "--kill-child", "--mount-proc"]
        setup = f"hostname {host.name}; mount --make-rprivate /; mount --bind {host.folder} {self.drive}"
        process = subprocess.Popen(
            ["ip", "netns", "exec", host.name, *apart, "bash", "-c", f"{setup}; {script}", "_", *arguments],
            env=os.environ | given | dict(environment),
        )
        self._started.append(process)
        return process


@dataclass(frozen=True)
class Program:
    """A rank that was started."""

    process: subprocess.Popen[bytes]
    """Of its machine: it ends with the machine's last rank."""
    out: Path

    @property
    def said(self) -> str:
        return self.out.read_text()

    @property
    def pid(self) -> int:
        """Outside of its machine, as its output file names it."""
        found = self.pids()
        assert found, f"no process writes {self.out}"
        return found[0]

    def pids(self) -> list[int]:
        """Of all processes that write its output, in the order of their starts."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and (folder / "fd" / "1").readlink() == self.out:
                    # Numbers of processes begin anew at some point, so they do not tell who came first.
                    start = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
                    found.append((start, int(folder.name)))
        return [pid for _, pid in sorted(found)]

    def ranks(self) -> list[int]:
        """Processes that this agent has started."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def wait_for(self, text: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.said:
            assert time.monotonic() < deadline and self.process.poll() is None, self.said
            time.sleep(0.1)

    def end(self, limit_s: float) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ranks = [Program(self.process, out) for out in sorted(self.out.parent.glob("rank*.txt"))]
            for rank in ranks:
                with contextlib.suppress(AssertionError):
                    os.kill(rank.pid, signal.SIGUSR2)  # faulthandler writes the stacks of a rank that runs
            time.sleep(2)
            self.process.kill()
            said = "\n".join(f"{rank.out.name}: {rank.said}" for rank in ranks)
            raise AssertionError(f"the program of {self.out.name}, or another of its machine, hangs: {said}") from None


@contextlib.contextmanager
def hosts_of(folder: Path, count: int, **options: Any) -> Iterator[Hosts]:
    """The network that `Hosts` makes with these options, until the block ends."""
    hosts = Hosts(folder, count, **options)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()
