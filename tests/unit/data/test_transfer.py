"""Copies to a device are counted, and timed if the device has a clock, without the first ones."""

from dataclasses import dataclass

import pytest
import torch

from paceline.core.results import HostToDeviceResult
from paceline.data.transfer import MAX_TIMED_COPIES, CopyEvents, DeviceCopy, TransferStats
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
        """Do nothing."""

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


def test_on_a_cpu_nothing_is_copied() -> None:
    copy = DeviceCopy(torch.device("cpu"))
    assert all(sent is tensor for sent, tensor in zip(copy.send(TENSORS), TENSORS, strict=True))
    copy.send(TENSORS)
    assert copy.stats(skip=1) == TransferStats(sends=2, bytes=2 * BYTES)
    result = compute_host_to_device(copy.stats(0), accumulate=2)
    assert result == HostToDeviceResult(batch_bytes=2 * BYTES, copied_bytes=0)
    assert str(result) == "1.60 kB a step, none of it copied: the device is the CPU"


def test_copies_are_timed_without_the_first() -> None:
    events, _ = timed(11)
    assert events.total(skip=1) == (10_000, pytest.approx(0.02))
    assert events.total(skip=0) == (11_000, pytest.approx(0.12))
    assert events.total(skip=11) == (0, 0.0)


def test_a_long_run_keeps_its_last_copies_and_reuses_events() -> None:
    events, made = timed(MAX_TIMED_COPIES + 300)
    assert len(made) == 2 * MAX_TIMED_COPIES
    assert events.total(skip=0) == (1000 * MAX_TIMED_COPIES, pytest.approx(0.002 * MAX_TIMED_COPIES))


def test_the_rate_is_of_what_was_timed_and_the_time_of_a_step_follows() -> None:
    """The figures of a batch of 256 float images: 154 MB in 13.6 ms."""
    bytes_a_step = 256 * 3 * 224 * 224 * 4
    sent = TransferStats(sends=40, bytes=20 * bytes_a_step, copied_bytes=20 * bytes_a_step,
                  timed_bytes=10 * bytes_a_step, timed_s=0.136)  # fmt: skip
    result = compute_host_to_device(sent, accumulate=2)
    assert (result.batch_bytes, result.copied_bytes, result.copy_s) == (
        bytes_a_step,
        bytes_a_step,
        pytest.approx(0.0136),
    )
    assert str(result) == "154 MB a step, copied in 13.6 ms: 11.3 GB/s"


def test_a_result_without_copies_or_timing_is_described() -> None:
    assert str(compute_host_to_device(TransferStats(), 1)) == "nothing: the loader makes batches on the device"
    assert "not measured" in str(compute_host_to_device(TransferStats(sends=2, bytes=8, copied_bytes=8), 1))
