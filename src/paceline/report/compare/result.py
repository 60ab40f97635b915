"""What a comparison came to, as values that are written as JSON."""

from typing import Literal

from paceline.core.interval import Interval
from paceline.core.value import Measured, Value

From = Literal["asked", "recipes", "lowest_best", "lowest_learnt", "chance", "nothing"]
PaceBy = Literal["starved", "hardware", "mixed", "software", "noise", "scatter"]


class RunOutcome(Value):
    """How a run ended: `accuracy` and `loss` are of its last evaluation, `best` the highest, all of the judged weights.

    The judged weights are the averaged ones where there are any. `to_target_*` are what it took up to the end of the
    evaluation with which it met the target, in seconds since the first step (evaluations and checkpoints among them),
    epochs and images; None where none did. That is the first one, or where the target is the recipes' own the last of
    as many in a row as all of them ask for. `images_per_s` is steady throughput, `gpu_hours` ranks times the hours of
    all its processes; None of what has not finished. `status` is `unfinished` without a result.
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
    images_per_s: Measured | None = None
    gpu_hours: float | None = None


class GroupResult(Value):
    """Runs that differ in their seed alone; values are means over them (of times and rates geometric), with intervals.

    `settings` are those that are not the same in all groups, as text by dotted path. `reached` counts the runs that
    met the target, and `to_target_*` are means over these. `gap` is the accuracy less the first group's (Welch's
    interval). `speedup` is how many times sooner than the first group it meets the target, and the product of
    `hardware`, the images/s on the way there over those of the first group, and `statistical`, the images that the
    first group needs over those that this one does: ratios of geometric means. The first group has none of the four.

    `pace_by` says where `hardware` is from, which is called after what it most often is. `starved`: other processes
    held the cores in a run of either group, so that nobody knows. Else `hardware`: the groups ran on other processors,
    cores, GPUs or numbers of GPUs, and the settings that differ only scale with these, as the batch size does (on CPUs
    the number of ranks is a setting). `mixed`: other hardware and settings. Else `noise`: nothing that differs can
    change how fast a step is, such as the learning rate. Else `scatter`: it is no larger than runs, or the steps of
    single ones, scatter. Else `software`: settings, versions or code.
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
    pace_by: PaceBy | None = None
    gpu_hours: Interval | None = None


class CompareResult(Value):
    """A comparison: groups in the order in which their first runs were named; the first is what others are held to.

    `metric` is the accuracy that is judged and `target` its level to reach, None where no run was evaluated or none has
    learnt. `target_from` says whether it was asked for, is the recipes', or is the least of the runs' best accuracies:
    of all runs (`lowest_best`), or of those that have learnt (`lowest_learnt`), whose best is not below half of the
    highest one, nor near chance. With `chance` none has. `sentences` are what was found, `notes` what to know of it,
    `failures` the groups that fell below a level that was asked for.
    """

    kind: Literal["compare"] = "compare"
    schema_version: int = 1
    metric: str
    target: float | None
    target_from: From
    groups: tuple[GroupResult, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...]
    failures: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    paceline: str = ""

    @property
    def all_reach(self) -> bool:
        """Return whether all runs reach the target."""
        return self.target is not None and all(each.reached == len(each.runs) for each in self.groups)

    @property
    def ranked(self) -> list[int]:
        """Return the places of the groups as tables show them: as they were named where all runs reach the target.

        Else by the accuracy that they end at, the highest first, those that were not evaluated last.
        """
        places = list(range(len(self.groups)))
        if self.all_reach:
            return places
        last = [each.accuracy.value if each.accuracy is not None else -1.0 for each in self.groups]
        return sorted(places, key=lambda place: -last[place])
