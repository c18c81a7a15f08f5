"""The speeds of machines: GPUs, hosts and drives by name, and one rank's share of them.

Owns the table of public specifications and the shares of them that programs achieve. Never looks at this machine.
Calls: `find_gpu`, `parse_drives`, then `share_of_rank`; or `default_machine` for what has no name here.

GPUs, from data sheets and architecture papers of NVIDIA and AMD. The columns are memory and its bandwidth; dense bf16
arithmetic (no sparsity) with fp32 sums; fp32 arithmetic (torch multiplies fp32 matrices without TF32 unless told). The
link to the host, per direction: PCIe 4.0 x16 32 GB/s, 5.0 x16 64 GB/s. The link to each other, per direction: NVLink or
Infinity Fabric; the same PCIe where there is neither. Hosts: two sockets, of eight channels DDR4-3200 (AMD EPYC 7003:
205 GB/s a socket) or of twelve channels DDR5-4800 (EPYC 9004: 461 GB/s); a desktop has two channels DDR5-5600.
Networks: InfiniBand HDR 25 GB/s or NDR 50 GB/s, a port for each GPU; desktops 100 Gb Ethernet.

Achieved shares: of arithmetic, what a published training run reached on the card (`Share`; tests/helpers/published.py
has the runs and their sources). GeForce cards clock higher than their data sheets say, so theirs come near 1. Of memory
and links, rules of thumb. Figures that `zero-offload bench --device` has measured here replace them.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import GIB

GB = 10**9
STREAM_SHARE = 0.8
"""The share of a memory's bandwidth that is achieved."""
LINK_SHARE = 0.8
"""The share of a link's bandwidth, achieved by large copies from pinned memory or large collectives."""
DRIVE_BYTES = 2 * 10**12
"""Size of a drive that is named by its speed alone."""


class Resource(StrEnum):
    """Lanes that work side by side; each does one thing after the other."""

    COMPUTE = "compute"
    UPLOAD = "host to device"
    DOWNLOAD = "device to host"
    READ = "drive reads"
    WRITE = "drive writes"
    HOST = "update on the host"
    NETWORK = "network"


class Share(NamedTuple):
    """The share of a card's dense arithmetic that training of a whole transformer in bf16 reaches, with recompute."""

    of_peak: float
    run: str
    """The published run that it is fitted on."""
    card: str = ""
    """The card of that run, where it is another one."""


@dataclass(frozen=True)
class Gpu:
    """Specifications, in units of data sheets."""

    memory_gib: float
    tflops: float
    tflops_fp32: float
    memory_gb_s: float
    link_gb_s: float
    """The link to the host, per direction."""
    peer_gb_s: float
    """The link to the other GPUs of the machine, per direction: the host's link where there is not another."""
    share: Share
    host: str = "desktop"


@dataclass(frozen=True)
class Host:
    memory_gb_s: float
    network_gb_s: float
    """The machine's network, per direction, for each GPU where `network_per_gpu`."""
    network_per_gpu: bool = False


HOSTS: Mapping[str, Host] = {
    "desktop": Host(90, 12.5),
    "ddr4-server": Host(2 * 205, 25, network_per_gpu=True),
    "ddr5-server": Host(2 * 461, 50, network_per_gpu=True),
}

_RTX4090 = Share(0.891, "LLMQ, Qwen2.5-7B, 2,777 tokens/s")
_H100 = Share(0.602, "LLMQ, Qwen2.5-7B, 13,820 tokens/s")

GPUS: Mapping[str, Gpu] = {
    "rtx3090": Gpu(24, 71, 35.6, 936, 32, 32, _RTX4090._replace(card="rtx4090")),
    "rtx4090": Gpu(24, 165, 82.6, 1008, 32, 32, _RTX4090),
    "rtx5090": Gpu(32, 209, 104.8, 1792, 64, 64, Share(0.97, "LLMQ, Qwen2.5-7B on 4 GPUs, 3,475 tokens/s each")),
    "l40s": Gpu(48, 181, 91.6, 864, 32, 32, Share(0.934, "LLMQ, Qwen2.5-7B, 3,900 tokens/s"), "ddr4-server"),
    "a100-40": Gpu(
        40, 312, 19.5, 1555, 32, 300, Share(0.666, "llm-foundry, MPT-7B on 8 GPUs, 3,854 tokens/s each"), "ddr4-server"
    ),
    "a100-80": Gpu(
        80, 312, 19.5, 2039, 32, 300, Share(0.753, "llm-foundry, MPT-7B on 8 GPUs, 4,357 tokens/s each"), "ddr4-server"
    ),
    "h100": Gpu(80, 989, 67, 3350, 64, 450, _H100, "ddr5-server"),
    "h200": Gpu(141, 989, 67, 4800, 64, 450, _H100._replace(card="h100"), "ddr5-server"),
    "b200": Gpu(180, 2250, 75, 8000, 64, 900, _H100._replace(card="h100"), "ddr5-server"),
    "mi300x": Gpu(192, 1307, 163.4, 5300, 64, 448, _H100._replace(card="h100"), "ddr5-server"),
}
"""A card without a published run has the share of the nearest card with one: of its family, else a server's."""
_ALIASES = {"a100": "a100-80"}


