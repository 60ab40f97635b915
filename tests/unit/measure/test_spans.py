"""`measure.spans`: the calls that a profiler gets from a clock."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from paceline.core.errors import PacelineError
from paceline.measure import Clock, ClockSummary, StageClock
from paceline.measure.profiler import CAPTURE_RANGE, MarkedClock, NvtxMarks


class Written:
    """Spans that are written down, with the moment they are opened and closed at."""

    def __init__(self, switches_after: int = -1) -> None:
        self.lines: list[str] = []
        self.num_steps = 0
        self.switches_after = switches_after

    def open(self, name: str) -> None:
        self.lines.append(f"open {name}")

    def switch_stage(self, name: str) -> None:
        self.lines.append(f"turn {name}")

    def close(self) -> None:
        self.lines.append("close")

    @property
    def is_switching(self) -> bool:
        return self.num_steps == self.switches_after

    def end_step(self) -> None:
        self.num_steps += 1
        self.lines.append("step")

    def finish(self) -> None:
        self.lines.append("finish")


@pytest.fixture
def spans() -> Written:
    return Written()


@pytest.fixture
def clock(spans: Written) -> MarkedClock:
    return MarkedClock(StageClock(), spans)


def test_every_stage_and_pause_is_a_span(clock: MarkedClock, spans: Written) -> None:
    for _ in range(2):
        with clock.stage("forward"):
            assert clock.current_stage == "forward"
        with clock.stage("loss"):
            pass
        clock.end_step(images=1)
        with clock.paused("evaluate"):
            pass

    step = ["open forward", "close", "open loss", "close", "step", "open evaluate", "close"]
    assert spans.lines == step * 2
    assert set(clock.drain().stages) == {"forward", "loss"}
    assert set(clock.drain().pauses) == {"evaluate"}


def test_every_wait_for_a_batch_is_a_span(clock: MarkedClock, spans: Written) -> None:
    batches = []
    for batch in clock.batches(["a", "b"]):
        batches.append(batch)
        clock.end_step(images=1)

    assert batches == ["a", "b"]
    boundary, wait = ["open epoch_boundary", "close"], ["open data_wait", "close"]
    assert spans.lines == [*boundary, "step", *wait, "step", *wait]
    assert (clock.drain().n, set(clock.drain().pauses)) == (2, {"epoch_boundary"})


def test_a_loader_that_fails_leaves_no_span_open(clock: MarkedClock, spans: Written) -> None:
    def loader() -> Iterator[int]:
        yield 0
        raise OSError

    batches = clock.batches(loader())
    next(batches)
    with pytest.raises(OSError):
        next(batches)

    assert spans.lines == ["open epoch_boundary", "close", "open data_wait", "close"]


def test_a_turn_is_a_turn_of_both_and_only_in_a_stage(clock: MarkedClock, spans: Written) -> None:
    clock.switch_stage("exposed_communication")
    with clock.paused("evaluate"):
        clock.switch_stage("exposed_communication")
    with clock.stage("forward"):
        clock.switch_stage("exposed_communication")
        assert clock.current_stage == "exposed_communication"
        clock.switch_stage("forward")
    clock.end_step(images=1)

    turns = ["turn exposed_communication", "turn forward"]
    assert spans.lines == ["open evaluate", "close", "open forward", *turns, "close", "step"]
    assert set(clock.drain().stages) == {"forward", "exposed_communication"}


def test_a_stage_that_raises_closes_its_span(clock: MarkedClock, spans: Written) -> None:
    with pytest.raises(KeyError), clock.stage("forward"):
        raise KeyError
    assert spans.lines == ["open forward", "close"]


def test_spans_cost_no_stage_and_a_profiler_that_starts_costs_no_step() -> None:
    seconds = [0.0]

    class Slow(Written):
        def open(self, name: str) -> None:
            seconds[0] += 1.0

        def close(self) -> None:
            seconds[0] += 2.0

        def end_step(self) -> None:
            super().end_step()
            seconds[0] += 64.0 if self.num_steps == 2 else 4.0

    clock = MarkedClock(StageClock(now=lambda: seconds[0]), Slow(switches_after=1))
    for _ in range(3):
        with clock.stage("forward"):
            seconds[0] += 8.0
        clock.end_step(images=1)

    summary: ClockSummary = clock.drain()

    assert summary.recent == {"forward": (8.0, 8.0, 8.0)}
    assert summary.step_s == (11.0, 15.0, 11.0)
    assert summary.pauses == {"trace": 64.0}


def test_several_profilers_see_the_same() -> None:
    both = [Written(), Written()]
    clock: Clock = StageClock()
    for each in both:
        clock = MarkedClock(clock, each)
    with clock.stage("forward"):
        clock.switch_stage("exposed_communication")
    clock.end_step(images=1)

    assert [each.lines for each in both] == [["open forward", "turn exposed_communication", "close", "step"]] * 2


class FakeNvtx:
    """The functions of `torch.cuda.nvtx`: pushed ranges are popped by the thread that pushed them, others by any."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pushed: list[tuple[str, int]] = []
        self.started: dict[int, str] = {}

    def range_push(self, name: str) -> None:
        self.pushed.append((name, threading.get_ident()))
        self.lines.append(f"push {name}")

    def range_pop(self) -> None:
        name, thread = self.pushed.pop()
        assert thread == threading.get_ident()
        self.lines.append(f"pop {name}")

    def range_start(self, name: str) -> int:
        self.started[len(self.lines)] = name
        self.lines.append(f"start {name}")
        return len(self.lines) - 1

    def range_end(self, handle: int) -> None:
        self.lines.append(f"end {self.started.pop(handle)}")


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    fake = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", fake)
    return fake


