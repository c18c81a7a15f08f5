"""The fake GPU on programs of plain torch: right ones give the same bits under every policy, wrong ones are seen."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fake_gpu import device
from tests.fake_gpu.device import LATE, TYPE, Policy
from tests.fake_gpu.library import call
from tests.helpers.models import AttentionBlock, TinyLM, build, tokens_of

EVERY = [(policy, seed) for policy in LATE for seed in ([0, 1, 2] if policy is Policy.RANDOM else [0])]
N = 4096


@contextmanager
def pinned(numel: int = N) -> Iterator[Tensor]:
    """Registered host memory."""
    tensor = torch.zeros(numel)
    assert call("register_host", tensor.data_ptr(), tensor.nbytes)
    yield tensor
    call("unregister_host", tensor.data_ptr())


def other_stream() -> torch.Stream:
    return torch.Stream(device=TYPE)


def event() -> torch.Event:
    return torch.Event(device=TYPE)


# Right programs


def train(precision: torch.dtype = torch.float32, **options: Any) -> list[float]:
    """Three steps of AdamW; what came of them."""
    torch.manual_seed(0)
    model = build(lambda: TinyLM(block=AttentionBlock, **options)).to(TYPE, precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(3):
        loss = model(tokens_of(step).to(TYPE))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses] + [float(param.detach().double().sum()) for param in model.parameters()]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_training_is_the_same_under_every_policy(precision: torch.dtype) -> None:
    expected = train(precision)
    for policy, seed in EVERY:
        device.policy(policy, seed)
        assert train(precision) == expected, (policy, seed)


def run_on_side_stream(x: Tensor, ordered: bool = True) -> Tensor:
    """x + 1, on another stream."""
    side, here = other_stream(), torch.accelerator.current_stream()
    if ordered:
        side.wait_stream(here)
    with side:
        y = x + 1
    if ordered:
        x.record_stream(side)
        here.wait_stream(side)
        y.record_stream(here)
    return y


def test_ordered_streams() -> None:
    for policy, seed in EVERY:
        device.policy(policy, seed)
        x = torch.ones(N, device=TYPE)
        for _ in range(5):
            x = run_on_side_stream(x) * 2
        assert x.tolist() == [94.0] * N, policy


def test_copies_of_pinned_memory() -> None:
    with pinned() as source, pinned() as target:
        for policy, seed in EVERY:
            device.policy(policy, seed)
            copies, here = other_stream(), torch.accelerator.current_stream()
            source.fill_(3)
            x = torch.empty(N, device=TYPE)
            copies.wait_stream(here)
            with copies:
                x.copy_(source, non_blocking=True)
            here.wait_stream(copies)
            y = x * 2
            copies.wait_stream(here)
            with copies:
                target.copy_(y, non_blocking=True)
                over = event()
                over.record()
            y.record_stream(copies)
            over.synchronize()
            assert torch.equal(target, torch.full((N,), 6.0)), policy
            x.record_stream(copies)


@pytest.mark.parametrize("policy", LATE)
def test_random_numbers_depend_on_the_seed_alone(policy: Policy) -> None:
    def draws() -> list[Any]:
        x = torch.ones(100, device=TYPE)
        drawn = [F.dropout(x, 0.5), torch.rand(9, device=TYPE), torch.randn(9, device=TYPE), x.bernoulli(0.3)]
        drawn += [torch.randperm(9, device=TYPE), torch.multinomial(x, 5), torch.randint(9, (9,), device=TYPE)]
        return [each.tolist() for each in drawn]

    torch.manual_seed(5)
    expected, others = draws(), draws()
    device.policy(policy, 1)
    torch.manual_seed(5)
    state = torch.fakegpu.get_rng_state()
    first = draws()
    assert first == expected
    assert draws() == others != first
    torch.fakegpu.set_rng_state(state)
    assert draws() == expected
    own = torch.Generator(device=TYPE).manual_seed(5)
    numbers = torch.rand(9, device=TYPE, generator=own).tolist()
    saved = own.get_state()
    assert torch.rand(9, device=TYPE, generator=own).tolist() != numbers
    own.manual_seed(5)
    assert torch.rand(9, device=TYPE, generator=own).tolist() == numbers
    assert torch.equal(own.get_state(), saved)


@pytest.mark.parametrize("policy", LATE)
def test_recompute_draws_the_same_dropout(policy: Policy) -> None:
    device.policy(policy)
    from torch.utils.checkpoint import checkpoint

    def grad(recomputed: bool) -> Tensor:
        torch.manual_seed(3)
        x = torch.ones(N, device=TYPE, requires_grad=True)

        def body(x: Tensor) -> Tensor:
            return F.dropout(x * x, 0.5)

        (checkpoint(body, x, use_reentrant=False) if recomputed else body(x)).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(grad(True).cpu(), grad(False).cpu())


def test_autocast() -> None:
    linear = nn.Linear(8, 8).to(TYPE)
    with torch.autocast(TYPE, dtype=torch.bfloat16):
        y = linear(torch.randn(2, 8, device=TYPE))
        assert y.dtype is torch.bfloat16
        assert F.mse_loss(y, y).dtype is torch.float32
        assert y.softmax(-1).dtype is torch.float32
        assert torch.addcmul(y.float(), y, y).dtype is torch.float32
    y.sum().backward()
    assert linear.weight.grad is not None and linear.weight.grad.dtype is torch.float32


def test_two_devices() -> None:
    for policy, seed in EVERY:
        device.policy(policy, seed)
        x = torch.arange(float(N), device="fakegpu:0")
        with device.current(1):
            y = x.to("fakegpu:1") * 2
            assert torch.empty(1, device=TYPE).device.index == 1
        assert torch.equal(y.to("fakegpu:0").cpu(), torch.arange(float(N)) * 2)
        with pytest.raises(RuntimeError, match="same device"):
            x + y


def test_shapes_by_values() -> None:
    for policy, seed in EVERY:
        device.policy(policy, seed)
        x = torch.tensor([0, 3, 0, 5], device=TYPE)
        assert x.nonzero().flatten().tolist() == [1, 3]
        assert x[x > 0].tolist() == [3, 5]
        assert x[torch.tensor([3, 1], device=TYPE)].tolist() == [5, 3]
        x[x == 0] = 7
        assert x.tolist() == [7, 3, 7, 5]
        assert torch.equal(x, x.clone()) and x.unique().tolist() == [3, 5, 7]
        out = torch.empty(0, device=TYPE, dtype=torch.int64)
        assert torch.add(x, 1, out=out).tolist() == [8, 4, 8, 6]


def test_mistakes_in_shapes_are_told_at_once() -> None:
    device.policy(Policy.LATE)
    x = torch.ones(3, device=TYPE)
    with pytest.raises(RuntimeError, match="size"):
        x + torch.ones(4, device=TYPE)
    with pytest.raises(RuntimeError, match="size"):
        x.add_(torch.ones(4, device=TYPE))
    with pytest.raises(RuntimeError, match="cpu"):
        x + torch.ones(3)


def test_a_late_error_is_told_by_the_next_synchronization() -> None:
    device.policy(Policy.LATE)
    embedded = F.embedding(torch.tensor([7], device=TYPE), torch.ones(2, 2, device=TYPE))
    with pytest.raises(RuntimeError, match="launched earlier failed on fakegpu: aten::embedding|index_select"):
        embedded.sum().item()


def test_threads_launch_beside_each_other() -> None:
    device.policy(Policy.RANDOM, 4)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with other_stream():
                weight = torch.ones(8, 8, device=TYPE, requires_grad=True)
                for _ in range(20):
                    (weight @ weight).sum().backward()
                assert weight.grad is not None and weight.grad.sum().item() == 20 * 8 * 8 * 16
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_events_tell_time_and_a_poll_ends() -> None:
    device.policy(Policy.LATE)
    first, second = (torch.Event(device=TYPE, enable_timing=True) for _ in range(2))
    first.record()
    x = torch.ones(64, 64, device=TYPE) @ torch.ones(64, 64, device=TYPE)
    second.record()
    assert not second.query()
    while not second.query():
        pass
    assert first.elapsed_time(second) > 0
    assert x.sum().item() == 64**3


# Counts and limits


def test_counts() -> None:
    device.policy(Policy.LATE)
    with pinned() as host:
        x = torch.zeros(N, device=TYPE)
        with device.counting() as counts:
            x.copy_(host, non_blocking=True)
            host.copy_(x, non_blocking=True)
            over = event()
            over.record()
            over.synchronize()
            x.add_(1)
            x[0].item()
            torch.accelerator.synchronize()
    expected = {"uploads": 1, "downloads": 1, "upload_bytes": 4 * N, "download_bytes": 4 * N, "events": 1}
    expected |= {"event_syncs": 1, "stream_syncs": 1, "items": 1, "device_syncs": 1, "launches": 1}
    assert counts == expected


def test_memory_is_limited_and_counted() -> None:
    device.policy(Policy.LATE)
    module = torch.fakegpu
    module.empty_cache()
    module.reset_peak_memory_stats()
    before, ooms = module.memory_allocated(), module.memory_stats()["num_ooms"]
    with device.memory_limit(before + (1 << 20)):
        x = torch.empty(1 << 19, dtype=torch.uint8, device=TYPE)
        assert module.mem_get_info() == (1 << 19, before + (1 << 20))
        with pytest.raises(torch.OutOfMemoryError, match="fakegpu out of memory"):
            torch.empty((1 << 19) + 1, dtype=torch.uint8, device=TYPE)
        del x
        torch.empty(1 << 20, dtype=torch.uint8, device=TYPE)
    assert module.max_memory_allocated() == before + (1 << 20)
    assert module.memory_stats()["num_ooms"] == ooms + 1
    assert torch.accelerator.memory_allocated() == module.memory_allocated() == before


def test_pinning_can_be_refused() -> None:
    tensor = torch.zeros(N)
    with device.refuse_pinning():
        assert not call("register_host", tensor.data_ptr(), tensor.nbytes)
    x = torch.ones(N, device=TYPE)
    with device.counting() as counts:
        tensor.copy_(x, non_blocking=True)
    assert tensor.sum() == N
    assert counts["pageable_copies"] == 1


def test_a_copy_across_registrations_is_refused() -> None:
    host, x = torch.zeros(2 * N), torch.zeros(2 * N, device=TYPE)
    for half in host.chunk(2):
        assert call("register_host", half.data_ptr(), half.nbytes)
    for half, there in zip(host.chunk(2), x.chunk(2), strict=True):
        half.copy_(there, non_blocking=True)
    for target, source in ((host, x), (x, host)):
        with pytest.raises(RuntimeError, match="not in one registration"):
            target.copy_(source, non_blocking=True)
    device.synchronize()
    call("unregister_host", host.data_ptr())
    with pytest.raises(RuntimeError, match="not in one registration"):
        x.copy_(host)
    call("unregister_host", host[N:].data_ptr())
    x.copy_(host)


def test_freed_memory_is_reused_at_once_and_poisoned() -> None:
    device.policy(Policy.LATE)
    x = torch.ones(N, device=TYPE)
    address = x.data_ptr()
    del x
    y = torch.empty(N, device=TYPE)
    assert y.data_ptr() == address
    assert y.isnan().all().item()


# Mistakes: each is a race, and wrong numbers under one policy or another


def missing_wait() -> None:
    run_on_side_stream(torch.ones(N, device=TYPE), ordered=False) * 2


def missing_record_stream() -> None:
    x, side, here = torch.ones(N, device=TYPE), other_stream(), torch.accelerator.current_stream()
    side.wait_stream(here)
    with side:
        y = x + 1
    del x
    torch.empty(1, device=TYPE)  # any memory of this stream may be what was freed
    here.wait_stream(side)
    y.record_stream(here)


def copy_that_begins_too_early() -> None:
    with pinned() as host:
        x = torch.ones(N, device=TYPE)
        with other_stream() as copies:
            host.copy_(x, non_blocking=True)
        copies.synchronize()


def host_writes_under_an_upload() -> None:
    with pinned() as host:
        x = torch.empty(N, device=TYPE)
        x.copy_(host, non_blocking=True)
        host.fill_(1)
        torch.accelerator.synchronize()


def host_writes_under_a_download() -> None:
    with pinned() as host:
        host.copy_(torch.ones(N, device=TYPE), non_blocking=True)
        host.fill_(1)
        torch.accelerator.synchronize()


def download_over_an_upload() -> None:
    with pinned() as host:
        x, side = torch.empty(N, device=TYPE), other_stream()
        with side:
            y = torch.ones(N, device=TYPE)
        x.copy_(host, non_blocking=True)
        with side:
            host.copy_(y, non_blocking=True)
        device.synchronize()


def unregistered_under_a_copy() -> None:
    with pinned() as host:
        host.copy_(torch.ones(N, device=TYPE), non_blocking=True)


MISTAKES = {
    missing_wait: "nothing orders it after",
    missing_record_stream: "the next allocation writes on stream 0 of device 0, and nothing orders it after aten::add",
    copy_that_begins_too_early: "download reads on stream",
    download_over_an_upload: "download writes on stream",
    host_writes_under_an_upload: "the host changed memory before it knew that an upload had read it",
    host_writes_under_a_download: "the host wrote memory before it knew that a download had filled it",
    unregistered_under_a_copy: "host memory is unregistered before the host knows",
}


@pytest.mark.parametrize("policy", LATE)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_seen(mistake: Callable[[], None], policy: Policy) -> None:
    device.policy(policy, 1)
    mistake()
    races = device.take_races()
    assert any(MISTAKES[mistake] in race for race in races), races


@pytest.mark.parametrize("policy", LATE)
def test_what_a_download_brings_is_not_there_before_the_host_knows(policy: Policy) -> None:
    device.policy(policy)
    with pinned() as host:
        host.copy_(torch.ones(N, device=TYPE), non_blocking=True)
        assert host.isnan().all()
        torch.accelerator.synchronize()
        assert host.eq(1).all()


def test_a_stale_event_orders_nothing() -> None:
    """An event that is recorded anew stands for its last record only where the wait came after that."""
    device.policy(Policy.LATE)
    x, side, again = torch.zeros(N, device=TYPE), other_stream(), event()
    again.record()
    side.wait_event(again)
    x.add_(1)
    again.record()
    with side:
        y = x * 1
    assert device.take_races()
    del y


def test_an_address_that_the_host_frees_is_forgotten() -> None:
    device.policy(Policy.LATE)
    for _ in range(3):
        buffer = (ctypes.c_char * (4 * N))()
        host = torch.frombuffer(buffer, dtype=torch.float32)
        assert call("register_host", host.data_ptr(), host.nbytes)
        with other_stream() as side:
            x = torch.empty(N, device=TYPE)
            x.copy_(host, non_blocking=True)
        side.synchronize()
        call("unregister_host", host.data_ptr())
