"""What scaling came to: the same recipe on more ranks, or with larger batches."""

from typing import Any, Literal

from paceline.core.interval import Interval
from paceline.core.value import MeasuredFloat, ResultModel


class ScalePoint(ResultModel):
    """A number of ranks, and what was measured on it.

    `efficiency` is images/s over those of the smallest number of ranks, each divided by its ranks, in pairs of runs of
    one turn; None for that one itself and where it failed. `speedup` is ranks times it. `epoch_s` are the seconds of an
    epoch of the training set at this speed, without evaluations, and `steps_s` those of the steps that counted of a
    short run; None in results that were written before they were there. `compute_exposed_s` is what a step waits for gradients
    and `exposed_share` its share of a step, `straggler_share` the share that is lost to the latest rank: None on one
    rank.
    `top1` is the accuracy of whole runs, where it was asked for, and `top1_gap` that less the accuracy of the smallest
    number of ranks, over the seeds that both were trained with: what larger batches cost. `error` says why a point
    could not be measured. `runs` are folders below the experiment's.
    """

    ranks: int
    nodes: int
    batch_size: int
    rank_batch: int
    images_per_s: Interval | None = None
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    step_s: MeasuredFloat | None = None
    efficiency: Interval | None = None
    speedup: Interval | None = None
    epoch_s: MeasuredFloat | None = None
    steps_s: MeasuredFloat | None = None
    exposed_s: MeasuredFloat | None = None
    exposed_share: MeasuredFloat | None = None
    straggler_share: MeasuredFloat | None = None
    startup_s: MeasuredFloat | None = None
    wall_s: MeasuredFloat | None = None
    top1: Interval | None = None
    top1_gap: Interval | None = None
    bottleneck: str = ""
    error: str = ""
    runs: tuple[str, ...] = ()


class BatchPoint(ResultModel):
    """A batch size, a warm-up and a rule for the learning rate, and how whole runs ended over `seeds`.

    `lr_rule` is `any` at the batch size that the learning rate is for, where all rules say the same; `warmup` is ""
    where the schedule has none to set. `lr` is the peak. `to_target_s` and `to_target_epochs` are means over the runs
    that reached the target, which `reached` counts; None where none did. Means of times and rates are geometric.
    `epoch_s` are the seconds of an epoch at `images_per_s`. `error` says why the first run that failed did so.
    """

    batch_size: int
    warmup: str
    lr_rule: str
    lr: MeasuredFloat
    seeds: int
    reached: int
    top1: Interval | None = None
    images_per_s: Interval | None = None
    epoch_s: MeasuredFloat | None = None
    to_target_s: Interval | None = None
    to_target_epochs: Interval | None = None
    error: str = ""
    runs: tuple[str, ...] = ()


class ScaleResult(ResultModel):
    """Ranks and what they gave (`points`), or batches and how they trained (`batches`): one of them is empty.

    `mode` is `weak` where each rank keeps its batch and `strong` where the whole batch stays; `batch` for a study of
    batches. `steps` are the counted steps of a run, 0 where whole runs were trained, and `repeats` are turns, which
    have a seed each where runs were whole. `target` is the top-1 accuracy that it trains to. `caution` says
    where ranks share what more machines would each have, such as cores, and where runs were not made alike; "" where
    neither is so. `sentences` are what a study of batches found. `epoch_images` are the images of an epoch, None where
    no run says. `wall_s` is that of all runs that have ended well.
    """

    kind: Literal["scale"] = "scale"
    schema_version: int = 1
    mode: Literal["weak", "strong", "batch"]
    recipe: str
    recipe_hash: str
    steps: int
    warmup_steps: int
    repeats: int
    points: tuple[ScalePoint, ...] = ()
    batches: tuple[BatchPoint, ...] = ()
    target: MeasuredFloat | None = None
    caution: str = ""
    sentences: tuple[str, ...] = ()
    epoch_images: MeasuredFloat | None = None
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]

    @property
    def base(self) -> ScalePoint | None:
        """The smallest number of ranks with a speed, over which the others are efficient; None where none has one."""
        measured = [point for point in self.points if point.images_per_s is not None]
        return min(measured, key=lambda point: point.ranks, default=None)

    def note(self, point: ScalePoint | BatchPoint) -> str:
        """Return why a point has no speed though its runs have ended well; "" where it has one, and where they failed.

        The steps of the warm-up are not counted, and a whole run may have no others.
        """
        if point.images_per_s is not None or not point.runs:
            return ""
        return f"no speed: no run had more steps than the {self.warmup_steps:,} of measure.warmup_steps (set fewer)"
