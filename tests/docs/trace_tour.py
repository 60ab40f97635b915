"""Train with `paceline train ARGS`, and write the files that one batch and one checkpoint enter: OUT.NAME.json.

`python trace_tour.py OUT train ...`, once per rank. A walk is traced on the thread that walks it, by `sys.setprofile`.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import paceline
from paceline.cli import main
from paceline.data.loaders.process import _WorkerDataset
from paceline.measure.clock import StageClock
from paceline.training.checkpoint.writer import CheckpointWriter
from paceline.training.trainer import Trainer

SOURCE = Path(paceline.__file__).parent
OUT = Path(sys.argv[1])
FIRST_STEP = 4  # after the steps that differ: hooks that find the last gradient, and the measurement warm-up


class Trace:
    """The files of paceline of which a function is called on this thread between `start` and `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: set[str] = set()

    def start(self) -> None:
        sys.setprofile(self._record)

    def stop(self) -> None:
        sys.setprofile(None)
        if os.environ["RANK"] == "0":
            OUT.with_suffix(f".{self._name}.json").write_text(json.dumps(sorted(self._files)))

    def _record(self, frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            self._files.add(path.relative_to(SOURCE).as_posix())


def trace_call(owner: type, method: str, name: str, *, number: int = 1) -> None:
    """Trace call `number` (from 1) of a method."""
    real: Callable[..., Any] = getattr(owner, method)
    calls = 0

    @functools.wraps(real)
    def traced(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
            return real(*args, **kwargs)
        trace = Trace(name)
        trace.start()
        try:
            return real(*args, **kwargs)
        finally:
            trace.stop()

    setattr(owner, method, traced)


def trace_step() -> None:
    """Trace from the end of step FIRST_STEP to the end of the next: fetching the batch, the step, and the decision."""
    real, trace, steps = StageClock.end_step, Trace("step"), 0

    @functools.wraps(real)
    def end_step(*args: Any) -> None:
        nonlocal steps
        steps += 1
        real(*args)
        if steps == FIRST_STEP:
            trace.start()
        elif steps == FIRST_STEP + 1:
            trace.stop()

    StageClock.end_step = end_step  # type: ignore[method-assign]


trace_step()
trace_call(_WorkerDataset, "__getitem__", "worker", number=3)
trace_call(Trainer, "save_checkpoint", "checkpoint")
trace_call(CheckpointWriter, "_write", "writer")
sys.argv[1:] = sys.argv[2:]
sys.exit(main())
