"""A file engine over a disk in memory."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

from tests.helpers.crashfs import CrashFS
from zero_offload.base.errors import IntegrityError, StorageError
from zero_offload.hardware import native
from zero_offload.hardware.abi import IoOp
from zero_offload.storage.files.engine import BlockTable, FileEngine, Ticket, TransferTimes, Urgency
from zero_offload.storage.files.engines import THREADS


class CrashEngine(FileEngine):
    """On a `CrashFS`: a transfer is made at its launch or, as drawn, only when it is waited for."""

    def __init__(self, fs: CrashFS, seed: int) -> None:
        super().__init__(THREADS)
        self._fs = fs
        self._rng = random.Random(seed)
        self._late: dict[int, Callable[[], None]] = {}
        self._failed: dict[int, Exception] = {}
        self._next = 0

    def name_file(self, fd: int, path: str, drive: int = 0) -> None: ...

    def submit(self, op: IoOp, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        moves = {IoOp.READ: self._read_verified, IoOp.READ_UNVERIFIED: self._read, IoOp.WRITE: self._write}
        ticket, self._next = Ticket(self._next, blocks), self._next + 1
        if self._rng.random() < 0.5:
            self._late[ticket.number] = lambda: moves[op](blocks, address)
        else:
            self._move(ticket.number, lambda: moves[op](blocks, address))
        return ticket

    def wait(self, ticket: Ticket) -> TransferTimes:
        if ticket.number in self._late:
            self._move(ticket.number, self._late.pop(ticket.number))
        if ticket.number in self._failed:
            raise self._failed.pop(ticket.number)
        return TransferTimes(0, 0)

    def done(self, ticket: Ticket) -> bool:
        return ticket.number not in self._late

    def close(self) -> None:
        while self._late:
            number = min(self._late)
            self._move(number, self._late.pop(number))

    def _move(self, number: int, move: Callable[[], None]) -> None:
        try:
            move()
        except OSError as error:
            self._failed[number] = StorageError(f"transfer failed: {error.strerror}")
        except IntegrityError as error:
            self._failed[number] = error

    def _write(self, blocks: BlockTable, address: int) -> None:
        for row in blocks:
            nbytes = int(row["nbytes"])
            row["crc"] = native.crc32c(int(row["seed"]), address, nbytes)
            self._fs.write_block(int(row["fd"]), int(row["offset"]), ctypes.string_at(address, nbytes))
            address += nbytes

    def _read(self, blocks: BlockTable, address: int) -> None:
        for row in blocks:
            data = self._fs.read_block(int(row["fd"]), int(row["offset"]), int(row["nbytes"]))
            if len(data) != row["nbytes"]:
                raise IntegrityError(f"the file ends inside the block at {row['offset']}")
            ctypes.memmove(address, data, len(data))
            address += len(data)

    def _read_verified(self, blocks: BlockTable, address: int) -> None:
        self._read(blocks, address)
        for row in blocks:
            if native.crc32c(int(row["seed"]), address, int(row["nbytes"])) != row["crc"]:
                raise IntegrityError(f"checksum of the block at {row['offset']}")
            address += int(row["nbytes"])
