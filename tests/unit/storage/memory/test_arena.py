from __future__ import annotations

import gc
import itertools
import mmap
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from zero_offload.base.errors import CapacityError
from zero_offload.base.types import GIB
from zero_offload.hardware import probe
from zero_offload.hardware.probe import MemoryLimit
from zero_offload.storage.memory import arena as pages
from zero_offload.storage.memory.arena import FRAME, Arena, MovableBuffer, Need


@pytest.fixture(autouse=True, params=[True, False], ids=["pages move", "pages stay"])
def moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux, and as before 5.7 or in gVisor."""
    monkeypatch.setattr(pages, "moves_pages", lambda: request.param)


def test_a_region_lives_as_long_as_its_tensors() -> None:
    arena = Arena(0)
    tensor = arena.allocate(100).tensor(torch.float32, 25)
    assert torch.all(tensor == 0) and tensor.data_ptr() % FRAME == 0
    part = tensor[3:5]
    assert arena.allocated_bytes == mmap.PAGESIZE
    del tensor
    gc.collect()
    part.fill_(2)
    assert arena.allocated_bytes == mmap.PAGESIZE
    del part
    gc.collect()
    assert arena.allocated_bytes == 0


def test_views_of_a_region_share_it() -> None:
    region = Arena(0).allocate(64)
    region.tensor(torch.int32, 4, offset_bytes=16).fill_(-1)
    assert region.tensor(torch.int16, 32).tolist() == [0] * 8 + [-1] * 8 + [0] * 16


def test_frames_are_limited_and_reused() -> None:
    arena = Arena(3)
    first, second, third = (arena.lease() for _ in range(3))
    assert arena.lease_frames(2, first) and arena.free_frames == 1
    assert not arena.lease_frames(2, second) and second.frames is None
    frames = first.frames
    arena.release_frames(first)
    assert arena.lease_frames(3, second) and second.frames is not None
    assert frames is not None and set(frames) < set(second.frames)
    assert arena.frame_bytes == 3 * FRAME and arena.free_frames == 0
    assert arena.lease_frames(0, third) and third.frames == []


def test_the_limit_rises_to_its_maximum_and_no_further() -> None:
    arena = Arena(1, 3)
    assert not arena.raise_limit(3) and arena.frame_limit == 1
    assert arena.raise_limit(2) and arena.free_frames == 3
    assert not Arena(1).raise_limit(1)


def test_a_buffer_keeps_its_address_while_pages_come_and_go() -> None:
    arena = Arena(2)
    one, two = MovableBuffer(arena, FRAME + 1), MovableBuffer(arena, FRAME)
    view = one.region.tensor(torch.uint8, FRAME + 1)
    address = view.data_ptr()
    for value in (1, 2, 3):
        assert one.attach() and one.attached and not two.attach()
        view.fill_(value)
        assert view.sum(dtype=torch.int64).item() == value * (FRAME + 1) and view.data_ptr() == address
        one.detach()
        assert two.attach() and not one.attached
        two.detach()
    assert arena.frame_bytes == 2 * FRAME, "all of it reused"


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_frames_move_all_or_none(monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    """The system may refuse: a process has a limited number of mappings."""
    arena = Arena(3)
    buffer = MovableBuffer(arena, 3 * FRAME)
    view = buffer.region.tensor(torch.uint8, 3 * FRAME)
    move_frame, left = pages.move_frame, moves

    def refuse(source: int, target: int) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise CapacityError("mremap failed")
        move_frame(source, target)

    def is_refused(call: Callable[[], object]) -> None:
        nonlocal left
        left = moves
        with monkeypatch.context() as patch:
            patch.setattr(pages, "move_frame", refuse)
            with pytest.raises(CapacityError):
                call()

    is_refused(buffer.attach)
    assert not buffer.attached and arena.free_frames == 3
    assert buffer.attach()
    view.fill_(7)
    is_refused(buffer.detach)
    assert buffer.attached and arena.free_frames == 0
    if pages.moves_pages():  # else nothing is refused there, and what was undone is empty
        assert view.sum(dtype=torch.int64).item() == 7 * 3 * FRAME
    buffer.detach()
    assert arena.free_frames == 3


def test_detached_twice_is_a_bug() -> None:
    buffer = MovableBuffer(Arena(2), 1)
    with pytest.raises(AssertionError):
        buffer.detach()


@pytest.mark.parametrize("strike", [1, 2, 3])
def test_what_a_ctrl_c_breaks_off_is_done_again(monkeypatch: pytest.MonkeyPatch, strike: int) -> None:
    """It strikes as a move returns: pages have gone and are not noted yet."""
    arena, move_frame, num_moves = Arena(3), pages.move_frame, 0
    buffer = MovableBuffer(arena, 3 * FRAME)
    view = buffer.region.tensor(torch.uint8, 3 * FRAME)
    assert buffer.attach()

    def move(source: int, target: int) -> None:
        nonlocal num_moves
        move_frame(source, target)
        num_moves += 1
        if num_moves == strike:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pages, "move_frame", move)
        with pytest.raises(KeyboardInterrupt):
            buffer.detach()
    assert buffer.attached
    assert buffer.attach()
    view.fill_(7)
    assert view.sum(dtype=torch.int64).item() == 7 * 3 * FRAME
    buffer.detach()
    assert arena.free_frames == 3


def _struck(call: Callable[[], object], line: int) -> bool:
    """True if a Ctrl-C strikes in the call, before this line of those that it runs in the arena's file."""
    lines = itertools.count(1)

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return at_line

    def at_call(frame: FrameType, *_: Any) -> Any:
        is_check = frame.f_code.co_qualname.startswith("Arena._check_frames")
        return at_line if frame.f_code.co_filename == pages.__file__ and not is_check else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("call", ["attach", "detach"])
