"""Communication hooks time buckets, report means, and drop times from before the buckets changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from paceline.parallel.comm_hooks import HostEvent, TimedCommHook, build_comm_hook
from paceline.recipe.schema.train import Parallel

CPU = torch.device("cpu")


@dataclass
class Bucket:
    """A bucket of the given bytes."""

    number: int
    num_bytes: int
    last: bool

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last


class Network:
    """A fake network: buckets are in flight until they are completed, by a clock set in the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent: list[Future[Tensor]] = []
        self.returned: list[Any] = []

    def send(self, bucket: Bucket) -> tuple[Future[Tensor], int]:
        future: Future[Tensor] = Future()
        self.sent.append(future)
        return future, bucket.num_bytes

    def step(
        self, hook: TimedCommHook, sizes: Sequence[int], ready_s: Sequence[float], done_s: Sequence[float]
    ) -> None:
        """Send a bucket of each size at `ready_s` and complete it at `done_s`, seconds since the start of the step."""
        began_s = self.now_s
        self.sent.clear()
        for number, (size, at_s) in enumerate(zip(sizes, ready_s, strict=True)):
            self.now_s = began_s + at_s
            bucket: Any = Bucket(number, size, number == len(sizes) - 1)
            self.returned.append(hook._hook(None, bucket))
        for future, at_s in zip(self.sent, done_s, strict=True):
            self.now_s = began_s + at_s
            future.set_result(torch.tensor(at_s))
        self.now_s = began_s + 100


def timed(network: Network, warmup_steps: int = 0) -> TimedCommHook:
    send: Any = network.send
    return TimedCommHook(send, None, lambda: HostEvent(network.now_s), warmup_steps)


def test_buckets_are_timed_from_ready_to_averaged() -> None:
    network = Network()
    hook = timed(network)
    network.step(hook, [100, 50], ready_s=[1, 3], done_s=[4, 5])
    network.step(hook, [100, 50], ready_s=[1, 4], done_s=[6, 5])  # the second is averaged first
    wire = hook.times()
    assert wire is not None and (wire.n, wire.wire_s) == (2, 4.5)  # 1 to 5, and 1 to 6
    assert [(each.bytes, each.ready_s, each.wire_s, each.n) for each in wire.buckets] == [
        (100, 0.0, 4.0, 2),
        (50, 2.5, 1.5, 2),
    ]
    assert [future.value().item() for future in network.returned] == [4, 5, 6, 5]  # what was sent comes through


def test_warmup_steps_are_not_counted() -> None:
    network = Network()
    hook = timed(network, warmup_steps=2)
    for took_s in (50, 40, 3):
        network.step(hook, [8], ready_s=[0], done_s=[took_s])
    wire = hook.times()
    assert wire is not None and (wire.n, wire.wire_s) == (1, 3.0)


def test_passes_before_a_reset_are_neither_counted_nor_warm_up() -> None:
    network = Network()
    hook = timed(network, warmup_steps=1)
    for _ in range(3):
        network.step(hook, [8], [1.0], [9.0])
    hook.reset()
    network.step(hook, [8], [1.0], [9.0])
    assert hook.times() is None
    network.step(hook, [8], [1.0], [3.0])
    wire = hook.times()
    assert wire is not None and (wire.n, wire.wire_s) == (1, 2.0)


def test_new_buckets_reset_the_means() -> None:
    network = Network()
    hook = timed(network)
    network.step(hook, [150], ready_s=[0], done_s=[9])
    network.step(hook, [100, 50], ready_s=[0, 1], done_s=[2, 3])
    wire = hook.times()
    assert wire is not None and (wire.n, wire.wire_s) == (1, 3.0)
    assert [each.bytes for each in wire.buckets] == [100, 50]


def test_a_step_in_flight_is_not_counted_yet() -> None:
    network = Network()
    hook = timed(network)
    assert hook.times() is None
    network.step(hook, [8], ready_s=[0], done_s=[2])
    bucket: Any = Bucket(0, 8, True)
    hook._hook(None, bucket)
    wire = hook.times()
    assert wire is not None and wire.n == 1
    network.now_s += 4
    network.sent[-1].set_result(torch.zeros(()))
    wire = hook.times()
    assert wire is not None and (wire.n, wire.wire_s) == (2, 3.0)


def test_an_aborted_step_is_dropped() -> None:
    network = Network()
    hook = timed(network)
    bucket: Any = Bucket(0, 8, False)
    hook._hook(None, bucket)
    network.step(hook, [8, 8], ready_s=[0, 1], done_s=[2, 3])
    wire = hook.times()
    assert wire is not None and (wire.n, wire.wire_s) == (1, 3.0)


def test_memory_does_not_grow_with_steps() -> None:
    network = Network()
    hook = timed(network)
    for _ in range(50):
        network.step(hook, [8], ready_s=[0], done_s=[1])
    assert len(hook._pending_steps) <= 1


def test_without_a_clock_no_hook_is_registered() -> None:
    assert build_comm_hook(Parallel(), CPU, None) is None
    for compression in ("bf16", "fp16", "powersgd"):
        hook = build_comm_hook(Parallel(compression=compression), CPU, None)
        assert hook is not None and not isinstance(hook, TimedCommHook) and hook.times() is None


@pytest.mark.parametrize("compression", ["off", "bf16"])
def test_with_a_clock_buckets_are_timed(compression: Any) -> None:
    assert isinstance(build_comm_hook(Parallel(compression=compression), CPU, lambda: 0.0), TimedCommHook)