@pytest.mark.parametrize("warmup_steps", [0, 1, 2])
def test_the_capture_range_is_all_after_the_warmup(nvtx: FakeNvtx, warmup_steps: int) -> None:
    spans = NvtxMarks(warmup_steps)
    clock = MarkedClock(StageClock(), spans)
    for _ in range(3):
        with clock.stage("forward"):
            pass
        clock.end_step(images=1)
    spans.finish()

    assert (nvtx.pushed, nvtx.started) == ([], {})
    first = nvtx.lines.index(f"push {CAPTURE_RANGE}")
    assert nvtx.lines[first + 1] == f"start step {warmup_steps}"
    assert nvtx.lines[-2:] == ["end step 3", f"pop {CAPTURE_RANGE}"]
    assert [line for line in nvtx.lines[first:] if "forward" in line] == ["start forward", "end forward"] * (
        3 - warmup_steps
    )


def test_operations_are_marked_within_the_capture_range(nvtx: FakeNvtx, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def emit_nvtx(*, enabled: bool) -> Iterator[None]:
        assert enabled
        nvtx.lines.append("mark operations")
        yield
        nvtx.lines.append("mark no more")

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit_nvtx)
    spans = NvtxMarks(1, marks_ops=True)
    for _ in range(2):
        spans.end_step()
    spans.finish()
    first = nvtx.lines.index(f"push {CAPTURE_RANGE}")
    assert nvtx.lines[first:] == [
        f"push {CAPTURE_RANGE}", "mark operations", "start step 1", "end step 1", "start step 2", "end step 2",
        "mark no more", f"pop {CAPTURE_RANGE}",
    ]  # fmt: skip


def test_a_run_that_ends_within_the_warmup_captures_nothing(nvtx: FakeNvtx) -> None:
    spans = NvtxMarks(warmup_steps=2)
    spans.end_step()
    spans.finish()

    assert (nvtx.pushed, nvtx.started) == ([], {})
    assert f"push {CAPTURE_RANGE}" not in nvtx.lines


def test_another_thread_may_turn_an_nvtx_range(nvtx: FakeNvtx) -> None:
    spans = NvtxMarks(warmup_steps=9)
    spans.open("backward")
    thread = threading.Thread(target=spans.switch_stage, args=("exposed_communication",))
    thread.start()
    thread.join(timeout=60)
    spans.close()

    ranges = ["start backward", "end backward", "start exposed_communication", "end exposed_communication"]
    assert nvtx.lines[-4:] == ranges


def test_a_torch_without_nvtx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range_push=missing))
    with pytest.raises(PacelineError, match=r"^measure.nvtx: on needs torch with CUDA \(set measure.nvtx=off\)$"):
        NvtxMarks(warmup_steps=1)
