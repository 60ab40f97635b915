"""`measure.device`: CUDA events, on a stream that runs only when a test says so."""

import pytest

from paceline.measure import StageClock
from paceline.measure.device import CudaEvents, HostOnly


class FakeStream:
    """A device that is told how long its work is, and reaches its events when `run` is called."""

    def __init__(self) -> None:
        self.queued_ms = 0.0
        self.done_ms = 0.0
        self.num_events = 0
        self.num_synchronised = 0

    def queue(self, milliseconds: float) -> None:
        self.queued_ms += milliseconds

    def run(self) -> None:
        self.done_ms = self.queued_ms

    def synchronize(self) -> None:
        self.num_synchronised += 1
        self.run()

    def event(self) -> "FakeEvent":
        self.num_events += 1
        return FakeEvent(self)


class FakeEvent:
    """An event of that stream; reading it too early is an error, as in CUDA."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = self.stream.queued_ms

    def query(self) -> bool:
        return self.at_ms <= self.stream.done_ms

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        assert self.query() and end_event.query(), "device not ready"
        return end_event.at_ms - self.at_ms


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


@pytest.fixture
def events(stream: FakeStream) -> CudaEvents:
    return CudaEvents(stream.event, stream.synchronize)


def one_step(events: CudaEvents, stream: FakeStream, *, counted: bool = True) -> None:
    start = events.mark()
    stream.queue(250.0)
    events.charge("forward", start)
    stream.queue(4000.0)
    start = events.mark()
    stream.queue(500.0)
    events.charge("backward", start)
    events.end_step(counted=counted)


def test_stages_have_the_seconds_that_the_device_spent(events: CudaEvents, stream: FakeStream) -> None:
    for _ in range(4):
        one_step(events, stream)

    totals = events.drain({"forward": 0.0, "backward": 0.0, "loss": 0.0})

    assert totals == {"forward": 1.0, "backward": 2.0, "loss": 0.0}


def test_steps_never_wait_and_drain_waits_once(events: CudaEvents, stream: FakeStream) -> None:
    for _ in range(100):
        one_step(events, stream)
    assert stream.num_synchronised == 0

    events.drain({})

    assert stream.num_synchronised == 1


def test_events_are_used_again_once_the_device_has_passed_them(events: CudaEvents, stream: FakeStream) -> None:
    for _ in range(100):
        one_step(events, stream)
        stream.run()

    assert stream.num_events == 8  # of one step being recorded and of the one before, read at its end

    assert events.drain({"forward": 0.0}) == {"forward": 25.0}


def test_warmup_and_unfinished_steps_are_dropped(events: CudaEvents, stream: FakeStream) -> None:
    one_step(events, stream, counted=False)
    one_step(events, stream)
    events.charge("forward", events.mark())

    assert events.drain({"forward": 9.0, "backward": 9.0}) == {"forward": 0.25, "backward": 0.5}
    assert stream.num_events == 6  # four, of which the second step used those of the warm-up, and two more


def test_the_device_settles_before_a_pause(events: CudaEvents, stream: FakeStream) -> None:
    """The wait for work that steps have queued is the steps' time, not the evaluation's."""
    seconds = [0.0]

    def synchronize() -> None:
        seconds[0] += 5.0

    clock = StageClock(device=CudaEvents(stream.event, synchronize), now=lambda: seconds[0])
    with clock.paused("evaluate"):
        seconds[0] += 1.0
    clock.end_step(images=1)

    summary = clock.drain()

    assert summary.pauses == {"evaluate": 1.0}
    assert summary.wall_s == 5.0


def test_what_the_device_does_outside_of_stages_is_other(events: CudaEvents, stream: FakeStream) -> None:
    seconds = [0.0]
    clock = StageClock(device=events, now=lambda: seconds[0])
    with clock.stage("forward"):
        stream.queue(3000.0)
    seconds[0] += 4.0
    clock.end_step(images=1)

    stages = clock.drain().stages

    assert (stages["forward"].host_s, stages["forward"].device_s) == (0.0, 3.0)
    assert (stages["other"].host_s, stages["other"].device_s) == (4.0, 1.0)


def test_on_a_cpu_device_time_is_host_time() -> None:
    assert HostOnly().drain({"forward": 1.5}) == {"forward": 1.5}