@dataclass(frozen=True)
class Machine:
    """One rank's work per second, with all ranks of the machine at work; 0 where it lacks the resource."""

    is_host: bool
    """True if the CPU computes: the host's memory is the device's, and an update beside forward shares its cores."""
    flops: float
    """Achieved, in the compute dtype."""
    device_bytes: float
    """Streamed through the compute device's memory: for what it updates itself."""
    upload_bytes: float
    download_bytes: float
    host_bytes: float
    """Streamed through the host's memory by an update on all cores of the rank."""
    host_bytes_beside: float
    """Streamed through the host's memory by an update on the cores that forward leaves it."""
    read_bytes: float
    write_bytes: float
    drive_takes_turns: bool
    """True if reads and writes share the drives' time; otherwise each has its rate whatever the other does."""
    network_bytes: float
    """Sent and received by a rank at once, to the ranks with which it divides states, together."""
    replica_bytes: float = 0.0
    """Sent and received by a rank at once, to the ranks that hold the same; 0 for one rank."""
    drive_lost_s: float = 0.0
    """Seconds that a CPU's loops over all cores take longer for each byte that drives move beside them."""
    source: str = ""
    """Where the figures come from: shown with each prediction."""
    agreement_s: float = 0.0
    """Seconds of a step in which ranks of several machines wait for each other's words and norms."""

    def streams(self, resource: Resource) -> float:
        """Bytes a second; of compute, through the device's memory."""
        return float(getattr(self, _RATES[resource][-1 if resource is Resource.COMPUTE else 0]))

    def faster(self, resource: Resource, factor: float) -> Machine:
        """This machine with one resource sped up. A drive that takes turns is one resource."""
        names = list(_RATES[resource])
        if self.drive_takes_turns and resource in (Resource.READ, Resource.WRITE):
            names = [*_RATES[Resource.READ], *_RATES[Resource.WRITE]]
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def with_drives(self, factor: float) -> Machine:
        """This machine with drives that are so many times as fast together."""
        return replace(self, read_bytes=self.read_bytes * factor, write_bytes=self.write_bytes * factor)

    def resources(self) -> tuple[Resource, ...]:
        """Those that are there; of a drive that takes turns the reads stand for both."""
        there = [resource for resource in Resource if getattr(self, _RATES[resource][0]) > 0]
        return tuple(resource for resource in there if not (self.drive_takes_turns and resource is Resource.WRITE))

    def title(self, resource: Resource) -> str:
        return "drives" if self.drive_takes_turns and resource in (Resource.READ, Resource.WRITE) else resource.value


_RATES: Mapping[Resource, tuple[str, ...]] = {
    Resource.COMPUTE: ("flops", "device_bytes"),
    Resource.UPLOAD: ("upload_bytes",),
    Resource.DOWNLOAD: ("download_bytes",),
    Resource.READ: ("read_bytes",),
    Resource.WRITE: ("write_bytes",),
    Resource.HOST: ("host_bytes", "host_bytes_beside"),
    Resource.NETWORK: ("network_bytes", "replica_bytes"),
}


@dataclass(frozen=True)
class Drives:
    """Drives of one machine, together."""

    count: int
    read_bytes: float
    write_bytes: float
    takes_turns: bool = True
    fastest: float = 1.0
    """How many times as much the fastest of them moves as it would if they were equal."""

    def times(self, count: int) -> Drives:
        """This machine with another number of such drives."""
        factor = count / self.count
        return replace(self, count=count, read_bytes=self.read_bytes * factor, write_bytes=self.write_bytes * factor)


NO_DRIVES = Drives(0, 0.0, 0.0)
ONE_DRIVE = Drives(1, 5e9, 4e9)
"""The rates of an unknown directory: less than data sheets of drives on PCIe 4.0 x4 promise."""

_NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(Gbit|Gb)/s|GB/s)")


def parse_network(text: str) -> float:
    """Bytes a second of `10Gbit/s` or `1.25GB/s`; ConfigError for others."""
    match = _NETWORK.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--network {text}: write the rate of a machine's network as 10Gbit/s, or 1.25GB/s")
    return float(match[1]) * GB / (8 if match[2] else 1)