def test_a_ctrl_c_at_any_line_loses_no_frame_and_gives_none_to_two(call: str, claims: bool) -> None:
    """Another buffer takes frames first; then the struck buffer goes on."""
    for line in itertools.count(1):
        arena = Arena(4, num_kept=2 * claims)
        struck, other = (MovableBuffer(arena, 2 * FRAME, claims=claims) for _ in range(2))
        if call == "detach":
            assert struck.attach()
        if not _struck(getattr(struck, call), line):
            break
        assert other.attach()
        if struck.attached:
            struck.detach()
        assert struck.attach()
        views = [each.region.tensor(torch.uint8, 2 * FRAME) for each in (struck, other)]
        for value, view in enumerate(views):
            view.fill_(value)
        assert all(bool((view == value).all()) for value, view in enumerate(views))
        struck.detach()
        other.detach()
        assert (arena.free_frames, arena.claimed_frames, arena.frame_bytes) == (4 - 2 * claims, 0, 4 * FRAME)
    assert line > 20


def test_a_pinner_sees_every_region_before_its_pages_go() -> None:
    class Log:
        numa_node = None

        def __init__(self) -> None:
            self.pinned: dict[int, int] = {}

        def pin(self, address: int, nbytes: int) -> None:
            self.pinned[address] = nbytes

        def unpin(self, address: int) -> None:
            del self.pinned[address]

    log = Log()
    arena = Arena(0, None, log)
    region = arena.allocate(FRAME + 1)
    assert log.pinned == {region.address: FRAME + mmap.PAGESIZE}
    del region
    gc.collect()
    assert log.pinned == {}


def test_ranges_are_counted_and_moves_are_not() -> None:
    class Pinner:
        numa_node = None

        def pin(self, address: int, nbytes: int) -> None: ...

        def unpin(self, address: int) -> None: ...

    arena = Arena(2, pinner=Pinner())
    assert arena.taken == (0, 0)
    held = arena.allocate(1)
    buffer = MovableBuffer(arena, FRAME)
    assert arena.taken == (2, 1)
    for _ in range(3):
        assert buffer.attach()
        buffer.detach()
    assert arena.taken == (3, 1), "the first attach took a frame"
    del held
    gc.collect()
    assert arena.taken == (3, 1), "what went back was taken all the same"


