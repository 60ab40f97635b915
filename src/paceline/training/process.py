"""This process of a run: how it was started, its run directory, its rank store, and its progress."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.interrupts import Interrupts
from paceline.core.results import EstimateResult
from paceline.core.run_dir import RunDir
from paceline.core.world import NO_JOB, BatchJob
from paceline.measure.time_estimate import RunEstimator
from paceline.measure.timer import now_s
from paceline.parallel.heartbeat import ReadProgress, progress_at_start
from paceline.parallel.process_group import RankStore
from paceline.training.logging.base import LogSink
from paceline.training.preemption import Deadline


@dataclass
class ProgressReporter:
    """Report the step and stage of this rank, and a counter within a stage, to any thread.

    `doing` says what the start of the run does. `estimator` is that of the run's time, from its first step on rank 0,
    whose estimate `on_estimate` receives once.
    """

    read_progress: ReadProgress = progress_at_start
    batches: int = 0
    doing: str = "connecting the ranks"
    estimator: RunEstimator | None = None
    on_estimate: Callable[[EstimateResult], None] = lambda estimate: None

    def on_wait(self) -> None:
        """Count as progress that this rank waits for another, or has computed a part."""
        self.batches += 1

    def __call__(self) -> tuple[int, str]:
        """Return the number of finished steps, and a description of the stage."""
        step, stage = self.read_progress()
        name = stage or "between stages"
        has_count = stage in ("start", "evaluate") or not stage  # a clock that is off names no stage
        return step, f"{name}, {self.batches}" if has_count and self.batches else name


@dataclass(frozen=True)
class Invocation:
    """How a run was started: time (seconds of `measure.timer.now_s`), command line, and listeners on rank 0.

    `recipe_name` is the preset's name or the file's stem, `changes` are its `LoadedRecipe.changes`, `launch` is
    `environ.launch_name`. `interrupts` may already be entered, so that signals during `import torch` are not lost.
    """

    started_s: float = field(default_factory=now_s)
    command: tuple[str, ...] = ()
    listeners: Sequence[LogSink] = ()
    recipe_name: str = ""
    changes: Sequence[Mapping[str, Any]] = ()
    launch: str = ""
    interrupts: Interrupts = field(default_factory=Interrupts)
    batch_job: BatchJob = NO_JOB
    progress: ProgressReporter = field(default_factory=ProgressReporter)
    more_provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def provenance(self) -> dict[str, Any]:
        """`more_provenance`, such as what `auto` has measured, and in a batch job its number and restarts."""
        job = {"job_id": self.batch_job.number, "job_restarts": self.batch_job.restarts}
        return {**self.more_provenance, **(job if self.batch_job.number else {})}


@dataclass(frozen=True)
class RunProcess:
    """This process of a run.

    `first_started_s` is the time of the run's first start (seconds since 1970), including processes that never trained;
    infinite on ranks other than 0.
    """

    rundir: RunDir
    invocation: Invocation
    store: RankStore
    progress: ProgressReporter
    first_started_s: float = math.inf
    deadline: Deadline | None = None

    def with_provenance(self, values: Mapping[str, Any]) -> "RunProcess":
        """Return a copy whose invocation has the given provenance too."""
        return replace(self, invocation=replace(self.invocation, more_provenance=values))

    def warn(self, message: str) -> None:
        """Send a warning to the listeners, which only rank 0 has."""
        for listener in self.invocation.listeners:
            listener.warned(message)

    def should_stop_evaluation(self) -> bool:
        """Count a batch of an evaluation as progress, and return whether to abort the evaluation."""
        self.progress.batches += 1
        if self.deadline:
            self.deadline.begin_eval_batch()
        return bool(self.invocation.interrupts.requested)