_DRIVES = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*GB/s(?:\s*/\s*(\d+(?:\.\d+)?)\s*GB/s)?", re.IGNORECASE)


_NEARLY = re.compile(r"(?:\d+\s*x\s*)?\d+(?:\.\d+)?\s*[KMGT]i?B.*", re.IGNORECASE)


def parse_drives(texts: list[str]) -> Drives | None:
    """The drives that `2x7GB/s` or `7GB/s/5GB/s` (reads / writes) describe, all together; None for directories.

    ConfigError for a mixture and for what moves nothing.
    """
    matches = [_DRIVES.fullmatch(text.strip()) for text in texts]
    found = [match for match in matches if match is not None]
    if mistyped := [text for text, match in zip(texts, matches, strict=True) if not match and _NEARLY.fullmatch(text)]:
        raise ConfigError(
            f"--nvme {' '.join(mistyped)} is not a speed of drives; write 2x7GB/s, or 7GB/s/5GB/s for reads, writes, "
            f"or ./{mistyped[0]} if it is a directory"
        )
    if not found:
        return None
    if len(found) < len(texts):
        raise ConfigError(f"--nvme {' '.join(texts)} mixes drives and directories; give either, such as 2x7GB/s")
    counts = [int(match[1] or 1) for match in found]
    reads = [float(match[2]) * GB for match in found]
    writes = [float(match[3] or match[2]) * GB for match in found]
    if not (min(counts) and min(reads) and min(writes)):
        raise ConfigError(f"--nvme {' '.join(texts)}: drives are one or more, and faster than 0; write 2x7GB/s")
    # Stripes are dealt by speed, so all drives are at work to the end.
    read_bytes, write_bytes = (
        sum(count * rate for count, rate in zip(counts, rates, strict=True)) for rates in (reads, writes)
    )
    of_each = [read + write for read, write in zip(reads, writes, strict=True)]
    fastest = max(of_each) * sum(counts) / (read_bytes + write_bytes)
    return Drives(sum(counts), read_bytes, write_bytes, fastest=fastest)


def find_gpu(name: str) -> tuple[str, Gpu]:
    """A preset and its name; ConfigError offers the nearest."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in GPUS:
        near = difflib.get_close_matches(key, GPUS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"GPU {name!r} is not known; {hint}there are {', '.join(GPUS)}")
    return key, GPUS[key]


def gpu_of_device(device_name: str) -> str | None:
    """The preset of a device as torch names it, such as "NVIDIA GeForce RTX 4090"; None for others."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    if "a100" in words:
        return "a100-80" if "80gb" in words else "a100-40"
    # "RTX 4090" and "RTX4090" are one card, "RTX A1000" and "GH200" are others.
    joined = {*words, *(one + other for one, other in itertools.pairwise(words))}
    return next((name for name in GPUS if name in joined), None)


@dataclass(frozen=True)
class Cluster:
    """How many ranks there are, on how many machines."""

    ranks: int = 1
    nodes: int = 1
    network_bytes: float | None = None
    """Of each machine, per second and direction; None for what such a machine usually has."""
    is_hybrid: bool = False
    """True if the ranks of a machine divide the states, and all machines hold the same (hybrid sharding)."""

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    @property
    def num_replicas(self) -> int:
        return self.nodes if self.is_hybrid else 1


ONE_RANK_ALONE = Cluster()
ROUND_TRIP_S = 1e-4
"""Between two machines of a local network, gloo's part included."""
INSIDE_S = 2e-5
"""Words of one process for another of its machine, in pages."""
ROUNDS, RANKS_WITH_ROOM = 3, 128
"""Of a clipped step that all ranks know. Among more ranks numbers have a round of their own, since the others have
little room. `tests/helpers/agreeing.py` counts them."""


def agreement_s(cluster: Cluster) -> float:
    """Seconds of a step in which words double with each hop among machines. A hop is a round trip; ranks of a machine
    meet before and after."""
    if cluster.nodes == 1:
        return 0.0
    rounds, inside_s = ROUNDS + (cluster.ranks > RANKS_WITH_ROOM), 2 * INSIDE_S * (cluster.ranks > cluster.nodes)
    return rounds * (ROUND_TRIP_S * (cluster.nodes - 1).bit_length() + inside_s)