class Strike(BaseException):
    """As KeyboardInterrupt."""


def test_a_signal_that_strikes_while_memory_goes_back_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving back 128 MiB takes milliseconds, and Python drops what is raised in its own finalizers."""

    def strike(*_: object) -> None:
        raise Strike

    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    arena = Arena(0)
    before = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(5):
            array = arena.array(torch.uint8, 128 << 20).fill_(1)
            with pytest.raises(Strike):
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                del array
                time.sleep(5)
            array = None  # if the strike came before  # noqa: F841
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert arena.allocated_bytes == 0 and not dropped


def test_frames_are_kept_for_who_claims_them() -> None:
    arena = Arena(4, 6, num_kept=3)
    assert (arena.free_frames, arena.kept_frames) == (1, 3)
    buffer, claiming = MovableBuffer(arena, 2 * FRAME), MovableBuffer(arena, 2 * FRAME, claims=True)
    assert not buffer.attach() and claiming.attach()
    assert (arena.free_frames, arena.kept_frames) == (1, 1)
    claiming.detach()
    assert (arena.free_frames, arena.kept_frames, arena.frame_bytes) == (1, 3, 2 * FRAME)


def test_who_cannot_wait_takes_kept_frames_before_more_are_allowed() -> None:
    arena = Arena(4, 5, num_kept=3)
    assert arena.raise_limit(2) and (arena.frame_limit, arena.free_frames, arena.kept_frames) == (4, 3, 1)
    assert not arena.raise_limit(3) and (arena.free_frames, arena.kept_frames) == (3, 1)
    assert arena.raise_limit(2) and (arena.frame_limit, arena.free_frames, arena.kept_frames) == (5, 5, 0)
    claiming = MovableBuffer(arena, 3 * FRAME, claims=True)
    assert claiming.attach() and (arena.free_frames, arena.kept_frames) == (2, 0)
    claiming.detach()
    assert (arena.free_frames, arena.kept_frames) == (5, 0), "what was given up is for everybody"


def test_what_is_claimed_is_not_given_up_when_more_is_allowed() -> None:
    arena = Arena(4, 6, num_kept=3)
    assert arena.raise_limit(2, claimed=True) and (arena.frame_limit, arena.free_frames, arena.kept_frames) == (6, 3, 3)
    assert not arena.raise_limit(1, claimed=True)
    claiming = MovableBuffer(arena, 6 * FRAME, claims=True)
    assert claiming.attach() and (arena.free_frames, arena.kept_frames) == (0, 0)
    claiming.detach()
    assert (arena.free_frames, arena.kept_frames) == (3, 3)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what the system has left; each allocation of some pages is compared with it."""

    def has(nbytes: int) -> None:
        monkeypatch.setattr(
            probe, "memory_limits", lambda: (MemoryLimit("host", 8 * GIB), MemoryLimit("cgroup x", nbytes))
        )

    monkeypatch.setattr(pages, "LOOK_BYTES", FRAME)
    return has


def test_more_than_is_left_is_an_error_that_takes_nothing(left: Callable[[int], None]) -> None:
    arena = Arena(4, pinner=_PinsNothing())
    left(8 * FRAME - 1)
    with pytest.raises(CapacityError) as caught:
        arena.allocate(8 * FRAME, Need("sums of x", "Type y"))
    assert str(caught.value) == "sums of x: 16 MiB of CPU memory are needed, 16 MiB are left (cgroup x). Type y"
    assert arena.allocated_bytes == arena.num_mappings == 0
    left(8 * FRAME)
    assert arena.allocate(8 * FRAME).nbytes == 8 * FRAME
    left(8 * FRAME + pages.SPARE_BYTES - 1)
    with pytest.raises(CapacityError, match="272 MiB are left .cgroup x., and 256 MiB are to stay free"):
        arena.allocate(8 * FRAME, Need(is_planned=False))


