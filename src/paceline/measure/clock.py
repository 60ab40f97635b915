"""The stage clock: attribute every second of a run to a stage, on host and device, without synchronizing."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from typing import Any, Final, Literal, Protocol, TypeVar, final

from paceline.core.errors import PacelineError
from paceline.core.stages import DATA_WAIT, EPOCH_BOUNDARY, OTHER
from paceline.measure.cpu import CpuTimer, CpuTimes, build_cpu_timer

__all__ = ["EPOCH_BOUNDARY", "Clock", "NullClock", "StageClock", "build_clock"]

T = TypeVar("T")
Mark = Any
"""A moment on the device; only the timer that made it knows its type."""
OPTIMIZER: Final = "optimizer"
"""At the start of this stage the timer checks whether the GPU is idle: a loop that reads losses does so after it."""
MAX_STEP_TIMES: Final = 100_000  # 3 MB of floats; the spread of a longer run is that of its last steps
_END: Final[Any] = object()
RECENT_STEPS: Final = 1000
"""Number of recent measured steps whose stages are kept individually: 8 kB per stage."""


@dataclass(frozen=True)
class StageTotal:
    """Seconds of one stage over the measured steps.

    `host_s` is the time that the program spent in the stage. `device_s` is the time between the two ends of the stage
    as the device reached them: `host_s` on a CPU; on a GPU the queued work of the stage plus the idle time in between,
    so that `data_wait` is the real wait. `share` is `host_s` over the wall clock.
    """

    host_s: float
    device_s: float
    share: float


@dataclass(frozen=True)
class ClockSummary:
    """Totals of a clock in seconds; the host seconds of `stages` and `residual_s` add up to `wall_s`.

    `n` measured steps took `wall_s` and trained `images` images. Not included: `warmup_s`, the first steps; `pauses`,
    seconds by name; `unfinished_s`, the time since the last step. `step_s` is the wall clock of each measured step, of
    at most the last 100,000. `recent` has the device seconds of each stage in each of the last `RECENT_STEPS` of them,
    oldest first, 0 if a step had no such stage; `after_pause` says for these steps whether a pause lay in them or just
    before. `starved` is the share of steps at whose optimizer (else at whose end) the GPU had no queued work left: a
    lower bound, and 0 on a CPU. `cpu` are the CPU times of the measured steps, None if unknown. `has_run`
    is False for a clock that is off.
    """

    n: int
    images: int
    wall_s: float
    stages: dict[str, StageTotal]
    warmup_s: float
    pauses: dict[str, float]
    unfinished_s: float
    step_s: tuple[float, ...]
    recent: dict[str, tuple[float, ...]] = field(default_factory=dict)
    after_pause: tuple[bool, ...] = ()
    starved: float = 0.0
    cpu: CpuTimes | None = None
    has_run: bool = True

    @property
    def residual_s(self) -> float:
        """Seconds of measured steps outside of any stage."""
        return self.wall_s - fsum(total.host_s for total in self.stages.values())

    @property
    def excluded_s(self) -> float:
        """Seconds of warm-up steps and pauses."""
        return self.warmup_s + sum(self.pauses.values())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was built: counted, excluded and unfinished."""
        return self.wall_s + self.excluded_s + self.unfinished_s

    def table(self) -> str:
        """Return the summary as lines of text; a line that begins with `=` is the sum of those above.

        Columns: host seconds, device seconds, and the host's share of the wall clock of measured steps.
        """
        rows = [("stage", "host s", "device s", "share"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in each
            ).rstrip()
            for each in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:]])

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for name, total in self.stages.items():
            yield name, f"{total.host_s:.3f}", f"{total.device_s:.3f}", f"{total.share:.1%}"
        yield "residual", f"{self.residual_s:.3f}", "", f"{self.residual_s / self.wall_s if self.wall_s else 0.0:.1%}"
        yield f"= {self.n:,} measured steps", f"{self.wall_s:.3f}", "", f"{1.0 if self.wall_s else 0.0:.1%}"
        yield "warm-up", f"{self.warmup_s:.3f}", "", ""
        for name, seconds in self.pauses.items():
            yield f"pause: {name}", f"{seconds:.3f}", "", ""
        yield "after the last step", f"{self.unfinished_s:.3f}", "", ""
        yield "= wall clock", f"{self.elapsed_s:.3f}", "", ""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of stages: the total over measured steps, and those of each recent step.

    `num_starved` counts the steps that left the device idle.
    """

    total: dict[str, float]
    recent: dict[str, tuple[float, ...]]
    num_starved: int = 0


class DeviceTimer(Protocol):
    """Device-side timer of a clock."""

    def begin(self, stage: str) -> Mark:
        """Return the moment at which the device completes all work that this thread queued before `stage`."""
        ...

    def charge(self, stage: str, start: Mark) -> None:
        """Add the device time since `start` to `stage` of the open step."""
        ...

    def discard_last(self) -> None:
        """Discard the last charge."""
        ...

    def end_step(self, *, counted: bool) -> None:
        """Keep the charges of the open step, or drop them (warm-up)."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has completed all queued work. Never called within a step."""
        ...

    def read_completed(self) -> tuple[dict[str, float], float] | None:
        """Return the seconds by stage, and in all, of the measured steps that the device has completed.

        Never waits; None means that device time is host time.
        """
        ...

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Wait for the device; return its seconds for each stage of `host`."""
        ...


def build_device_timer(device_type: str) -> DeviceTimer:
    """Return the timer for torch's current device of that type; imports torch only for `cuda`."""
    return CudaEventTimer.on_current_device() if device_type == "cuda" else HostOnlyTimer()


