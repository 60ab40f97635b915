"""What is sent to a device is counted; its copies are timed where the device has a clock, the first ones left out."""

from dataclasses import dataclass

import pytest
import torch

from paceline.core.results import HostToDeviceResult
from paceline.data.transfer import MAX_TIMED_COPIES, CopyEvents, DirectCopy, TransferStats
from paceline.training.measurements import compute_host_to_device

TENSORS = (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
BYTES = 4 * 3 * 8 * 8 + 4 * 8


@dataclass(eq=False)
class Event:
    """An event of a stream on which each copy takes 2 ms, and the first 100 ms."""

    made: list["Event"]
    clock: list[float]
    time_ms: float = 0.0

    def record(self) -> None:
        if self.made.index(self) % 2:  # the second of a pair
            self.clock[0] += 100.0 if len(self.made) == 2 else 2.0
        self.time_ms = self.clock[0]

    def synchronize(self) -> None:
        """Be reached."""

    def elapsed_time(self, end: "Event") -> float:
        return end.time_ms - self.time_ms


def timed(num_sends: int) -> tuple[CopyEvents, list[Event]]:
    made: list[Event] = []
    clock = [0.0]

    def new_event() -> Event:
        made.append(Event(made, clock))
        return made[-1]

    events = CopyEvents(new_event)
    for number in range(1, num_sends + 1):
        events.end(events.begin(), number, 1000)
    return events, made


def test_a_cpu_copies_nothing_of_what_it_is_handed() -> None:
    bus = DirectCopy(torch.device("cpu"))
    assert all(sent is tensor for sent, tensor in zip(bus.send(TENSORS), TENSORS, strict=True))
    bus.send(TENSORS)
    assert bus.stats(skip=1) == TransferStats(sends=2, bytes=2 * BYTES)
    told = compute_host_to_device(bus.stats(0), accumulate=2)
    assert told == HostToDeviceResult(batch_bytes=2 * BYTES, copied_bytes=0)
    assert str(told) == "1.60 kB a step, none of it copied: the device is the CPU"


def test_copies_are_timed_without_the_first() -> None:
    events, _ = timed(11)
    assert events.total(skip=1) == (10_000, pytest.approx(0.02))
    assert events.total(skip=0) == (11_000, pytest.approx(0.12))
    assert events.total(skip=11) == (0, 0.0)


def test_a_long_run_keeps_its_last_copies_and_uses_their_events_again() -> None:
    events, made = timed(MAX_TIMED_COPIES + 300)
    assert len(made) == 2 * MAX_TIMED_COPIES
    assert events.total(skip=0) == (1000 * MAX_TIMED_COPIES, pytest.approx(0.002 * MAX_TIMED_COPIES))


def test_the_rate_is_of_what_was_timed_and_the_time_of_a_step_follows() -> None:
    """The figures of a batch of 256 float images: 154 MB in 13.6 ms."""
    bytes_a_step = 256 * 3 * 224 * 224 * 4
    sent = TransferStats(sends=40, bytes=20 * bytes_a_step, copied_bytes=20 * bytes_a_step,
                  timed_bytes=10 * bytes_a_step, timed_s=0.136)  # fmt: skip
    told = compute_host_to_device(sent, accumulate=2)
    assert (told.batch_bytes, told.copied_bytes, told.copy_s) == (bytes_a_step, bytes_a_step, pytest.approx(0.0136))
    assert str(told) == "154 MB a step, copied in 13.6 ms: 11.3 GB/s"


def test_what_was_not_copied_or_not_timed_is_told() -> None:
    assert str(compute_host_to_device(TransferStats(), 1)) == "nothing: the loader makes batches on the device"
    assert "not measured" in str(compute_host_to_device(TransferStats(sends=2, bytes=8, copied_bytes=8), 1))
