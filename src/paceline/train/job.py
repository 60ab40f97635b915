"""A run as a job of this process: who asked for it, where it writes, whom it meets, and where it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.rundir import RunDir
from paceline.core.world import NO_JOB, BatchJob
from paceline.measure.timing import now_s
from paceline.parallel.group import Meeting
from paceline.train.deadline import Deadline, NoDeadline
from paceline.train.interrupt import Interrupts
from paceline.train.logsink import LogSink
from paceline.train.whereabouts import Whereabouts


@dataclass(frozen=True)
class Invocation:
    """How a run was asked for: when (seconds of `measure.timing.now_s`), in which words, and who listens on rank 0.

    `recipe_name` is the short name of the recipe: a preset's, or that of its file.

    `launch` is what torchrun or Slurm call the job, the same when they start its ranks again, and `batch_job` what
    Slurm says of it. `interrupts` may have been entered before, so that a signal that came while torch was imported is
    known. `whereabouts` say at any time, from any thread, how far the run is.
    """

    started_s: float = field(default_factory=now_s)
    command: tuple[str, ...] = ()
    listeners: Sequence[LogSink] = ()
    recipe_name: str = ""
    launch: str = ""
    interrupts: Interrupts = field(default_factory=Interrupts)
    batch_job: BatchJob = NO_JOB
    whereabouts: Whereabouts = field(default_factory=Whereabouts)

    @property
    def provenance(self) -> dict[str, str | int]:
        """What of this belongs to the record of a run: the batch job, where it is in one."""
        if not self.batch_job.number:
            return {}
        return {"job_id": self.batch_job.number, "job_restarts": self.batch_job.restarts}


@dataclass(frozen=True)
class Job:
    """A run in this process: where it writes, who asked for it and may end it, whom it meets, and where it is.

    `first_s` is when the run was first started, in seconds since 1970, also by processes that never trained; infinite
    on ranks other than 0. `deadline` sees to it that it leaves before its batch job ends.
    """

    rundir: RunDir
    invocation: Invocation
    met: Meeting
    whereabouts: Whereabouts
    first_s: float = math.inf
    deadline: Deadline = field(default_factory=NoDeadline)

    def warn(self, message: str) -> None:
        """Tell whoever listens, on rank 0."""
        for listener in self.invocation.listeners:
            listener.warned(message)

    def leaves_evaluation(self) -> bool:
        """Note that a batch of an evaluation begins; return whether it is to be given up."""
        self.whereabouts.batches += 1
        self.deadline.look()
        return bool(self.invocation.interrupts.requested)
