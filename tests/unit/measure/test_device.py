"""`measure.device`: CUDA events, on a stream that runs only when a test says so."""

import pytest

from paceline.core.errors import PacelineError
from paceline.measure import StageClock
from paceline.measure.clock import (
    RECENT_STEPS,
    CudaEventTimer,
    HostOnlyTimer,
    StageSeconds,
    current_device_type,
    seconds_by_stage,
)


class FakeStream:
    """A device with work of given lengths that reaches its events when `run` is called."""

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
def events(stream: FakeStream) -> CudaEventTimer:
    return CudaEventTimer(stream.event, stream.synchronize)


def one_step(events: CudaEventTimer, stream: FakeStream, *, counted: bool = True) -> None:
    start = events.begin("forward")
    stream.queue(250.0)
    events.charge("forward", start)
    stream.queue(4000.0)
    start = events.begin("backward")
    stream.queue(500.0)
    events.charge("backward", start)
    events.end_step(counted=counted)


def host(*stages: str) -> StageSeconds:
    """Return a host's seconds of these stages, of which only the names matter to a device."""
    return StageSeconds(dict.fromkeys(stages, 9.0), dict.fromkeys(stages, (9.0,)))


def test_stages_have_the_seconds_that_the_device_spent(events: CudaEventTimer, stream: FakeStream) -> None:
    for _ in range(4):
        one_step(events, stream)

    device = events.drain(host("forward", "backward", "loss"))

    assert device.total == {"forward": 1.0, "backward": 2.0, "loss": 0.0}
    assert device.recent == {"forward": (0.25,) * 4, "backward": (0.5,) * 4, "loss": (0.0,) * 4}


def test_steps_never_wait_and_drain_waits_once(events: CudaEventTimer, stream: FakeStream) -> None:
    for _ in range(100):
        one_step(events, stream)
    assert stream.num_synchronised == 0

    events.drain(host())

    assert stream.num_synchronised == 1


def test_events_are_used_again_once_the_device_has_passed_them(events: CudaEventTimer, stream: FakeStream) -> None:
    for _ in range(100):
        one_step(events, stream)
        stream.run()

    assert stream.num_events == 8  # of one step being recorded and of the one before, read at its end

    assert events.drain(host("forward")).total == {"forward": 25.0}


def test_completed_steps_are_read_without_waiting(events: CudaEventTimer, stream: FakeStream) -> None:
    one_step(events, stream)
    assert events.read_completed() == ({}, 0.0)  # the device has not reached it
    stream.run()
    one_step(events, stream)

    assert events.read_completed() == ({"forward": 0.25, "backward": 0.5}, 4.75)
    assert stream.num_synchronised == 0


def test_shares_are_of_device_time_and_cover_each_step_once(events: CudaEventTimer, stream: FakeStream) -> None:
    clock = StageClock(device=events)
    for forward_ms, backward_ms in ((250.0, 750.0), (125.0, 375.0), (750.0, 250.0)):
        for name, each_ms in (("forward", forward_ms), ("backward", backward_ms)):
            with clock.stage(name):
                stream.queue(each_ms)
        clock.end_step(images=8)
        if forward_ms == 125.0:
            stream.run()
            assert clock.pop_shares() == {"forward": 0.25, "backward": 0.75}
            assert clock.pop_shares() == {}

    assert clock.pop_shares() == {}  # the third step has not finished
    stream.run()
    assert clock.pop_shares() == {"forward": 0.75, "backward": 0.25}
    assert stream.num_synchronised == 0


def test_warmup_and_unfinished_steps_are_dropped(events: CudaEventTimer, stream: FakeStream) -> None:
    one_step(events, stream, counted=False)
    one_step(events, stream)
    events.charge("forward", events.begin("forward"))

    device = events.drain(host("forward", "backward"))
    assert device.total == {"forward": 0.25, "backward": 0.5}
    assert device.recent == {"forward": (0.25,), "backward": (0.5,)}
    assert stream.num_events == 6  # four, of which the second step used those of the warm-up, and two more


