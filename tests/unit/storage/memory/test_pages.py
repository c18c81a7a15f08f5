from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.trainer import fork_server
from zero_offload.base.errors import CapacityError
from zero_offload.storage.memory import arena as pages
from zero_offload.storage.memory.arena import FRAME, Arena, MovableBuffer

PREAMBLE = "import ctypes; from zero_offload.storage.memory import arena as pages; F = pages.FRAME\n"


def run_alone(body: str) -> int | None:
    """Exit status of a process of its own; a fault is minus the signal."""
    process = fork_server().Process(target=exec, args=(PREAMBLE + body, {}))
    process.start()
    process.join(60)
    return process.exitcode


def test_frames_needed() -> None:
    assert [pages.num_frames(n) for n in (0, 1, FRAME, FRAME + 1)] == [0, 1, 1, 2]


@pytest.mark.parametrize("nbytes", [1, FRAME, 3 * FRAME + 5])
def test_allocated_memory_is_aligned_and_zero(nbytes: int) -> None:
    address = pages.allocate(nbytes)
    assert address % FRAME == 0
    assert ctypes.string_at(address, min(nbytes, 4096)) == bytes(min(nbytes, 4096))
    ctypes.memset(address, 7, nbytes)
    assert ctypes.string_at(address + nbytes - 1, 1) == b"\7"
    pages.release(address, nbytes)


@pytest.mark.parametrize(("nbytes", "tail"), [(FRAME // 4, FRAME // 4), (2 * FRAME, 0), (3 * FRAME + 5, mmap.PAGESIZE)])
def test_no_memory_is_taken_behind_the_end(nbytes: int, tail: int) -> None:
    """Not by a huge page of which a part is asked for."""
    assert pages.taken_bytes(nbytes) == nbytes // FRAME * FRAME + tail
    address, before = pages.allocate(nbytes), resident_pages()
    ctypes.memset(address, 7, nbytes)
    taken = (resident_pages() - before) * mmap.PAGESIZE
    assert 0 <= taken - pages.taken_bytes(nbytes) <= 16 * mmap.PAGESIZE, taken  # what the test itself takes
    pages.release(address, nbytes)


def test_pages_move_with_their_contents_and_come_back() -> None:
    source, target = pages.allocate(FRAME), pages.reserve(2 * FRAME)
    ctypes.memset(source, 5, FRAME)
    pages.move_frame(source, target + FRAME)
    assert ctypes.string_at(target + FRAME, FRAME) == b"\5" * FRAME
    ctypes.memset(target + FRAME, 6, FRAME)
    pages.move_frame(target + FRAME, source)
    assert ctypes.string_at(source, FRAME) == b"\6" * FRAME
    pages.release(source, FRAME)
    pages.release(target, 2 * FRAME)


def test_pages_that_cannot_move_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "moves_pages", lambda: False)
    source, target = pages.allocate_movable(4), pages.reserve(4 * FRAME)
    before = resident_pages()
    for begin, end in ((source, target), (target, source)):
        ctypes.memset(begin, 5, 4 * FRAME)
        for offset in range(0, 4 * FRAME, FRAME):
            pages.move_frame(begin + offset, end + offset)
        assert resident_pages() - before < FRAME // mmap.PAGESIZE
        assert ctypes.string_at(end + FRAME, FRAME) == bytes(FRAME)
    pages.release(source, 4 * FRAME)
    pages.release(target, 4 * FRAME)


def test_a_system_that_moves_no_pages_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.moves_pages()
    monkeypatch.setattr(pages, "MREMAP_MAYMOVE_FIXED_DONTUNMAP", 1 | 2 | 4 | 64)  # a flag that no kernel knows
    assert not pages.moves_pages.__wrapped__()


@pytest.mark.parametrize(
    "body",
    [
        "ctypes.string_at(pages.reserve(F), 1)",
        "a, b = pages.allocate(F), pages.reserve(F); pages.move_frame(a, b); ctypes.string_at(b, 1); "
        "pages.move_frame(b, a); pages.protect(b, F); ctypes.string_at(a, 1); ctypes.string_at(b, 1)",
        "a = pages.allocate(F); pages.release(a, F); ctypes.string_at(a, 1)",
    ],
    ids=["reserved", "moved away", "released"],
)
def test_a_touch_of_absent_pages_is_a_fault(body: str) -> None:
    assert run_alone(body) == -signal.SIGSEGV


def test_no_memory_is_held_by_what_is_reserved() -> None:
    before = resident_pages()
    address = pages.reserve(1 << 34)
    assert resident_pages() - before < 100
    pages.release(address, 1 << 34)


def resident_pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_forked_children_do_not_inherit() -> None:
    body = "import os; a = pages.allocate(F); ctypes.memset(a, 1, F); child = os.fork()\n"
    body += "if child == 0: ctypes.string_at(a, 1); os._exit(0)\n"
    body += "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11)"
    assert run_alone(body) == 1


def test_failure_says_what_to_do() -> None:
    with pytest.raises(CapacityError, match=r"mmap of .* failed: Cannot allocate memory.*ulimit -v"):
        pages.reserve(1 << 47)


def test_neighbours_survive_a_release() -> None:
    """The edges cut off for alignment are no one else's memory."""
    addresses = [pages.allocate(FRAME) for _ in range(20)]
    for i, address in enumerate(addresses):
        ctypes.memset(address, i, FRAME)
    for address in addresses[::2]:
        pages.release(address, FRAME)
    for i, address in list(enumerate(addresses))[1::2]:
        assert ctypes.string_at(address, FRAME) == bytes([i]) * FRAME
        pages.release(address, FRAME)


def test_reserved_huge_pages_serve_where_there_are_no_transparent_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(pages, "TRANSPARENT_HUGE_PAGES", setting)
    with reserved_huge_pages(2) as count:
        before = free_huge_pages()
        address = pages.allocate(2 * FRAME)
        ctypes.memset(address, 7, 2 * FRAME)
        assert before - free_huge_pages() == count
        assert address % FRAME == 0
        more = pages.allocate(FRAME)  # none are left: small pages serve
        ctypes.memset(more, 7, FRAME)
        target = pages.reserve(FRAME)
        pages.move_frame(more, target)
        assert ctypes.string_at(target, 1) == b"\7"
        for used, nbytes in ((address, 2 * FRAME), (more, FRAME), (target, FRAME)):
            pages.release(used, nbytes)
        assert free_huge_pages() == before


def test_frames_are_on_pages_that_move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "TRANSPARENT_HUGE_PAGES", tmp_path / "no such file")
    with reserved_huge_pages(2):
        arena = Arena(2)
        buffer = MovableBuffer(arena, 2 * FRAME)
        for value in (1, 2):
            assert buffer.attach()
            buffer.region.tensor(torch.uint8, 2 * FRAME).fill_(value)
            assert buffer.region.tensor(torch.uint8, 1, 2 * FRAME - 1).item() == value
            buffer.detach()


@pytest.mark.parametrize("node", [0, 63])
def test_a_wish_for_a_node_is_no_more_than_that(node: int) -> None:
    address = pages.allocate(FRAME)
    pages.prefer_node(address, FRAME, node)
    ctypes.memset(address, 7, FRAME)
    pages.release(address, FRAME)


@pytest.mark.parametrize(
    ("lists", "cores", "nodes"),
    [
        (["0-1", "2-3"], {0, 1, 2}, (0, 1)),
        (["0-1,8-9", "2-7"], {9}, (0,)),
        (["0", "", "1,3"], {3}, (2,)),
        (["0-3", "who knows"], {1}, ()),
        ([], {0}, ()),
    ],
)
def test_nodes_are_those_whose_processors_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: list[str], cores: set[int], nodes: tuple[int, ...]
) -> None:
    for node, text in enumerate(lists):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{text}\n")
    monkeypatch.setattr(pages.os, "sched_getaffinity", lambda pid: cores)
    assert pages.nodes_of_threads(tmp_path) == nodes


