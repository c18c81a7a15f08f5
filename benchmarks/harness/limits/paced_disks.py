"""Two file systems on loop devices, one of them held to a third of the other's speed by a control group."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from zero_offload.base.types import MIB

NEEDS = "needs root, loop devices and the blkio or io controller"
_V1, _V2 = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def mounted(place: Path, nbytes: int, bytes_per_s: tuple[int, ...]) -> Iterator[list[Path] | None]:
    """A mounted directory for each speed, to which this process is held meanwhile; None if the system forbids it."""
    with contextlib.ExitStack() as undo:
        try:
            disks = [_mount(place / f"disk{i}", nbytes, undo) for i in range(len(bytes_per_s))]
            devices = [os.stat(disk).st_dev for disk in disks]
            _pace(
                {f"{os.major(dev)}:{os.minor(dev)}": speed for dev, speed in zip(devices, bytes_per_s, strict=True)},
                undo,
            )
        except (OSError, subprocess.CalledProcessError):
            yield None
            return
        yield disks


def _mount(path: Path, nbytes: int, undo: contextlib.ExitStack) -> Path:
    image = path.with_suffix(".img")
    with open(image, "wb") as file:
        undo.callback(image.unlink)
        os.truncate(file.fileno(), nbytes + 64 * MIB)  # sparse: what is not written takes no room
    path.mkdir()
    undo.callback(path.rmdir)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", image, path], check=True, capture_output=True)
    undo.callback(subprocess.run, ["umount", path], check=False)
    return path


def _pace(limits: dict[str, int], undo: contextlib.ExitStack) -> None:
    is_v1 = (_V1 / "blkio.throttle.read_bps_device").exists() or (_V1 / "tasks").exists()
    root = _V1 if is_v1 else _V2
    group = root / "zero_offload-bench"
    group.mkdir(exist_ok=True)
    undo.callback(group.rmdir)
    for device, speed in limits.items():
        if is_v1:
            for direction in ("read", "write"):
                (group / f"blkio.throttle.{direction}_bps_device").write_text(f"{device} {speed}")
        else:
            (group / "io.max").write_text(f"{device} rbps={speed} wbps={speed}")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    undo.callback((root / "cgroup.procs").write_text, str(os.getpid()))
