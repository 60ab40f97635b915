"""Record some steps of a loop as a Chrome trace, by torch's profiler, with the clock's stages in a row of their own.

One file a rank, `rank0.json.gz` and so on; a folder of them is what HolisticTraceAnalysis and TraceLens read, and each
of them opens in Perfetto. `measure.chrome` has the format, and puts the ranks on one time axis.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, final

from paceline.core.files import make_folder
from paceline.measure.chrome import MARK, merge_traces, rewrite_trace, stage_switch_mark, trace_totals

__all__ = ["TraceMarks", "merge_traces", "trace_totals"]

PROFILER_WARMUP_STEPS: Final = 2
"""Steps that the profiler runs before those it keeps: its first events allocate buffers and start the GPU's tracing."""


@final
class TraceMarks:
    """Trace `num_steps` steps from step `first_step` on, counted from 0 in this process, and write them to `path`.

    `steps` are those that are traced: they begin later than asked for when there is no time for the profiler to warm
    up. A loop that ends meanwhile leaves the steps that it completed; one that ends before leaves no file. A file that
    cannot be written is a warning: `warn` is told. CPU events are recorded, and CUDA's where there is a GPU; no
    shapes, no stacks.
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
                acc_events=True,  # there is one cycle; without it torch warns that it would forget earlier ones
            )
        )

    def open(self, name: str) -> None:
        """Open a range while the profiler runs."""
        if self._is_running:
            self._span = self._record(MARK + name)
            self._span.__enter__()

    def switch_stage(self, name: str) -> None:
        """Leave a mark at which the open range is divided when the trace is written.

        The range itself stays open: it belongs to its thread, and hooks that turn run inside of ranges of torch.
        """
        if self._is_running:
            with self._record(stage_switch_mark(name)):
                pass

    def close(self) -> None:
        """Close the range that is open."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    @property
    def is_switching(self) -> bool:
        """Whether the profiler starts to warm up, starts to record, or ends after this step."""
        return self._num_steps + 1 in (self._warming, self.steps.start, self.steps.stop)

    def end_step(self) -> None:
        """Tell the profiler; after the last step that is traced, write the file."""
        self._num_steps += 1
        if self._num_steps < self.steps.stop:
            self._profiler.step()
        else:
            self.finish()

    def finish(self) -> None:
        """End the profiler. What was recorded is written unless it has been."""
        self._running.close()

    @property
    def _is_running(self) -> bool:
        return self._warming <= self._num_steps < self.steps.stop

    def _write(self, profiler: Any) -> None:
        """Write what the profiler has recorded, by way of a folder that no reader of traces looks into."""
        if self._num_steps <= self.steps.start:
            return
        try:
            with tempfile.TemporaryDirectory() as folder:
                recorded = Path(folder) / "recorded.json"
                profiler.export_chrome_trace(str(recorded))
                make_folder(self._path.parent, parents=True)
                rewrite_trace(recorded, self._path, rank=self._rank, world_size=self._world_size, stop=self._num_steps)
        except (OSError, EOFError, ValueError, KeyError) as error:
            what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._warn(f"{self._path}: the trace cannot be written: {what} (make room for the next one)")
