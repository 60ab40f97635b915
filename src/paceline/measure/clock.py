"""The clock of a training loop: every second of it belongs to a stage, to `other`, to a pause or to the warm-up.

    clock = StageClock(warmup_steps=10)
    for batch in clock.batches(loader):            # waiting for a batch is the stage `data_wait`
        with clock.stage("forward"):
            ...
        clock.end_step(images=len(batch))
    print(clock.drain().stages)

It times the host; `measure.device` adds the device. It does not know ranks, recipes or units of display.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import fsum
from typing import Final, Literal, Protocol, TypeVar, final

from paceline.measure.device import CudaEvents, DeviceTimer, HostOnly
from paceline.measure.summary import OTHER, ClockSummary, StageTotal

T = TypeVar("T")
DATA_WAIT: Final = "data_wait"
KEPT_STEPS: Final = 100_000  # 3 MB of floats; a longer run has its spread from its last steps


class Clock(Protocol):
    """What a training loop calls. Stages and pauses never nest: entering one inside another is a bug."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return the context that charges its time to `name`; several in one step add up."""
        ...

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from `iterable`, charging the start and every wait, the last too, to `data_wait`."""
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
    def where(self) -> str:
        """The stage or pause that is open, or nothing. Another thread may ask."""
        ...


class _Stage:
    """One stage of one clock, entered again and again. The cost of timing falls outside it, into `other`."""

    __slots__ = ("_clock", "_device", "_device_start", "_now", "_start_s", "name", "step_s", "total_s")

    def __init__(self, clock: "StageClock", name: str, now: Callable[[], float], device: DeviceTimer) -> None:
        self._clock, self.name, self._now, self._device = clock, name, now, device
        self.step_s = 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        assert clock._open == "", f"{self.name} was entered inside {clock._open}"
        clock._open = self.name
        self._device_start = self._device.mark()
        self._start_s = self._now()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.step_s += self._now() - self._start_s
        self._device.charge(self.name, self._device_start)
        self._clock._open = ""


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
        self._device.settle()
        self._start_s = self._now()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        paused_s = self._now() - self._start_s
        self.total_s += paused_s
        self._clock._step_start_s += paused_s
        self._clock._open = ""


@final
class StageClock:
    """Time a loop by stage, from the moment the clock is built: build it last.

    The first `warmup_steps` steps are timed but not counted. `device` says what the device did meanwhile (none:
    what the host did). `now` returns seconds. Without a device a stage costs under a microsecond.
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 0,
        device: DeviceTimer | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert warmup_steps >= 0, f"warmup_steps: {warmup_steps}"
        self._warmup_left = warmup_steps
        self._device: DeviceTimer = HostOnly() if device is None else device
        self._now = now
        self._stages: dict[str, _Stage] = {}
        self._pauses: dict[str, _Pause] = {}
        self._open = ""  # the stage or pause we are inside of
        self._images = 0
        self._num_steps = 0
        self._wall_s = 0.0
        self._warmup_s = 0.0
        self._step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self._step_start_s = now()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return the context that charges its time to `name`; several in one step add up."""
        try:
            return self._stages[name]
        except KeyError:
            assert name not in ("", OTHER), f"{name!r} is not the name of a stage"
            return self._stages.setdefault(name, _Stage(self, name, self._now, self._device))

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from `iterable`, charging the start and every wait, the last too, to `data_wait`."""
        data_wait = self.stage(DATA_WAIT)
        with data_wait:
            iterator = iter(iterable)  # starts the workers of a loader
        while True:
            with data_wait:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def end_step(self, images: int) -> None:
        """Close a step of `images` images: it began where the one before ended, and pauses are not in it."""
        assert self._open == "", f"a step ended inside {self._open}"
        end_s = self._now()
        step_s, self._step_start_s = end_s - self._step_start_s, end_s
        counted = self._warmup_left == 0
        if counted:
            self._num_steps += 1
            self._images += images
            self._wall_s += step_s
            self._step_s.append(step_s)
        else:
            self._warmup_left -= 1
            self._warmup_s += step_s
        for stage in self._stages.values():
            stage.total_s += stage.step_s if counted else 0.0
            stage.step_s = 0.0
        self._device.end_step(counted=counted)

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return the context whose time is in no step but in the row `name` of the pauses."""
        try:
            return self._pauses[name]
        except KeyError:
            return self._pauses.setdefault(name, _Pause(self, name, self._now, self._device))

    def drain(self) -> ClockSummary:
        """Return the totals so far, in seconds; waits for the device. The clock goes on."""
        unfinished_s = self._now() - self._step_start_s
        host_s = {name: stage.total_s for name, stage in self._stages.items()}
        device_s = self._device.drain(host_s)
        host_s[OTHER] = self._wall_s - fsum(host_s.values())
        # A GPU's steps may begin and end a little later than the host's, hence the floor.
        device_s[OTHER] = max(0.0, self._wall_s - fsum(device_s.values()))
        share = {name: seconds / self._wall_s if self._wall_s else 0.0 for name, seconds in host_s.items()}
        return ClockSummary(
            n=self._num_steps,
            images=self._images,
            wall_s=self._wall_s,
            stages={name: StageTotal(host_s[name], device_s[name], share[name]) for name in host_s},
            warmup_s=self._warmup_s,
            pauses={name: pause.total_s for name, pause in self._pauses.items()},
            unfinished_s=unfinished_s,
            step_s=tuple(self._step_s),
        )

    @property
    def where(self) -> str:
        """The stage or pause that is open, or nothing. Another thread may ask."""
        return self._open


@final
class NullClock:
    """The clock that is off: the same calls, nothing measured, and a summary of no steps."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return self._nothing

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
        return ClockSummary(0, 0, 0.0, {}, 0.0, {}, 0.0, ())

    @property
    def where(self) -> str:
        """Return nothing."""
        return ""


def build_clock(switch: Literal["on", "off"], *, device_type: str, warmup_steps: int) -> Clock:
    """Return the clock that `measure.clock` asks for; on `cuda` it times the current device too."""
    if switch == "off":
        return NullClock()
    device = CudaEvents.on_current_device() if device_type == "cuda" else HostOnly()
    return StageClock(warmup_steps=warmup_steps, device=device)