def test_a_pause_waits_for_the_device(events: CudaEventTimer, stream: FakeStream) -> None:
    """The wait for work that steps have queued is the steps' time, not the evaluation's."""
    seconds = [0.0]

    def synchronize() -> None:
        seconds[0] += 5.0

    clock = StageClock(device=CudaEventTimer(stream.event, synchronize), now=lambda: seconds[0])
    with clock.paused("evaluate"):
        seconds[0] += 1.0
    clock.end_step(images=1)

    summary = clock.drain()

    assert summary.pauses == {"evaluate": 1.0}
    assert summary.wall_s == 5.0


def test_steps_are_read_whole_and_only_when_the_device_has_passed_them(
    events: CudaEventTimer, stream: FakeStream
) -> None:
    one_step(events, stream)
    one_step(events, stream)
    stream.done_ms = 4750.0 + 300.0  # all of the first step, and the forward pass of the second
    events.end_step(counted=True)  # of nothing
    assert stream.num_events == 8

    one_step(events, stream)

    assert stream.num_events == 8  # the first step's were used again
    assert events.drain(host("forward")).recent == {"forward": (0.25, 0.25, 0.0, 0.25)}


def test_recent_steps_are_the_last_ones_that_are_counted(events: CudaEventTimer, stream: FakeStream) -> None:
    for step in range(RECENT_STEPS + 2):
        start = events.begin("forward")
        stream.queue(1000.0 * step)
        events.charge("forward", start)
        events.end_step(counted=step > 0)
        stream.run()

    assert events.drain(host("forward")).recent == {
        "forward": tuple(float(step) for step in range(2, RECENT_STEPS + 2))
    }


def test_micro_batches_of_a_step_add_up(events: CudaEventTimer, stream: FakeStream) -> None:
    for _ in range(3):
        start = events.begin("forward")
        stream.queue(1000.0)
        events.charge("forward", start)
    events.end_step(counted=True)

    device = events.drain(host("forward"))

    assert (device.total, device.recent) == ({"forward": 3.0}, {"forward": (3.0,)})


def test_a_turn_divides_what_the_device_did(events: CudaEventTimer, stream: FakeStream) -> None:
    clock = StageClock(device=events)
    with clock.stage("backward"):
        stream.queue(1000.0)
        clock.switch_stage("exposed_communication")
        stream.queue(2000.0)
    clock.end_step(images=1)

    recent = clock.drain().recent

    assert recent == {"backward": (1.0,), "exposed_communication": (2.0,)}
    assert stream.num_events == 4


def train(clock: StageClock, stream: FakeStream, *, launch_ms: float, compute_ms: float, synchronises_in: str) -> None:
    """Run a step whose stages each take the host `launch_ms` to launch and the device `compute_ms` to do."""
    for name in ("forward", "backward", "optimizer", "other"):
        with clock.stage(name):
            if name == synchronises_in:
                stream.run()
            if name != "other":
                stream.queue(compute_ms)
                stream.done_ms = min(stream.queued_ms, stream.done_ms + launch_ms)
    clock.end_step(images=1)


@pytest.mark.parametrize("synchronises_in", ["optimizer", "other", ""])
def test_a_host_that_waits_in_the_optimizer_does_not_starve_its_device(
    events: CudaEventTimer, stream: FakeStream, synchronises_in: str
) -> None:
    clock = StageClock(device=events)
    for _ in range(4):
        train(clock, stream, launch_ms=1.0, compute_ms=10.0, synchronises_in=synchronises_in)

    assert clock.drain().starved == 0.0


@pytest.mark.parametrize("synchronises_in", ["optimizer", "other", ""])
def test_a_host_that_launches_too_slowly_starves_its_device(
    events: CudaEventTimer, stream: FakeStream, synchronises_in: str
) -> None:
    clock = StageClock(device=events, warmup_steps=2)
    for _ in range(4):
        train(clock, stream, launch_ms=10.0, compute_ms=1.0, synchronises_in=synchronises_in)

    assert clock.drain().starved == 1.0