def current_device_type(device: Literal["cuda", "cpu", "auto"]) -> str:
    """Return the device type; `auto` is cuda if available. Raise `PacelineError` for a missing device."""
    if device == "cpu":
        return device
    if device not in ("cuda", "auto"):
        raise PacelineError(f"device: {device!r} is not timed (use cuda, cpu or auto)")
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise PacelineError("device: torch sees no cuda device (use cpu or auto)")
    return "cuda" if has_cuda else "cpu"


def seconds_by_stage(stages: Iterable[str], steps: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each of `stages` in each step, 0 if the step has no such stage."""
    kept = tuple(steps)
    return {stage: tuple(step.get(stage, 0.0) for step in kept) for stage in stages}


@final
class HostOnlyTimer:
    """Timer of a device that never runs behind the host: device time is host time."""

    def begin(self, stage: str) -> Mark:
        """Do nothing."""

    def charge(self, stage: str, start: Mark) -> None:
        """Do nothing."""

    def discard_last(self) -> None:
        """Do nothing."""

    def end_step(self, *, counted: bool) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def read_completed(self) -> None:
        """Return None."""

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Return the host's seconds."""
        return host


Event = Any
"""A `torch.cuda.Event(enable_timing=True)`, which is not imported here."""
Span = tuple[str, Event, Event]


@final
class CudaEventTimer:
    """Time stages on a GPU with reusable events; only `synchronize` and `drain` wait for it.

    `new_event` creates an event, `synchronize` waits for the device.
    """

    def __init__(self, new_event: Callable[[], Event], synchronize: Callable[[], None]) -> None:
        self._new_event = new_event
        self._synchronize = synchronize
        self._free: list[Event] = []
        self._step: list[Span] = []
        self._was_idle: bool | None = None  # before the optimizer of this step; None where it was not asked
        self._unread: deque[list[Span]] = deque()
        self._total_s: dict[str, float] = {}
        self._steps_s = 0.0  # from the start of the first stage of a step to the end of its last
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)
        self._num_starved = 0

    @classmethod
    def on_current_device(cls) -> "CudaEventTimer":
        """Return the timer of torch's current CUDA device."""
        import torch

        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.synchronize)

    def begin(self, stage: str) -> Mark:
        """Record an event on the calling thread's current stream."""
        event = self._record()
        if stage == OPTIMIZER and self._was_idle is None and self._step:
            self._was_idle = self._step[-1][2].query()
        return event

    def charge(self, stage: str, start: Mark) -> None:
        """Add the time since `start` to `stage` of the open step."""
        self._step.append((stage, start, self._record()))

    def discard_last(self) -> None:
        """Discard the last charge."""
        self._release([self._step.pop()])

    def end_step(self, *, counted: bool) -> None:
        """Keep or drop the events of the open step, and read the steps that the device has completed."""
        if counted:
            self._num_starved += _is_starved(self._step) if self._was_idle is None else self._was_idle
            self._unread.append(self._step)
            self._step = []
        else:
            self._release(self._step)
            self._step.clear()
        self._was_idle = None
        self._read_finished()

    def synchronize(self) -> None:
        """Wait for the device."""
        self._synchronize()

    def read_completed(self) -> tuple[dict[str, float], float]:
        """Return the seconds by stage, and in all, of the measured steps that the device has completed."""
        self._read_finished()
        return dict(self._total_s), self._steps_s

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Wait for the device once; return its seconds for each stage of `host`."""
        self._synchronize()
        while self._unread:
            self._read_oldest()
        total = {stage: self._total_s.get(stage, 0.0) for stage in host.total}
        return StageSeconds(total, seconds_by_stage(host.total, self._recent), self._num_starved)

    def _record(self) -> Event:
        # Reused: there are as many events as were ever unread at once, as CUDA limits how far the host runs ahead.
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def _read_finished(self) -> None:
        # Steps are read whole and in order; one that is still running blocks the later ones.
        while self._unread and _is_over(self._unread[0]):
            self._read_oldest()

    def _read_oldest(self) -> None:
        spans = self._unread.popleft()
        self._steps_s += spans[0][1].elapsed_time(spans[-1][2]) / 1e3 if spans else 0.0
        step_s: dict[str, float] = {}
        for stage, start, end in spans:
            step_s[stage] = step_s.get(stage, 0.0) + start.elapsed_time(end) / 1e3
        for stage, seconds in step_s.items():
            self._total_s[stage] = self._total_s.get(stage, 0.0) + seconds
        self._recent.append(step_s)
        self._release(spans)

    def _release(self, spans: Iterable[Span]) -> None:
        for _, start, end in spans:
            self._free += (start, end)


def _is_starved(spans: list[Span]) -> bool:
    """Return whether the device has completed a step that has no optimizer stage."""
    # An idle GPU takes microseconds to pass even an empty event, so the last event would never look completed. Use the
    # one before `other`, which queues almost no work.
    for stage, _, end in reversed(spans):
        if stage != OTHER:
            return bool(end.query())
    return False


def _is_over(spans: list[Span]) -> bool:
    # The newest event completes last, so it decides with a single query in most cases.
    return all(end.query() for _, _, end in reversed(spans))


class Clock(Protocol):
    """The interface that a training loop calls. Stages and pauses cannot be nested."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `name`; several in one step add up."""
        ...

    def switch_stage(self, name: str) -> None:
        """Charge the rest of the open stage to `name` instead; do nothing outside of stages.

        A thread that the open stage waits for may call it; on a GPU the current stream of that thread is timed.
        """
        ...

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from `iterable`; waits count as `data_wait`, those for the first batch and for the end as a pause.

        The pause `EPOCH_BOUNDARY` is the start of a loader up to its first batch, and its shutdown.
        """
        ...

    def end_step(self, images: int) -> None:
        """End a step of `images` images, which began at the end of the previous one; pauses are not part of it."""
        ...

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is in no step, but in the row `name` of the pauses."""
        ...

    def pop_shares(self) -> dict[str, float]:
        """Return each stage's share of the measured steps that ended since the last call, 0 to 1, without waiting.

        On a GPU these are shares of the device's time. Empty if no step ended.
        """
        ...

    def drain(self) -> ClockSummary:
        """Wait for the device and return the totals so far, in seconds; timing continues."""
        ...

    @property
    def current_stage(self) -> str:
        """The open stage or pause, or "". Any thread may read it."""
        ...


