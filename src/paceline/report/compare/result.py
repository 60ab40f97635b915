"""The result of a comparison, written as JSON."""

from typing import Literal

from paceline.core.interval import Interval
from paceline.core.value import MeasuredFloat, ResultModel

TargetOrigin = Literal["asked", "recipes", "lowest_best", "lowest_learnt", "chance", "nothing"]
SpeedCause = Literal["starved", "hardware", "mixed", "software", "noise", "scatter"]


class RunOutcome(ResultModel):
    """The outcome of a run: `accuracy` and `loss` of its last evaluation, `best` the highest accuracy.

    Evaluations are of the averaged weights if the run has any. `to_target_*` measure training up to the end of the
    evaluation that reached the target, the last of the required number in a row: seconds since the first step with
    evaluations and checkpoints, epochs and images; None if it was not reached. `images_per_s` is the steady throughput,
    and `gpu_hours` ranks times the hours of all processes; both are None for an unfinished run, whose `status` is
    `unfinished`.
    """

    path: str
    seed: int | None
    status: str
    accuracy: float | None = None
    best: float | None = None
    loss: float | None = None
    to_target_s: float | None = None
    to_target_epochs: float | None = None
    to_target_images: float | None = None
    images_per_s: MeasuredFloat | None = None
    gpu_hours: float | None = None


class GroupResult(ResultModel):
    """Runs that differ in their seed alone; values are means with intervals, geometric for times and rates.

    `settings` are those that differ between groups, as text by dotted path. `reached` counts the runs that reached the
    target, and `to_target_*` are means over these. `gap` is the accuracy minus the first group's (Welch's interval).
    `speedup` is the first group's time to the target over this group's: the product of `hardware`, the ratio of
    images/s up to the target, and `statistical`, that of images needed. Both are ratios of geometric means, and None
    for the first group.

    `pace_by` is the cause of `hardware`:

    - `starved`: other processes held the cores of a run in either group, so the cause is unknown;
    - `hardware`: the hardware differs, and all differing settings scale with it (ranks on CPUs are a setting);
    - `mixed`: hardware and other settings differ;
    - `noise`: no differing setting can change the step time;
    - `scatter`: the ratio is within the scatter of runs, or of the windows of single runs;
    - `software`: settings, versions or code.
    """

    name: str
    ranks: int | None
    runs: tuple[RunOutcome, ...]
    settings: dict[str, str]
    reached: int
    accuracy: Interval | None = None
    best: Interval | None = None
    loss: Interval | None = None
    gap: Interval | None = None
    images_per_s: Interval | None = None
    to_target_s: Interval | None = None
    to_target_epochs: Interval | None = None
    to_target_images: Interval | None = None
    speedup: Interval | None = None
    hardware: Interval | None = None
    statistical: Interval | None = None
    pace_by: SpeedCause | None = None
    gpu_hours: Interval | None = None


class CompareResult(ResultModel):
    """A comparison: groups in the order of their first runs; the first group is the reference.

    `metric` is the compared accuracy and `target` the level to reach, None if no run was evaluated or has learned.
    `target_from` is its origin: `asked` for the command line, `recipes`, or the lowest of the best accuracies of all
    runs (`lowest_best`) or of those that learned (`lowest_learnt`); `chance` if none has. `failures` name the groups
    below a threshold.
    """

    kind: Literal["compare"] = "compare"
    schema_version: int = 1
    metric: str
    target: float | None
    target_from: TargetOrigin
    groups: tuple[GroupResult, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...]
    failures: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    paceline: str = ""

    @property
    def all_reach_target(self) -> bool:
        """Return whether all runs reach the target."""
        return self.target is not None and all(each.reached == len(each.runs) for each in self.groups)

    @property
    def ranked_indices(self) -> list[int]:
        """Return the indices of the groups in table order.

        Keep the given order if all runs reach the target. Otherwise sort by final accuracy, highest first, unevaluated
        groups last.
        """
        indices = list(range(len(self.groups)))
        if self.all_reach_target:
            return indices
        last = [each.accuracy.value if each.accuracy is not None else -1.0 for each in self.groups]
        return sorted(indices, key=lambda index: -last[index])
