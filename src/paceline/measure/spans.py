"""Show a clock's stages to a profiler: whatever opens a stage on the clock opens a span of the same name there.

    spans = NvtxSpans(warmup_steps=10)
    clock = SpannedClock(StageClock.for_device("cuda"), spans)     # use it as ever
    ...
    spans.finish()

Spans are opened before the clock is started and closed after it is stopped, so that their cost is in no stage.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar, final

from paceline.core.errors import RecipeError
from paceline.core.stages import DATA_WAIT, EPOCH_BOUNDARY, TRACE
from paceline.measure.clock import Clock
from paceline.measure.summary import ClockSummary

T = TypeVar("T")
CAPTURE_RANGE: Final = "PROFILE"
"""What Nsight Systems waits for with `--capture-range=nvtx --nvtx-capture=PROFILE`. Torch's names are not registered
with NVTX, so nsys needs NSYS_NVTX_PROFILER_REGISTER_ONLY=0 in its environment too."""


class ProfilerMarks(Protocol):
    """A profiler's view of a loop: at most one span is open, and steps follow one another."""

    def open(self, name: str) -> None:
        """Open a span."""
        ...

    def switch_stage(self, name: str) -> None:
        """Close the span that is open and open another one; another thread than that of `open` may call it."""
        ...

    def close(self) -> None:
        """Close the span that is open."""
        ...

    @property
    def is_switching(self) -> bool:
        """Whether `end_step`, if it is called now, takes long: the recording begins there, or ends."""
        ...

    def end_step(self) -> None:
        """Close a step; the next one begins."""
        ...

    def finish(self) -> None:
        """Leave the profiler as it was found, whatever is open. Nothing else is called any more."""
        ...


def require_nvtx() -> None:
    """Raise `RecipeError` where torch cannot mark ranges."""
    from torch.cuda import nvtx

    mark: Any = nvtx
    try:
        mark.range_push("paceline")
    except RuntimeError:
        raise RecipeError("measure.nvtx: on needs torch with CUDA (set measure.nvtx=off)") from None
    mark.range_pop()


@final
class NvtxMarks:
    """Mark steps and stages as NVTX ranges, and all after the warm-up as the range `PROFILE`.

    Ranges of stages are started and ended rather than pushed and popped, since those end where they began: in the
    thread. It needs a CUDA build of torch, but no GPU. Without Nsight a range costs under a microsecond. With
    `marks_ops` torch marks each of its operations from the beginning of `PROFILE` on, which slows steps down.
    """

    def __init__(self, warmup_steps: int, *, marks_ops: bool = False) -> None:
        from torch.autograd import profiler
        from torch.cuda import nvtx

        torch_profiler: Any = profiler
        self._nvtx: Any = nvtx
        self._ops = torch_profiler.emit_nvtx(enabled=marks_ops)
        self._warmup_left = warmup_steps
        self._num_steps = 0
        self._stage: Any = None
        require_nvtx()
        self._begin_capture()
        self._step = self._nvtx.range_start("step 0")

    def open(self, name: str) -> None:
        """Start a range."""
        self._stage = self._nvtx.range_start(name)

    def switch_stage(self, name: str) -> None:
        """End the range that is open and start another."""
        self.close()
        self.open(name)

    def close(self) -> None:
        """End the range that is open."""
        self._nvtx.range_end(self._stage)

    @property
    def is_switching(self) -> bool:
        """Whether Nsight begins to record after this step."""
        return self._warmup_left == 1

    def end_step(self) -> None:
        """End the range of the step and start that of the next."""
        self._nvtx.range_end(self._step)
        self._num_steps += 1
        self._warmup_left -= 1
        self._begin_capture()
        self._step = self._nvtx.range_start(f"step {self._num_steps}")

    def finish(self) -> None:
        """End the ranges of the step and of all that is captured."""
        self._nvtx.range_end(self._step)
        if self._warmup_left <= 0:
            self._ops.__exit__(None, None, None)
            self._nvtx.range_pop()

    def _begin_capture(self) -> None:
        if self._warmup_left == 0:
            self._nvtx.range_push(CAPTURE_RANGE)
            self._ops.__enter__()


class _MarkedStage:
    """A stage or pause of a clock, with a span around it."""

    __slots__ = ("_inner", "_name", "_spans")

    def __init__(self, name: str, inner: AbstractContextManager[None], spans: ProfilerMarks) -> None:
        self._name, self._inner, self._spans = name, inner, spans

    def __enter__(self) -> None:
        self._spans.open(self._name)
        self._inner.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._inner.__exit__(kind, error, trace)
        self._spans.close()


@final
class MarkedClock:
    """Wrap a clock so that each stage, pause and turn of it is a span too.

    The last wait of an epoch is a span `data_wait`: nobody knows before that it is the last. A pause `trace` is added
    to the clock's: the seconds in which recording begins and ends.
    """

    def __init__(self, clock: Clock, spans: ProfilerMarks) -> None:
        self._clock = clock
        self._spans = spans
        self._stages: dict[str, _MarkedStage] = {}
        self._pauses: dict[str, _MarkedStage] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return the clock's context, with a span around it."""
        return self._stages.get(name) or self._stages.setdefault(
            name, _MarkedStage(name, self._clock.stage(name), self._spans)
        )

    def switch_stage(self, name: str) -> None:
        """Turn the clock, and the span with it when a stage is open."""
        if self._clock.current_stage in self._stages:
            self._clock.switch_stage(name)
            self.stage(name)  # so that it may be turned again
            self._spans.switch_stage(name)

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from the clock's batches, with a span around each wait."""
        self.stage(DATA_WAIT)
        batches = self._clock.batches(iterable)
        del iterable
        name = EPOCH_BOUNDARY
        while True:
            self._spans.open(name)
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._spans.close()
            yield batch
            name = DATA_WAIT

    def end_step(self, images: int) -> None:
        """Close a step of both."""
        self._clock.end_step(images)
        if self._spans.is_switching:
            with self._clock.paused(TRACE):
                self._spans.end_step()
        else:
            self._spans.end_step()

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return the clock's context, with a span around it."""
        return self._pauses.get(name) or self._pauses.setdefault(
            name, _MarkedStage(name, self._clock.paused(name), self._spans)
        )

    def drain(self) -> ClockSummary:
        """Return the clock's totals; spans stay as they are."""
        return self._clock.drain()

    @property
    def current_stage(self) -> str:
        """The stage or pause that is open, or nothing. Another thread may ask."""
        return self._clock.current_stage