def test_memory_that_is_taken_and_not_filled_is_not_left(left: Callable[[int], None]) -> None:
    """The system counts its pages as free until something is written there."""
    arena = Arena(0)
    states = arena.array(torch.uint8, 8 * FRAME, Need("states", fills_late=True))
    arena.array(torch.uint8, 8 * FRAME)  # of others it is not known whether they will be filled
    states[: 2 * FRAME].fill_(1)
    left(9 * FRAME)
    with pytest.raises(
        CapacityError, match="8 MiB of CPU memory are needed, beside 12 MiB for states that are not filled yet"
    ):
        arena.array(torch.uint8, 4 * FRAME)
    assert arena.array(torch.uint8, 3 * FRAME).numel() == 3 * FRAME
    states.fill_(1)
    assert arena.array(torch.uint8, 4 * FRAME).numel() == 4 * FRAME


def test_many_small_pieces_are_compared_too(left: Callable[[int], None]) -> None:
    arena = Arena(0, pinner=_PinsNothing())
    left(0)
    kept = [arena.allocate(FRAME // 4) for _ in range(3)]
    with pytest.raises(CapacityError, match="a buffer: 512 KiB of CPU memory are needed, 0 B are left"):
        arena.allocate(FRAME // 4)
    assert arena.allocated_bytes == len(kept) * FRAME // 4


def test_what_cannot_be_asked_is_asked_later(left: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many_files() -> None:
        raise OSError(24, "Too many open files")

    arena = Arena(0)
    monkeypatch.setattr(probe, "memory_limits", too_many_files)
    kept = arena.allocate(FRAME)
    left(0)
    with pytest.raises(CapacityError):
        arena.allocate(mmap.PAGESIZE)
    assert arena.allocated_bytes == kept.nbytes


def test_frames_beyond_what_is_left_are_an_error(left: Callable[[int], None]) -> None:
    arena = Arena(4)
    left(2 * FRAME)
    first, second = arena.lease(), arena.lease()
    assert arena.lease_frames(2, first)
    with pytest.raises(CapacityError, match="units on their way: 4 MiB of CPU memory are needed"):
        left(FRAME)
        arena.lease_frames(2, second)
    assert arena.frame_bytes == 2 * FRAME and arena.free_frames == 2
    arena.release_frames(first)
    assert arena.lease_frames(2, second), "those are here"


def test_what_no_plan_counts_stays_within_the_budget() -> None:
    arena = Arena(0, most_bytes=10 * FRAME)
    planned = arena.allocate(8 * FRAME)
    activations = arena.allocate(4 * FRAME, Need("activations", is_planned=False, is_bounded=False))
    sums = Need("sums of x", "Type y", is_planned=False)
    with pytest.raises(
        CapacityError, match=r"with 6 MiB more the cpu tier takes 22 MiB, and cpu_memory= allows 20 MiB"
    ):
        arena.allocate(3 * FRAME, sums)
    assert arena.allocated_bytes == planned.nbytes + activations.nbytes
    narrow = arena.allocate(FRAME, sums)
    assert arena.allocate(2 * FRAME, sums, replaced_bytes=narrow.nbytes).nbytes == 2 * FRAME
    assert Arena(0).allocate(FRAME, sums).nbytes == FRAME, "no budget"


class _PinsNothing:
    numa_node = None

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


def test_a_frame_that_nobody_has_is_found() -> None:
    arena = Arena(4)
    lease, other = arena.lease(), arena.lease()
    assert arena.lease_frames(2, lease) and arena.lease_frames(1, other)
    assert lease.frames is not None
    lost = lease.frames.pop()
    with pytest.raises(AssertionError, match="2 frames are free or leased, and 3 there"):
        arena.release_frames(other)
    lease.frames.append(lost)
    arena.release_frames(lease)