class _Stage:
    """One stage of one clock, reused."""

    __slots__ = ("_clock", "_device", "_now", "name", "step_s", "total_s")

    def __init__(self, clock: "StageClock", name: str, now: Callable[[], float], device: DeviceTimer) -> None:
        self._clock, self.name, self._now, self._device = clock, name, now, device
        self.step_s = 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        assert clock._open == "", f"{self.name} was entered inside {clock._open}"
        clock._open = self.name
        # The host time is read last here and first in `__exit__`, so the cost of timing falls into the residual.
        clock._charged = self
        clock._device_start = self._device.begin(self.name)
        clock._start_s = self._now()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        clock = self._clock
        charged = clock._charged  # another stage after `switch_stage`
        assert charged is not None
        charged.step_s += self._now() - clock._start_s
        # After an exception do not query the device: it may be the cause, and would hide the first error by a second.
        if kind is None:
            self._device.charge(charged.name, clock._device_start)
        clock._charged = None
        clock._open = ""


class _Pause:
    """One kind of pause of one clock; it waits for the device first, as queued work belongs to the steps."""

    __slots__ = ("_clock", "_device", "_now", "_start_s", "name", "total_s")

    def __init__(self, clock: "StageClock", name: str, now: Callable[[], float], device: DeviceTimer) -> None:
        self._clock, self.name, self._now, self._device = clock, name, now, device
        self.total_s = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        assert clock._open == "", f"{self.name} was entered inside {clock._open}"
        clock._open = self.name
        self._device.synchronize()
        self._start_s = self._now()
        clock._pause_cpu()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._clock._count_cpu()
        self.take(self._now() - self._start_s)
        self._clock._open = ""

    def take(self, seconds: float) -> None:
        """Move `seconds` out of the open step."""
        self.total_s += seconds
        self._clock._step_start_s += seconds
        self._clock._has_paused = True