@pytest.mark.parametrize("stages", [("forward", "optimizer"), ("optimizer", "other"), ("all of it",)])
def test_the_device_is_asked_once_in_a_step(stream: FakeStream, stages: tuple[str, ...]) -> None:
    num_queries = [0]

    class Asked(FakeEvent):
        def query(self) -> bool:
            num_queries[0] += 1
            return False

    clock = StageClock(device=CudaEventTimer(lambda: Asked(stream), stream.synchronize))
    for _ in range(3):
        with clock.stage(stages[0]):
            pass
        for name in stages[1:] * 2:
            with clock.stage(name):
                pass
        clock.end_step(images=1)

    assert num_queries[0] == 2 * 3  # and once for whether the oldest step can be read


def test_a_device_that_is_done_when_a_step_without_an_optimizer_ends_is_starved(
    events: CudaEventTimer, stream: FakeStream
) -> None:
    """Of four measured steps, the device was ahead of the host in one; how logging ends is not asked."""
    for counted, done in ((False, True), (True, False), (True, True), (True, False), (True, False)):
        start = events.begin("train")
        stream.queue(1000.0)
        events.charge("train", start)
        if done:
            stream.run()
        start = events.begin("other")
        stream.queue(1.0)
        events.charge("other", start)
        events.end_step(counted=counted)

    assert events.drain(host("train")).num_starved == 1


def test_a_stage_that_is_left_by_an_error_does_not_ask_the_device(stream: FakeStream) -> None:
    """A device that failed fails again at each call, and the first error is the one to show."""
    num_recorded = [0]

    class Once(FakeEvent):
        def record(self) -> None:
            num_recorded[0] += 1
            assert num_recorded[0] == 1, "device failed"

    clock = StageClock(device=CudaEventTimer(lambda: Once(stream), stream.synchronize))
    with pytest.raises(KeyError), clock.stage("forward"):
        raise KeyError


def test_starved_is_a_share_of_the_counted_steps(events: CudaEventTimer, stream: FakeStream) -> None:
    clock = StageClock(device=events)
    for step in range(4):
        with clock.stage("forward"):
            stream.queue(1000.0)
        if step == 2:
            stream.run()
        clock.end_step(images=1)
    clock.end_step(images=1)  # a step of no stage says nothing

    assert clock.drain().starved == 0.2


def test_the_last_wait_of_an_epoch_is_taken_back(events: CudaEventTimer, stream: FakeStream) -> None:
    clock = StageClock(device=events)
    for _ in clock.batches(["batch", "batch"]):
        stream.queue(1000.0)
        clock.end_step(images=1)

    assert clock.drain().recent == {"data_wait": (0.0, 0.0)}
    clock.end_step(images=1)
    assert clock.drain().recent == {"data_wait": (0.0, 0.0, 0.0)}
    assert len(events._free) == stream.num_events == 4


def test_what_the_device_does_outside_of_stages_is_in_none(events: CudaEventTimer, stream: FakeStream) -> None:
    seconds = [0.0]
    clock = StageClock(device=events, now=lambda: seconds[0])
    with clock.stage("forward"):
        stream.queue(3000.0)
    stream.queue(500.0)
    seconds[0] += 4.0
    clock.end_step(images=1)

    summary = clock.drain()

    assert (summary.stages["forward"].host_s, summary.stages["forward"].device_s) == (0.0, 3.0)
    assert summary.residual_s == 4.0


def test_on_a_cpu_device_time_is_host_time() -> None:
    assert HostOnlyTimer().drain(host("forward")) == host("forward")


def test_a_step_without_a_stage_has_0_seconds_of_it() -> None:
    assert seconds_by_stage(["forward", "loss"], [{"forward": 1.0}, {"loss": 2.0}]) == {
        "forward": (1.0, 0.0),
        "loss": (0.0, 2.0),
    }


def test_a_gpu_is_timed_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert (current_device_type("cuda"), current_device_type("auto"), current_device_type("cpu")) == (
        "cuda",
        "cuda",
        "cpu",
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (current_device_type("auto"), current_device_type("cpu")) == ("cpu", "cpu")
    with pytest.raises(PacelineError, match=r"^device: torch sees no cuda device \(use cpu or auto\)$"):
        current_device_type("cuda")
