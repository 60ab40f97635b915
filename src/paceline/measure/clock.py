"""The stage clock: attribute every second of a run to a stage, on the host and on the device, without synchronizing.

`StageClock` is public: it works in anyone's training loop, and needs no torch.
"""

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
from paceline.measure.cpu import CpuTimer, CpuTimes, NoCpuTimer, build_cpu_timer

RECENT_STEPS: Final = 1000
"""Last counted steps whose stages are kept one by one: 8 kB a stage."""


@dataclass(frozen=True)
class StageTotal:
    """Seconds of one stage over the counted steps.

    `host_s` is the time the program spent in the stage. `device_s` is the time between the stage's two ends as
    the device reached them: equal to `host_s` on a CPU; on a GPU the work the stage queued, plus what the GPU
    idled in between, so that `data_wait` is what it really waited. `share` is `host_s` over the wall clock.
    """

    host_s: float
    device_s: float
    share: float


@dataclass(frozen=True)
class ClockSummary:
    """Totals of a clock, in seconds; the host seconds of `stages` and `residual_s` add up to `wall_s`.

    `n` counted steps took `wall_s` and trained `images` images, as told to `end_step`. Left out of them:
    `warmup_s`, the first steps; `pauses`, seconds by name; `unfinished_s`, what follows the last step and belongs to
    none. `step_s` is the wall clock of each counted step, of the last 100,000 when there are more. `recent` has
    the device seconds of each stage in each of the last `RECENT_STEPS` counted steps, oldest first, 0 where a step
    had no such stage, and `after_pause` says of the same steps whether a pause lay in them or since the step before:
    what ranks wait for one another there may be for the pause. `starved` is the share of counted steps before whose
    optimizer (at whose end, in a loop without such a stage) a GPU had already done all that they queued, so that it
    waits for the host; a lower bound, as a GPU takes microseconds to say so. A CPU is never starved. `cpu` are the CPU
    times of the counted steps, None where they are not known. `has_run` is False where the clock is off.
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
        """Seconds of counted steps that no stage covers."""
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
        """Return where every second went, as lines of text; one that begins with `=` sums up those above it.

        Columns are host seconds, device seconds, and the host's share of the counted steps' wall clock.
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
        yield f"= {self.n:,} counted steps", f"{self.wall_s:.3f}", "", f"{1.0 if self.wall_s else 0.0:.1%}"
        yield "warm-up", f"{self.warmup_s:.3f}", "", ""
        for name, seconds in self.pauses.items():
            yield f"pause: {name}", f"{seconds:.3f}", "", ""
        yield "after the last step", f"{self.unfinished_s:.3f}", "", ""
        yield "= wall clock", f"{self.elapsed_s:.3f}", "", ""


Mark = Any
"""A moment on the device; only the timer that made it knows its type."""
OPTIMIZER: Final = "optimizer"
"""The stage at whose beginning a GPU is asked whether it is idle: a loop that looks at losses does so after it."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of stages: all counted steps together, each of the last of them, and how many left a device idle."""

    total: dict[str, float]
    recent: dict[str, tuple[float, ...]]
    num_starved: int = 0


class DeviceTimer(Protocol):
    """The device's half of a clock."""

    def begin(self, stage: str) -> Mark:
        """Return the moment at which the device will have done all that this thread queued before `stage`."""
        ...

    def charge(self, stage: str, start: Mark) -> None:
        """Add the device's time from `start` to this moment to `stage`, in the step that is open."""
        ...

    def discard_step(self) -> None:
        """Take the last charge back."""
        ...

    def end_step(self, *, counted: bool) -> None:
        """Keep what the open step charged, or drop it (warm-up)."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what was queued. Never called on a step."""
        ...

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Wait for the device; return its seconds of each stage of `host`, which has the host's."""
        ...


def build_device_timer(device_type: str) -> DeviceTimer:
    """Return the timer of torch's current device of that type; torch is imported for `cuda` alone."""
    return CudaEventTimer.on_current_device() if device_type == "cuda" else HostOnlyTimer()


