"""Mark stages for profilers: NVTX ranges for Nsight Systems, and traces of torch.profiler."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, final

from paceline.core.errors import RecipeError
from paceline.core.files import make_folder
from paceline.core.stages import DATA_WAIT, EPOCH_BOUNDARY, TRACE
from paceline.measure.chrome_trace import MARK, merge_traces, rewrite_trace, stage_switch_mark, trace_totals
from paceline.measure.clock import Clock, ClockSummary

__all__ = ["TraceMarks", "merge_traces", "trace_totals"]

T = TypeVar("T")
PROFILER_WARMUP_STEPS: Final = 2
"""Steps that the profiler discards first: its first events allocate buffers and start GPU tracing."""
CAPTURE_RANGE: Final = "PROFILE"
"""Nsight Systems waits for this range with `--capture-range=nvtx --nvtx-capture=PROFILE`. Torch does not register its
names with NVTX, so nsys also needs NSYS_NVTX_PROFILER_REGISTER_ONLY=0 in its environment.
"""


class ProfilerMarks(Protocol):
    """A profiler's view of a loop: at most one span is open, and steps follow one another."""

    def open(self, name: str) -> None:
        """Open a span."""
        ...

    def switch_stage(self, name: str) -> None:
        """Close the open span and open another; a thread other than that of `open` may call it."""
        ...

    def close(self) -> None:
        """Close the open span."""
        ...

    @property
    def is_switching(self) -> bool:
        """Whether `end_step` takes long if called now, because recording starts or ends."""
        ...

    def end_step(self) -> None:
        """End a step; the next one begins."""
        ...

    def finish(self) -> None:
        """Close everything that is open. No other call follows."""
        ...


def require_nvtx() -> None:
    """Raise `RecipeError` if torch cannot mark NVTX ranges."""
    from torch.cuda import nvtx

    mark: Any = nvtx
    try:
        mark.range_push("paceline")
    except RuntimeError:
        raise RecipeError("measure.nvtx: on needs torch with CUDA (set measure.nvtx=off)") from None
    mark.range_pop()


@final
class NvtxMarks:
    """Mark steps and stages as NVTX ranges, and everything after the warm-up as the range `PROFILE`.

    Needs a CUDA build of torch, but no GPU. Without Nsight a range costs less than a microsecond. With `marks_ops`
    torch marks each operation from the start of `PROFILE`, which slows steps down.
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
        # Start and end, not push and pop: a popped range must end in the thread where it began.
        self._stage = self._nvtx.range_start(name)

    def switch_stage(self, name: str) -> None:
        """End the open range and start another."""
        self.close()
        self.open(name)

    def close(self) -> None:
        """End the open range."""
        self._nvtx.range_end(self._stage)

    @property
    def is_switching(self) -> bool:
        """Whether Nsight starts recording after this step."""
        return self._warmup_left == 1

    def end_step(self) -> None:
        """End the range of the step and start the next."""
        self._nvtx.range_end(self._step)
        self._num_steps += 1
        self._warmup_left -= 1
        self._begin_capture()
        self._step = self._nvtx.range_start(f"step {self._num_steps}")

    def finish(self) -> None:
        """End the ranges of the step and of the capture."""
        self._nvtx.range_end(self._step)
        if self._warmup_left <= 0:
            self._ops.__exit__(None, None, None)
            self._nvtx.range_pop()

    def _begin_capture(self) -> None:
        if self._warmup_left == 0:
            self._nvtx.range_push(CAPTURE_RANGE)
            self._ops.__enter__()


class _MarkedStage:
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
    """Wrap a clock so that each of its stages, pauses and switches is also a span.

    The last wait of an epoch is a span `data_wait`, as only its end shows that it is the last. The time to start and
    stop recording is an additional pause `trace`.
    """

    def __init__(self, clock: Clock, spans: ProfilerMarks) -> None:
        self._clock = clock
        self._spans = spans
        self._stages: dict[str, _MarkedStage] = {}
        self._pauses: dict[str, _MarkedStage] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return the clock's context inside a span."""
        return self._stages.get(name) or self._stages.setdefault(
            name, _MarkedStage(name, self._clock.stage(name), self._spans)
        )

    def switch_stage(self, name: str) -> None:
        """Switch the stage of the clock, and the span if a stage is open."""
        if self._clock.current_stage in self._stages:
            self._clock.switch_stage(name)
            self.stage(name)  # register it, so that it can be switched again
            self._spans.switch_stage(name)

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield the clock's batches, with a span around each wait."""
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
        """End a step of both."""
        self._clock.end_step(images)
        if self._spans.is_switching:
            with self._clock.paused(TRACE):
                self._spans.end_step()
        else:
            self._spans.end_step()

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return the clock's context inside a span."""
        return self._pauses.get(name) or self._pauses.setdefault(
            name, _MarkedStage(name, self._clock.paused(name), self._spans)
        )

    def pop_shares(self) -> dict[str, float]:
        """Return the clock's shares, 0 to 1."""
        return self._clock.pop_shares()

    def drain(self) -> ClockSummary:
        """Return the clock's totals; spans are unchanged."""
        return self._clock.drain()

    @property
    def current_stage(self) -> str:
        """The open stage or pause, or "". Any thread may read it."""
        return self._clock.current_stage


