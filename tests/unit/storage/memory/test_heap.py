from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.helpers.fresh import run_script
from tests.helpers.pairwise import full
from zero_offload.base.types import MIB
from zero_offload.storage.memory import heap
from zero_offload.storage.memory.heap import HeapTrimmer


def test_trims_whenever_so_much_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(heap, "trim_heap", lambda: trims.append(None))
    trimmer = HeapTrimmer(10 * MIB)
    for _ in range(7):
        trimmer.freed(5 * MIB)
    assert len(trims) == 3
    trimmer.begin()
    trimmer.freed(5 * MIB)
    assert len(trims) == 3


# The work of the tests below in a heap of its own, that of a new process.
HEAP = """
import ctypes, mmap, resource
from zero_offload.storage.memory import heap
from zero_offload.base.types import MIB
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step(*sizes_mib):
    '''Large blocks come, are written, and go; bytes that the system gave for them.'''
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size * MIB) for size in sizes_mib]
    for block, size in zip(blocks, sizes_mib):
        ctypes.memset(block, 1, size * MIB)
    for block in blocks:
        libc.free(block)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * mmap.PAGESIZE
"""


def in_new_process(script: str) -> None:
    done = run_script(HEAP + script)
    assert done.returncode == 0, done.stderr


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's heap")


@needs_glibc
def test_large_blocks_of_steps_find_room() -> None:
    """From the third step on nothing is mapped anew, and a hole follows steps that grow."""
    in_new_process("""
room = heap.HeapHole(1 << 40, lambda: 1 << 40)
given = []
for sizes in 4 * [(60, 90)] + 4 * [(60, 90, 200)]:
    room.begin()
    given.append(step(*sizes))
assert given[0] >= 150 * MIB and given[1] >= 150 * MIB
assert given[3] < MIB, given  # the third touches the hole for the first time
assert given[4] >= 200 * MIB and given[7] < MIB, given
assert 350 * MIB <= room.nbytes < 370 * MIB
""")


@needs_glibc
def test_room_goes_with_its_owner_and_is_bounded() -> None:
    in_new_process("""
room = heap.HeapHole(1 << 40, lambda: 400 * MIB)
for _ in range(4):
    room.begin()
    step(60, 90)
assert room.nbytes == 100 * MIB
resident = int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE
del room
left = int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE
assert resident - left > 50 * MIB, (resident, left)
""")


@needs_glibc
def test_steps_without_large_blocks_leave_the_heap_alone() -> None:
    in_new_process("""
room = heap.HeapHole(1 << 40, lambda: 1 << 40)
for _ in range(4):
    room.begin()
    step(10, 20)
assert room.nbytes == 0
""")


@needs_glibc
@pytest.mark.parametrize(
    ("variable", "value"),
    [full("MALLOC_MMAP_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1000000")],
)
def test_a_heap_that_was_told_what_to_map_is_left_alone(variable: str, value: str) -> None:
    script = """
room = heap.HeapHole(1 << 40, lambda: 1 << 40)
for _ in range(4):
    room.begin()
    given = step(60, 90)
assert room.nbytes == 0 and given >= 150 * MIB
"""
    subprocess.run([sys.executable, "-c", HEAP + script], env=os.environ | {variable: value}, check=True)


@needs_glibc
def test_a_hole_is_made_wherever_the_heap_ends() -> None:
    in_new_process("""
for i in range(300):
    kept = libc.malloc(1000 + 16 * i)
    pin = heap._make_hole((4 + i % 9) * heap.BLOCK_BYTES)
    assert pin is not None, i
    libc.free(pin)
""")


@needs_glibc
@pytest.mark.parametrize(("grads_mib", "room_mib"), [(0, 80), (120, 120), (1000, 160)])
def test_a_hole_is_half_of_what_comes_and_goes_or_what_gradients_leave(grads_mib: int, room_mib: int) -> None:
    in_new_process(f"""
room = heap.HeapHole({grads_mib} * MIB, lambda: 1 << 40)
for _ in range(6):
    room.begin()
    step(80), step(80)
assert {room_mib} * MIB <= room.nbytes < {room_mib + 5} * MIB, room.nbytes / MIB
""")