def current_device_type(device: Literal["cuda", "cpu", "auto"]) -> str:
    """Return the type of device: for `auto` cuda where there is one. Raise `PacelineError` for what is not there."""
    if device == "cpu":
        return device
    if device not in ("cuda", "auto"):
        raise PacelineError(f"device: {device!r} is not timed (use cuda, cpu or auto)")
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise PacelineError("device: torch sees no cuda device (use cpu or auto)")
    return "cuda" if has_cuda else "cpu"


def mean_by_stage(stages: Iterable[str], steps: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each of `stages` in each of `steps`, 0 where a step had no such stage."""
    kept = tuple(steps)
    return {stage: tuple(step.get(stage, 0.0) for step in kept) for stage in stages}


@final
class HostOnlyTimer:
    """The timer of a device that never runs behind the host: device time is host time, and nothing is kept."""

    def begin(self, stage: str) -> Mark:
        """Return nothing: host time is enough."""

    def charge(self, stage: str, start: Mark) -> None:
        """Keep nothing."""

    def discard_step(self) -> None:
        """Take nothing back."""

    def end_step(self, *, counted: bool) -> None:
        """Keep nothing."""

    def synchronize(self) -> None:
        """Return at once."""

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Return `host`."""
        return host


class Event(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Mark the end of what is queued on the calling thread's current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the mark, without waiting for it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to `end_event`; both must have been reached."""
        ...


Span = tuple[str, Event, Event]


@final
class CudaEventTimer:
    """Time stages on a GPU with events that are reused; only `synchronize` and `drain` wait for it.

    `new_event` makes an event, `synchronize` waits for the device. As many events exist as were ever unread at
    once, and CUDA bounds how far a host may run ahead of its GPU. Steps are read whole and in order.
    """

    def __init__(self, new_event: Callable[[], Event], synchronize: Callable[[], None]) -> None:
        self._new_event = new_event
        self._synchronize = synchronize
        self._free: list[Event] = []
        self._step: list[Span] = []
        self._was_idle: bool | None = None  # before the optimizer of this step; None where it was not asked
        self._unread: deque[list[Span]] = deque()
        self._total_s: dict[str, float] = {}
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)
        self._num_starved = 0

    @classmethod
    def on_current_device(cls) -> "CudaEventTimer":
        """Return the timer of torch's current CUDA device."""
        import torch

        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.synchronize)

    def begin(self, stage: str) -> Mark:
        """Record an event on the calling thread's current stream and return it."""
        event = self._record()
        if stage == OPTIMIZER and self._was_idle is None and self._step:
            self._was_idle = self._step[-1][2].query()
        return event

    def charge(self, stage: str, start: Mark) -> None:
        """Add the time from `start` to what is queued by now to `stage`, in the step that is open."""
        self._step.append((stage, start, self._record()))

    def discard_step(self) -> None:
        """Take the last charge of the open step back."""
        self._release([self._step.pop()])

    def end_step(self, *, counted: bool) -> None:
        """Keep or drop the events of the open step, and read the steps that the device has passed."""
        if counted:
            self._num_starved += _is_starved(self._step) if self._was_idle is None else self._was_idle
            self._unread.append(self._step)
            self._step = []
        else:
            self._release(self._step)
            self._step.clear()
        self._was_idle = None
        while self._unread and _is_over(self._unread[0]):
            self._read_oldest()

    def synchronize(self) -> None:
        """Wait until the device has done what was queued."""
        self._synchronize()

    def drain(self, host: StageSeconds) -> StageSeconds:
        """Wait for the device once, and return the seconds of each stage that `host` has."""
        self._synchronize()
        while self._unread:
            self._read_oldest()
        total = {stage: self._total_s.get(stage, 0.0) for stage in host.total}
        return StageSeconds(total, mean_by_stage(host.total, self._recent), self._num_starved)

    def _record(self) -> Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def _read_oldest(self) -> None:
        spans = self._unread.popleft()
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
    """Return whether the device is done with a step without an optimizer's stage that ends now.

    An idle GPU takes microseconds to pass even an event with nothing before it, so the one that is asked is not that
    which was recorded last, at the end of `other`, but that before: `other` queues no work to speak of.
    """
    for stage, _, end in reversed(spans):
        if stage != OTHER:
            return end.query()
    return False


