"""An ext4 file system in a file, which can be told to die, to turn read-only, or to come back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.ranks import wait_until

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_FLUSHING_THE_JOURNAL = 2


@dataclass
class Disk:
    """A mounted file system; `path` is its root."""

    image: Path
    path: Path

    def lose_power(self) -> None:
        """All I/O fails with EIO from now on, and what was not flushed is gone when it comes back."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSHING_THE_JOURNAL))
        finally:
            os.close(fd)

    def turn_read_only(self) -> None:
        """As ext4 does when it meets an error of its own."""
        number = os.stat(self.path).st_dev
        device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test")

    def come_back(self, *options: str) -> None:
        """After a reboot: nothing of the page cache is left, the journal is replayed."""
        # A closed ring lets go of its files a little later.
        wait_until(lambda: subprocess.run(["umount", str(self.path)], capture_output=True, check=False).returncode == 0)
        self.mount(*options)

    def mount(self, *options: str) -> None:
        settings = ",".join(["loop", "errors=remount-ro", *options])
        subprocess.run(["mount", "-o", settings, str(self.image), str(self.path)], check=True, capture_output=True)


@contextlib.contextmanager
def ext4_disk(path: Path, size: str, num_inodes: int = 128) -> Iterator[Disk]:
    """Skips the test where none may be mounted."""
    path.mkdir(mode=0o700)
    disk = Disk(path / "image", path / "root")
    disk.path.mkdir(mode=0o700)
    make = f"truncate -s {size} {disk.image} && mkfs.ext4 -q -F -m 0 -N {num_inodes} {disk.image}"
    made = os.geteuid() == 0 and subprocess.run(make, shell=True, check=False, capture_output=True).returncode == 0
    try:
        if not made:
            raise OSError("no root, or no mkfs.ext4")
        disk.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"an ext4 image cannot be mounted here: {error}")
    os.chmod(disk.path, 0o700)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk.path)], check=True)