def policy_at(address: int) -> str:
    """The system's policy for the range that holds an address."""
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("a kernel without NUMA")
    ranges = [line.split()[:2] for line in maps.read_text().splitlines()]
    return max((int(start, 16), policy) for start, policy in ranges if int(start, 16) <= address)[1]


def test_memory_of_a_cpu_with_several_nodes_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames keep the policy on their way from buffer to buffer, before they are touched and after."""
    monkeypatch.setattr(pages, "nodes_of_threads", lambda: (0, 5))  # nodes that are not there are left out
    arena = Arena(1)
    region, buffers = arena.allocate(FRAME), [MovableBuffer(arena, FRAME) for _ in range(2)]
    assert policy_at(region.address) == "interleave:0"
    for buffer in buffers:
        assert buffer.attach()
        assert policy_at(buffer.region.address) == "interleave:0"
        buffer.region.tensor(torch.uint8, FRAME).fill_(1)
        buffer.detach()
    monkeypatch.setattr(pages, "nodes_of_threads", lambda: (0,))
    assert policy_at(Arena(0).allocate(FRAME).address) == "default"


@contextlib.contextmanager
def reserved_huge_pages(count: int) -> Iterator[int]:
    """Set so many aside, which takes the right to."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    if free_huge_pages():
        pytest.skip("there are huge pages of another program")
    try:
        setting.write_text(str(int(before) + count))
    except OSError:
        pytest.skip("not allowed to reserve huge pages")
    try:
        if free_huge_pages() < count:
            pytest.skip("no memory for huge pages")
        yield count
    finally:
        setting.write_text(before)


def free_huge_pages() -> int:
    return int(re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]
