"""The clock of a training loop: every second of it belongs to a stage, to the residual, to a pause or to the warm-up.

    clock = StageClock.for_device("auto")          # on a GPU it times what the GPU does, too, and never waits for it
    for batch in clock.batches(loader):            # waiting for a batch is the stage `data_wait`
        with clock.stage("forward"):
            ...
        clock.end_step(images=len(batch))
    print(clock.drain().table())

It works in anyone's loop, and without torch. It times the host; `measure.device` adds the device. It does not know
ranks, recipes or units of display.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, Protocol, TypeVar, final

from paceline.core.stages import DATA_WAIT, EPOCH_BOUNDARY
from paceline.measure.contention import CpuTimer, NoCpuTimer, build_cpu_timer
from paceline.measure.device import (
    DeviceTimer,
    HostOnlyTimer,
    StageSeconds,
    build_device_timer,
    current_device_type,
    mean_by_stage,
)
from paceline.measure.summary import RECENT_STEPS, ClockSummary, StageTotal

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