@final
class StageClock:
    """Time a loop by stage, from the creation of the clock: create it last.

    The first `warmup_steps` steps are timed but not counted. `device` times the device (None: host times), `cpu` counts
    CPU times of measured steps (None: not measured). `now` returns seconds. Without a device a stage costs less than a
    microsecond.
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 0,
        device: DeviceTimer | None = None,
        cpu: CpuTimer | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert warmup_steps >= 0, f"warmup_steps: {warmup_steps}"
        self._warmup_left = warmup_steps
        self._device: DeviceTimer = HostOnlyTimer() if device is None else device
        self._cpu = cpu
        self._now = now
        self._stages: dict[str, _Stage] = {}
        self._pauses: dict[str, _Pause] = {}
        self._open = ""  # name of the open stage or pause
        self._charged: _Stage | None = None  # gets the time since the two moments below
        self._start_s = 0.0
        self._device_start: Any = None
        self._images = 0
        self._num_steps = 0
        self._wall_s = 0.0
        self._warmup_s = 0.0
        self._step_s: deque[float] = deque(maxlen=MAX_STEP_TIMES)
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)
        self._after_pause: deque[bool] = deque(maxlen=RECENT_STEPS)
        self._has_paused = False  # since the last step ended
        self._popped: tuple[dict[str, float], float] = {}, 0.0  # seconds by stage and in all, at the last `pop_shares`
        self._count_cpu()
        # Last, so that the construction is in no step.
        self._step_start_s = now()

    @classmethod
    def for_device(cls, device: Literal["auto", "cuda", "cpu"] = "auto", *, warmup_steps: int = 10) -> "StageClock":
        """Return a clock that also times this device; `auto` is a GPU if torch sees one. Only `cpu` needs no torch.

        Raise `PacelineError` for a missing device.
        """
        return cls(warmup_steps=warmup_steps, device=build_device_timer(current_device_type(device)))

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `name`."""
        return self._stages.get(name) or self._new_stage(name)

    def switch_stage(self, name: str) -> None:
        """Charge the rest of the open stage to `name` instead; do nothing outside of stages."""
        charged = self._charged
        if charged is None:
            return
        # Use one reading for both stages, so that no time between them is lost.
        switched_s = self._now()
        charged.step_s += switched_s - self._start_s
        self._device.charge(charged.name, self._device_start)
        self._charged = self._stages.get(name) or self._new_stage(name)
        self._device_start = self._device.begin(name)
        self._start_s = switched_s
        self._open = name

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from `iterable`; waits count as `data_wait`, those for the first batch and for the end as a pause.

        If the caller leaves the loop early, possibly after an error, the pause does not wait for the device.
        """
        data_wait = self._stages.get(DATA_WAIT) or self._new_stage(DATA_WAIT)
        boundary = self._pauses.get(EPOCH_BOUNDARY) or self._new_pause(EPOCH_BOUNDARY)
        with boundary:
            iterator = iter(iterable)  # starts the workers of a loader
            del iterable
            batch = next(iterator, _END)
        try:
            while batch is not _END:
                yield batch
                before_s = data_wait.step_s
                with data_wait:
                    batch = next(iterator, _END)
                if batch is _END:  # the wait was for the loader's end: move it to the pause
                    boundary.take(data_wait.step_s - before_s)
                    data_wait.step_s = before_s
                    self._device.discard_last()
            self._device.synchronize()
        finally:
            # A loop that is left early may drop this generator at any time, even inside of another stage.
            if self._open == "":
                self._open, start_s = EPOCH_BOUNDARY, self._now()
                self._pause_cpu()
                del iterator  # ends the workers
                self._count_cpu()
                boundary.take(self._now() - start_s)
                self._open = ""

    def end_step(self, images: int) -> None:
        """End a step of `images` images; pauses are not part of it."""
        assert self._open == "", f"a step ended inside {self._open}"
        end_s = self._now()
        wall_s, self._step_start_s = end_s - self._step_start_s, end_s
        counted = self._warmup_left == 0
        if counted:
            self._num_steps += 1
            self._images += images
            self._wall_s += wall_s
            self._step_s.append(wall_s)
            self._recent.append({stage.name: stage.step_s for stage in self._stages.values()})
            self._after_pause.append(self._has_paused)
        else:
            self._warmup_left -= 1
            self._warmup_s += wall_s
            self._count_cpu()
        self._has_paused = False
        for stage in self._stages.values():
            stage.total_s += stage.step_s if counted else 0.0
            stage.step_s = 0.0
        self._device.end_step(counted=counted)

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is in no step, but in the pause `name`."""
        return self._pauses.get(name) or self._new_pause(name)

    def pop_shares(self) -> dict[str, float]:
        """Return each stage's share of the measured steps since the last call."""
        completed = self._device.read_completed()
        if completed is None:
            completed = {name: stage.total_s for name, stage in self._stages.items()}, self._wall_s
        (stages_s, whole_s), (before_s, whole_before_s) = completed, self._popped
        if whole_s <= whole_before_s:
            return {}
        self._popped = completed
        return {
            name: (each_s - before_s.get(name, 0.0)) / (whole_s - whole_before_s) for name, each_s in stages_s.items()
        }

    def drain(self) -> ClockSummary:
        """Wait for the device and return the totals so far, in seconds; timing continues."""
        # Read the clock before waiting for the device, which would count as unfinished time.
        unfinished_s = self._now() - self._step_start_s
        host_s = {name: stage.total_s for name, stage in self._stages.items()}
        device = self._device.drain(StageSeconds(host_s, seconds_by_stage(host_s, self._recent)))
        wall_s, num_steps = self._wall_s, self._num_steps
        return ClockSummary(
            n=num_steps,
            images=self._images,
            wall_s=wall_s,
            stages={
                name: StageTotal(seconds, device.total[name], seconds / wall_s if wall_s else 0.0)
                for name, seconds in host_s.items()
            },
            warmup_s=self._warmup_s,
            pauses={name: pause.total_s for name, pause in self._pauses.items()},
            unfinished_s=unfinished_s,
            step_s=tuple(self._step_s),
            recent=device.recent,
            after_pause=tuple(self._after_pause),
            starved=device.num_starved / num_steps if num_steps else 0.0,
            cpu=self._cpu.read() if self._cpu else None,
        )

    @property
    def current_stage(self) -> str:
        """The open stage or pause, or "". Any thread may read it."""
        return self._open

    def _count_cpu(self) -> None:
        if self._cpu is not None and self._warmup_left == 0:
            self._cpu.resume()

    def _pause_cpu(self) -> None:
        if self._cpu is not None:
            self._cpu.pause()

    def _new_stage(self, name: str) -> _Stage:
        assert name, "a stage has a name"
        return self._stages.setdefault(name, _Stage(self, name, self._now, self._device))

    def _new_pause(self, name: str) -> _Pause:
        return self._pauses.setdefault(name, _Pause(self, name, self._now, self._device))


@final
class NullClock:
    """A clock that is off: the same calls, no measurements, and a summary without steps."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return self._nothing

    def switch_stage(self, name: str) -> None:
        """Charge nothing."""

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Return `iter(iterable)`."""
        return iter(iterable)

    def end_step(self, images: int) -> None:
        """Count nothing."""

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return self._nothing

    def pop_shares(self) -> dict[str, float]:
        """Return no shares (0 to 1)."""
        return {}

    def drain(self) -> ClockSummary:
        """Return a summary without steps: 0 seconds everywhere."""
        return ClockSummary(0, 0, 0.0, {}, 0.0, {}, 0.0, (), has_run=False)

    @property
    def current_stage(self) -> str:
        """Return nothing."""
        return ""


def build_clock(switch: Literal["on", "off"], *, device_type: str, warmup_steps: int) -> Clock:
    """Return the clock for `measure.clock`; on `cuda` it also times the current device."""
    if switch == "off":
        return NullClock()
    return StageClock(warmup_steps=warmup_steps, device=build_device_timer(device_type), cpu=build_cpu_timer())