@final
class TraceMarks:
    """Trace `num_steps` steps from `first_step` on, counted from 0 in this process, and write them to `path`.

    `steps` are those traced, later than requested if the profiler has no time to warm up. If the loop ends early, the
    completed steps are written. A file that cannot be written is a warning to `warn`. CPU and CUDA events are recorded;
    no shapes, no stacks.
    """

    def __init__(
        self,
        path: Path,
        *,
        first_step: int,
        num_steps: int,
        rank: int,
        world_size: int,
        warn: Callable[[str], None],
    ) -> None:
        from torch.cuda import is_available
        from torch.profiler import ProfilerActivity, profile, record_function, schedule

        first_step = max(first_step, PROFILER_WARMUP_STEPS)
        self.steps = range(first_step, first_step + num_steps)
        self._path, self._rank, self._world_size, self._warn = path, rank, world_size, warn
        self._warming = first_step - PROFILER_WARMUP_STEPS
        self._num_steps = 0
        self._record: Any = record_function
        self._span: Any = None
        self._running = ExitStack()
        self._profiler = self._running.enter_context(
            profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_available() else [])],
                schedule=schedule(
                    skip_first=self._warming, wait=0, warmup=PROFILER_WARMUP_STEPS, active=num_steps, repeat=1
                ),
                on_trace_ready=self._write,
                acc_events=True,  # torch warns without it, although there is only one cycle
            )
        )

    def open(self, name: str) -> None:
        """Open a range while the profiler runs."""
        if self._is_running:
            self._span = self._record(MARK + name)
            self._span.__enter__()

    def switch_stage(self, name: str) -> None:
        """Leave a mark that divides the open range when the trace is written."""
        # The range itself stays open: it belongs to its thread, and hooks that switch stages run inside torch's ranges.
        if self._is_running:
            with self._record(stage_switch_mark(name)):
                pass

    def close(self) -> None:
        """Close the open range."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    @property
    def is_switching(self) -> bool:
        """Whether the profiler starts to warm up, starts to record, or ends after this step."""
        return self._num_steps + 1 in (self._warming, self.steps.start, self.steps.stop)

    def end_step(self) -> None:
        """Advance the profiler; after the last traced step, write the file."""
        self._num_steps += 1
        if self._num_steps < self.steps.stop:
            self._profiler.step()
        else:
            self.finish()

    def finish(self) -> None:
        """End the profiler, and write the recording unless it has been written."""
        self._running.close()

    @property
    def _is_running(self) -> bool:
        return self._warming <= self._num_steps < self.steps.stop

    def _write(self, profiler: Any) -> None:
        if self._num_steps <= self.steps.start:
            return
        try:
            # Record elsewhere: readers of the trace folder must not see Kineto's raw file.
            with tempfile.TemporaryDirectory() as folder:
                recorded = Path(folder) / "recorded.json"
                profiler.export_chrome_trace(str(recorded))
                make_folder(self._path.parent, parents=True)
                rewrite_trace(recorded, self._path, rank=self._rank, world_size=self._world_size, stop=self._num_steps)
        except (OSError, EOFError, ValueError, KeyError) as error:
            what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._warn(f"{self._path}: the trace cannot be written: {what} (make room for the next one)")