def share_of_rank(
    gpu_name: str, drives: Drives, cluster: Cluster, dtype: str = "bfloat16", num_cores: int | None = None
) -> Machine:
    """One rank's share of a machine with these GPUs, one for each rank; host, drives and ports are divided.

    `dtype` is what the model computes in. A machine with `num_cores`, such as a virtual one, updates as fast as these
    stream; None is a whole server.
    """
    name, gpu = find_gpu(gpu_name)
    host, here = HOSTS[gpu.host], cluster.ranks_per_node
    dram = host.memory_gb_s * GB * STREAM_SHARE / here
    # All GPUs of a machine copy from the same memory.
    link = min(gpu.link_gb_s * GB * LINK_SHARE, dram)
    by_cores = float("inf") if num_cores is None else CORE_BYTES * num_cores / here
    cores = f", as far as {num_cores} cores stream" if by_cores < dram else ""
    ports = cluster.network_bytes or host.network_gb_s * GB * (here if host.network_per_gpu else 1)
    network, replica = _network(gpu.peer_gb_s * GB * LINK_SHARE, ports * LINK_SHARE, cluster)
    is_fp32 = dtype == "float32"
    tflops = gpu.tflops_fp32 if is_fp32 else gpu.tflops
    share = gpu.share
    assumed = f", assumed from {share.card}" if share.card else ", assumed from bf16" if is_fp32 else ""
    return Machine(
        is_host=False,
        flops=tflops * 1e12 * share.of_peak,
        device_bytes=gpu.memory_gb_s * GB * STREAM_SHARE,
        upload_bytes=link,
        download_bytes=link,
        host_bytes=min(dram, by_cores),
        host_bytes_beside=min(dram, by_cores),
        read_bytes=drives.read_bytes / here,
        write_bytes=drives.write_bytes / here,
        drive_takes_turns=drives.takes_turns,
        network_bytes=network,
        replica_bytes=replica,
        agreement_s=agreement_s(cluster),
        source=f"{name} computes at {share.of_peak:g} of its {tflops:g} TFLOPS{assumed} (a published run: "
        f"{share.run}); memory, links and a {gpu.host} at {STREAM_SHARE:g} of data sheets{cores}, not measured",
    )


def _network(peers: float, ports: float, cluster: Cluster) -> tuple[float, float]:
    """Bytes a second of a rank to those with which it divides states, and to those that hold the same.

    `peers` is the rate between ranks of a machine, `ports` that of all that leaves a machine.
    """
    here = cluster.ranks_per_node
    if cluster.ranks == 1:
        return 0.0, 0.0
    if cluster.nodes == 1:
        return peers, peers
    if cluster.is_hybrid:
        # All ranks of a machine reduce what each of them has at once.
        return (peers if here > 1 else ports), ports / here
    # A ring over all ranks leaves each machine through all of its ports at once.
    ring = min(peers, ports) if here > 1 else ports
    return ring, ring


def gpu_memory_bytes(gpu_name: str) -> int:
    return int(find_gpu(gpu_name)[1].memory_gib * GIB)


CORE_FLOPS = 20e9
"""FLOP/s of a CPU's core, in fp32."""
CORE_BYTES = 8e9
"""Streamed by an update on one core. Two cores of an unknown machine are taken to saturate memory. 16 of a virtual
machine with an H100 stream 134 GB/s together (benchmarks/results/2026-11-26-gpu-h100.json).
"""


def default_machine(
    device_name: str,
    num_cores: int,
    drives: Drives = ONE_DRIVE,
    cluster: Cluster = ONE_RANK_ALONE,
    dtype: str = "bfloat16",
) -> Machine:
    """The assumed speed of a rank where nothing was measured, the same on every rank that agrees on these arguments."""
    if device_name.startswith("cpu"):
        usual = HOSTS["desktop"].network_gb_s * GB
        network, replica = _network(usual * LINK_SHARE, (cluster.network_bytes or usual) * LINK_SHARE, cluster)
        return Machine(
            is_host=True,
            flops=CORE_FLOPS * num_cores,
            device_bytes=CORE_BYTES * min(num_cores, 2),
            upload_bytes=0.0,
            download_bytes=0.0,
            host_bytes=CORE_BYTES * min(num_cores, 2),
            host_bytes_beside=CORE_BYTES * min(max(num_cores // 2, 1), 2),
            read_bytes=drives.read_bytes / cluster.ranks_per_node,
            write_bytes=drives.write_bytes / cluster.ranks_per_node,
            drive_takes_turns=drives.takes_turns,
            network_bytes=network,
            replica_bytes=replica,
            agreement_s=agreement_s(cluster),
            source=f"defaults for a CPU with {num_cores} cores, not measured",
        )
    preset = gpu_of_device(device_name)
    found = share_of_rank(preset or "rtx4090", drives, cluster, dtype, num_cores)
    return found if preset else replace(found, source=f"{device_name} is not known here, so as if {found.source}")