def _is_over(spans: list[Span]) -> bool:
    """Return whether the device has passed a step; the newest event is asked first, as it is the last to be."""
    return all(end.query() for _, _, end in reversed(spans))


__all__ = ["EPOCH_BOUNDARY", "Clock", "NullClock", "StageClock", "build_clock"]

T = TypeVar("T")
MAX_STEP_TIMES: Final = 100_000  # 3 MB of floats; a longer run has its spread from its last steps
_END: Final[Any] = object()


class Clock(Protocol):
    """What a training loop calls. Stages and pauses never nest: entering one inside another is a bug."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return the context that charges its time to `name`; several in one step add up."""
        ...

    def switch_stage(self, name: str) -> None:
        """Charge the rest of the stage that is open to `name` instead; outside of stages do nothing.

        A thread that the open stage waits for may call it: on a GPU it is its current stream that is asked.
        """
        ...

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from `iterable`, charging waits to `data_wait`, and those for the first and for the end to a pause.

        In the pause `EPOCH_BOUNDARY` a loader starts, its first batch included, or finds out that it has no more, and
        is dropped.
        """
        ...

    def end_step(self, images: int) -> None:
        """Close a step of `images` images: it began where the one before ended, and pauses are not in it."""
        ...

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return the context whose time is in no step but in the row `name` of the pauses."""
        ...

    def drain(self) -> ClockSummary:
        """Return the totals so far, in seconds; waits for the device. The clock goes on."""
        ...

    @property
    def current_stage(self) -> str:
        """The stage or pause that is open, or nothing. Another thread may ask."""
        ...


class _Stage:
    """One stage of one clock, entered again and again. The cost of timing falls outside it, into the residual.

    Where it is left by an error the device is not asked: it may be what failed, and would fail again over the error.
    """

    __slots__ = ("_clock", "_device", "_now", "name", "step_s", "total_s")

    def __init__(self, clock: "StageClock", name: str, now: Callable[[], float], device: DeviceTimer) -> None:
        self._clock, self.name, self._now, self._device = clock, name, now, device
        self.step_s = 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        assert clock._open == "", f"{self.name} was entered inside {clock._open}"
        clock._open = self.name
        clock._charged = self
        clock._device_start = self._device.begin(self.name)
        clock._start_s = self._now()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        clock = self._clock
        charged = clock._charged  # this stage, unless the clock was turned
        assert charged is not None
        charged.step_s += self._now() - clock._start_s
        if kind is None:
            self._device.charge(charged.name, clock._device_start)
        clock._charged = None
        clock._open = ""


class _Pause:
    """One kind of pause of one clock. Queued work belongs to the steps, so the device settles first."""

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
        clock._cpu.pause()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._clock._count_cpu()
        self.take(self._now() - self._start_s)
        self._clock._open = ""

    def take(self, seconds: float) -> None:
        """Take `seconds` out of the open step."""
        self.total_s += seconds
        self._clock._step_start_s += seconds
        self._clock._has_paused = True


@final
class StageClock:
    """Time a loop by stage, from the moment the clock is built: build it last.

    The first `warmup_steps` steps are timed but not counted. `device` says what the device did meanwhile (none:
    what the host did), and `cpu` counts CPU times while steps are counted (none: it is not known who had the cores).
    `now` returns seconds. Without a device a stage costs under a microsecond.
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
        self._cpu: CpuTimer = NoCpuTimer() if cpu is None else cpu
        self._now = now
        self._stages: dict[str, _Stage] = {}
        self._pauses: dict[str, _Pause] = {}
        self._open = ""  # the stage or pause we are inside of
        self._charged: _Stage | None = None  # the stage, from these two moments on
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
        self._count_cpu()
        self._step_start_s = now()

    @classmethod
    def for_device(cls, device: Literal["auto", "cuda", "cpu"] = "auto", *, warmup_steps: int = 10) -> "StageClock":
        """Return a clock that times this device too; `auto`: a GPU where torch sees one. Only `cpu` needs no torch.

        Raise `PacelineError` for a device that is not there.
        """
        return cls(warmup_steps=warmup_steps, device=build_device_timer(current_device_type(device)))

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return the context that charges its time to `name`; several in one step add up."""
        return self._stages.get(name) or self._new_stage(name)

    def switch_stage(self, name: str) -> None:
        """Charge the rest of the stage that is open to `name` instead; outside of stages do nothing."""
        charged = self._charged
        if charged is None:
            return
        turned_s = self._now()
        charged.step_s += turned_s - self._start_s
        self._device.charge(charged.name, self._device_start)
        self._charged = self._stages.get(name) or self._new_stage(name)
        self._device_start = self._device.begin(name)
        self._start_s = turned_s
        self._open = name

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from `iterable`, charging waits to `data_wait`, and those for the first and for the end to a pause.

        A loop that is left may be so by an error, and be this rank's last: then the pause waits for no device.
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
                if batch is _END:  # it was no wait for a batch
                    boundary.take(data_wait.step_s - before_s)
                    data_wait.step_s = before_s
                    self._device.discard_step()
            self._device.synchronize()
        finally:
            if self._open == "":  # a loop that is left early may drop this generator anywhere
                self._open, start_s = EPOCH_BOUNDARY, self._now()
                self._cpu.pause()
                del iterator  # ends the workers
                self._count_cpu()
                boundary.take(self._now() - start_s)
                self._open = ""

    def end_step(self, images: int) -> None:
        """Close a step of `images` images: it began where the one before ended, and pauses are not in it."""
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
        """Return the context whose time is in no step but in the row `name` of the pauses."""
        return self._pauses.get(name) or self._new_pause(name)

    def drain(self) -> ClockSummary:
        """Return the totals so far, in seconds; waits for the device. The clock goes on."""
        unfinished_s = self._now() - self._step_start_s
        host_s = {name: stage.total_s for name, stage in self._stages.items()}
        device = self._device.drain(StageSeconds(host_s, mean_by_stage(host_s, self._recent)))
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
            cpu=self._cpu.read(),
        )

    @property
    def current_stage(self) -> str:
        """The stage or pause that is open, or nothing. Another thread may ask."""
        return self._open

    def _count_cpu(self) -> None:
        """Count CPU times from now on, once the warm-up is over."""
        if self._warmup_left == 0:
            self._cpu.resume()

    def _new_stage(self, name: str) -> _Stage:
        assert name, "a stage has a name"
        return self._stages.setdefault(name, _Stage(self, name, self._now, self._device))

    def _new_pause(self, name: str) -> _Pause:
        return self._pauses.setdefault(name, _Pause(self, name, self._now, self._device))


@final
class NullClock:
    """The clock that is off: the same calls, nothing measured, and a summary of no steps."""

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

    def drain(self) -> ClockSummary:
        """Return the summary of no steps: 0 seconds everywhere."""
        return ClockSummary(0, 0, 0.0, {}, 0.0, {}, 0.0, (), has_run=False)

    @property
    def current_stage(self) -> str:
        """Return nothing."""
        return ""


def build_clock(switch: Literal["on", "off"], *, device_type: str, warmup_steps: int) -> Clock:
    """Return the clock that `measure.clock` asks for; on `cuda` it times the current device too."""
    if switch == "off":
        return NullClock()
    return StageClock(warmup_steps=warmup_steps, device=build_device_timer(device_type), cpu=build_cpu_timer())
