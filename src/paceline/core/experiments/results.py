"""Result types of experiments, as they are written to `experiment.json`.

Optional fields are None if they were not measured, and in results from before they were recorded.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from paceline.core.json_file import MeasuredFloat, ResultModel
from paceline.core.results import ClassCount
from paceline.core.statistics import Interval


class ParityResult(ResultModel):
    """Whether a rung trains to the same loss as the rung below it, on the same samples in the same order."""

    loss: MeasuredFloat  # mean over the measured steps
    loss_below: MeasuredFloat
    gap: Interval  # loss / loss below - 1, over pairs of runs
    tolerance: MeasuredFloat
    # Whether all of the gap's interval is within the tolerance, none of it, or some
    verdict: Literal["same", "differs", "open"]
    why: str  # a sentence


class RungResult(ResultModel):
    """One rung of a ladder: a change of settings and its measured effect."""

    name: str
    explains: str
    patch: tuple[str, ...]  # KEY=VALUE words over the rung below
    status: Literal["kept", "dropped", "failed", "left_out"]  # left_out: does not fit this machine or recipe
    why: str  # reason of the status
    below: str = ""  # name of the last kept rung
    expects: tuple[str, ...] = ()  # stages that should shrink
    # Device seconds per step of each stage in `expects`: (below, with this rung)
    shrank: dict[str, tuple[MeasuredFloat, MeasuredFloat]] = Field(default_factory=dict)
    images_per_s: Interval | None = None
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    over_below: Interval | None = None  # ratio of images/s
    over_first: Interval | None = None  # product of the ratios over all kept rungs so far
    stages: dict[str, MeasuredFloat] = Field(default_factory=dict)  # device seconds per step, which may overlap
    step_s: MeasuredFloat | None = None
    epoch_s: MeasuredFloat | None = None  # training alone, without evaluations
    steps_s: MeasuredFloat | None = None  # the measured steps
    startup_s: MeasuredFloat | None = None  # from the start of the process to the first step, including `compile_s`
    compile_s: MeasuredFloat | None = None
    prepare_s: MeasuredFloat = 0.0  # spent once on data
    host_bytes: int | None = None  # memory of rank 0
    device_bytes: int | None = None
    parity: ParityResult | None = None
    verdict: dict[str, str] = Field(default_factory=dict)
    starved: str = ""  # in how many runs other processes used the cores, which counts as no gain; or ""
    runs: tuple[str, ...] = ()  # folders below the experiment's
    ranks: int | None = None


class ScriptChanges(ResultModel):
    """A training script, and what its ladder kept: a command line to paste, and lines of code for each patch."""

    command: tuple[str, ...]
    best_command: str
    best_code: tuple[str, ...] = ()
    note: str = ""  # why losses were not compared


class LadderResult(ResultModel):
    """The result of a ladder, with its rungs in order."""

    kind: Literal["ladder"] = "ladder"
    schema_version: int = 1
    ladder: str
    summary: str
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int
    warmup_steps: int
    repeats: int
    batch_size: int
    rungs: tuple[RungResult, ...]
    best: str  # name of the last kept rung
    best_patch: tuple[str, ...]  # all its changes to the recipe
    stopped: str = ""  # why the ladder `auto` ended
    script: ScriptChanges | None = None  # of a ladder of a training script, which has no recipe
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]


class ScalePoint(ResultModel):
    """A number of ranks and its measurements."""

    ranks: int
    nodes: int
    batch_size: int
    rank_batch: int
    images_per_s: Interval | None = None
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    step_s: MeasuredFloat | None = None
    efficiency: Interval | None = None  # images/s per rank over that of the fewest ranks, in pairs of runs of one round
    speedup: Interval | None = None  # ranks times the efficiency
    epoch_s: MeasuredFloat | None = None  # training alone, without evaluations
    steps_s: MeasuredFloat | None = None  # the measured steps of a short run
    exposed_s: MeasuredFloat | None = None  # seconds per step of waiting for gradients
    exposed_share: MeasuredFloat | None = None  # of a step
    straggler_share: MeasuredFloat | None = None  # share lost to the latest rank
    startup_s: MeasuredFloat | None = None
    wall_s: MeasuredFloat | None = None
    top1: Interval | None = None  # of whole runs, if requested
    top1_gap: Interval | None = None  # minus that of the fewest ranks over common seeds: the cost of larger batches
    bottleneck: str = ""
    error: str = ""  # why it was not measured
    runs: tuple[str, ...] = ()  # folders below the experiment's


class BatchPoint(ResultModel):
    """A batch size, a warm-up and a learning-rate rule, and the outcome of whole runs.

    Means of times and rates are geometric.
    """

    batch_size: int
    warmup: str  # "" if the schedule has none
    lr_rule: str  # `any` at the recipe's own batch size, where all rules agree
    lr: MeasuredFloat  # peak learning rate
    seeds: int  # number of runs, with a seed each
    reached: int  # number of runs that reached the target
    top1: Interval | None = None
    images_per_s: Interval | None = None
    epoch_s: MeasuredFloat | None = None  # at `images_per_s`
    to_target_s: Interval | None = None  # over the runs that reached the target
    to_target_epochs: Interval | None = None
    error: str = ""  # why the first failed run failed
    runs: tuple[str, ...] = ()


class ScaleResult(ResultModel):
    """Speed over numbers of ranks (`points`), or training over batch sizes (`batches`); the other one is empty."""

    kind: Literal["scale"] = "scale"
    schema_version: int = 1
    mode: Literal["weak", "strong", "batch"]  # constant batch per rank, constant global batch, or batch sizes
    recipe: str
    recipe_hash: str
    steps: int  # measured steps per run; 0 for whole runs
    warmup_steps: int
    repeats: int  # rounds, with a seed each for whole runs
    points: tuple[ScalePoint, ...] = ()
    batches: tuple[BatchPoint, ...] = ()
    target: MeasuredFloat | None = None  # top-1 accuracy
    # Resources that the ranks of one machine share, such as cores, and runs that differ in hardware or versions.
    caution: str = ""
    sentences: tuple[str, ...] = ()  # findings of a study of batch sizes
    epoch_images: MeasuredFloat | None = None  # images per epoch
    wall_s: MeasuredFloat  # sum of all successful runs
    command: tuple[str, ...]
    provenance: dict[str, Any]

    @property
    def base(self) -> ScalePoint | None:
        """The smallest measured number of ranks, which efficiencies refer to; None without any."""
        measured = [point for point in self.points if point.images_per_s is not None]
        return min(measured, key=lambda point: point.ranks, default=None)

    def note(self, point: ScalePoint | BatchPoint) -> str:
        """Return why a successful point has no speed, or ""."""
        # A short whole run may have warm-up steps only, which are not counted.
        if point.images_per_s is not None or not point.runs:
            return ""
        return f"no speed: no run had more steps than the {self.warmup_steps:,} of measure.warmup_steps (set fewer)"


class TriedResult(ResultModel):
    """A candidate that `tune` tried."""

    name: str
    patch: tuple[str, ...]  # KEY=VALUE words over the best settings at that time
    over: str  # name of these settings
    round: int  # from 1
    steps: int  # of its longest run
    trials: int  # number of runs
    images_per_s: MeasuredFloat | None
    ratio: Interval | None  # of speeds in pairs of runs; without bounds for one short run
    # no_gain: not distinguishable from 1. differs: trains to another loss. no_room: out of memory. starved: other
    # processes used the cores, so nothing is known.
    status: Literal["won", "lost", "no_gain", "differs", "no_room", "failed", "starved"]
    why: str
    runs: tuple[str, ...] = ()
    explains: str = ""  # summary of the change
    parity: ParityResult | None = None  # None if losses were not compared


class TuneResult(ResultModel):
    """The fastest settings that `tune` found, and all that it tried."""

    kind: Literal["tune"] = "tune"
    schema_version: int = 1
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int
    warmup_steps: int
    repeats: int
    first: Interval  # images/s of the original recipe
    best: Interval  # images/s of the tuned recipe
    gain: Interval | None  # their ratio in pairs of runs
    best_patch: tuple[str, ...]  # changes to the original recipe
    recipe_file: str  # the tuned recipe
    tried: tuple[TriedResult, ...]
    trials: int  # number of runs
    grid: int  # size of the search space
    stopped: str  # why the search ended
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]
    first_verdict: dict[str, str] = Field(default_factory=dict)  # bottleneck of the original recipe
    verdict: dict[str, str] = Field(default_factory=dict)  # bottleneck of the tuned recipe


class SweepPoint(ResultModel):
    """One value of the swept field, and its measurements."""

    value: str  # as written in `patch`
    patch: tuple[str, ...]
    batch_size: int | None = None
    images_per_s: Interval | None = None  # mean over runs, of all ranks together
    # Minimum and maximum of the runs; of a single run, the 10th and 90th percentile of its windows (None with one).
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    is_fastest: bool = False  # or with a spread that overlaps the fastest
    step_s: MeasuredFloat | None = None  # at that speed
    data_wait_s: MeasuredFloat | None = None
    epoch_s: MeasuredFloat | None = None  # training alone, without evaluations
    # Device seconds per step of rank 0, with `data_wait_s`
    stages: dict[str, MeasuredFloat] = Field(default_factory=dict)
    bottleneck: str = ""
    starved: str = ""  # in how many runs other processes used the cores, or ""
    error: str = ""  # why nothing was measured
    runs: tuple[str, ...] = ()  # folders below the experiment's


class SweepResult(ResultModel):
    """The speed of a recipe over values of the field `key`, in short, interleaved runs."""

    kind: Literal["sweep"] = "sweep"
    schema_version: int = 1
    key: str
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int  # measured steps per run
    warmup_steps: int
    repeats: int  # runs per value
    points: tuple[SweepPoint, ...]
    fastest: str  # a value
    sentence: str  # names values that cannot be distinguished from it
    wall_s: MeasuredFloat  # sum of all successful runs
    command: tuple[str, ...]
    provenance: dict[str, Any]


class LrFindResult(ResultModel):
    """Learning-rate range tests of a recipe, and the suggested rate. Rates are values of `optim.lr`."""

    kind: Literal["lr_find"] = "lr_find"
    schema_version: int = 1
    recipe: str
    recipe_hash: str
    ranks: int
    batch_size: int
    steps: int  # per run, unless the loss diverged before
    repeats: int  # runs, with a seed each
    lr: MeasuredFloat  # of the recipe
    suggestion: MeasuredFloat | None  # None: the curve names none
    rule: str
    caution: str  # why the suggestion may mislead, and what to do, or ""
    rates: tuple[MeasuredFloat, ...]  # of the steps
    losses: tuple[tuple[MeasuredFloat, ...], ...]  # per run and step, as many as it trained
    smoothed: tuple[MeasuredFloat, ...]  # of the steps that any run has
    runs: tuple[str, ...]  # folders below the experiment's
    wall_s: MeasuredFloat  # sum of all successful runs
    command: tuple[str, ...]
    provenance: dict[str, Any]


class LearnTrial(ResultModel):
    """A run of `tune --learn`: a candidate on a rung, or with a seed of the finals."""

    name: str
    patch: tuple[str, ...]  # KEY=VALUE words over the recipe
    rung: int  # from 1; the finals come last
    share: MeasuredFloat  # length of the run, as a share of the recipe's
    seed: int
    metric: str  # "" for a run that failed
    is_minimized: bool
    value: MeasuredFloat | None  # the metric of the last evaluation; None: it failed, or the metric is NaN
    error: str  # why it failed, or ""
    run: str  # folder below the experiment's, or ""
    wall_s: MeasuredFloat


class LearnResult(ResultModel):
    """The settings with the best metric that `tune --learn` found, compared with the recipe over new seeds."""

    kind: Literal["learn"] = "learn"
    schema_version: int = 1
    recipe: str
    recipe_hash: str
    ranks: int
    metric: str
    is_minimized: bool
    seeds: int
    budget: str
    space: tuple[str, ...]  # searched fields and their ranges
    trials: tuple[LearnTrial, ...]  # in order
    best: str  # name of the best candidate
    best_patch: tuple[str, ...]  # its changes to the recipe
    best_value: Interval | None  # over the seeds of the finals; None: all its runs failed
    recipe_value: Interval | None
    gain: Interval | None  # mean of the best minus that of the recipe
    sentence: str
    recipe_file: str  # the recipe of the better of the two
    spent: MeasuredFloat  # whole trainings
    wall_s: MeasuredFloat  # sum of all runs
    command: tuple[str, ...]
    provenance: dict[str, Any]


class FoldRun(ResultModel):
    """A run of a cross-validation: trained on all folds but one, and evaluated on that one."""

    fold: int  # from 0
    repeat: int  # from 0
    seed: int
    train_images: int
    val_images: int
    value: MeasuredFloat  # the metric of the last evaluation
    curve: tuple[tuple[MeasuredFloat, MeasuredFloat], ...]  # (epoch, metric) of each evaluation
    run: str  # folder below the experiment's
    wall_s: MeasuredFloat


class CrossValidationResult(ResultModel):
    """The scores of a cross-validation, and the predictions for all images by models that have not seen them."""

    kind: Literal["cross_validation"] = "cross_validation"
    schema_version: int = 1
    recipe: str
    recipe_hash: str
    ranks: int
    folds: int
    repeats: int
    groups: str  # column of the groups, or ""
    metric: str
    is_minimized: bool
    value: Interval  # mean over the runs
    accuracy: Interval | None  # over all predictions; None with several labels per image
    runs: tuple[FoldRun, ...]
    classes: tuple[ClassCount, ...]  # over all predictions
    confusion: tuple[tuple[int, ...], ...]  # empty for many classes
    sentences: tuple[str, ...]
    caution: str  # why the result may mislead, or ""
    wall_s: MeasuredFloat  # sum of all runs
    command: tuple[str, ...]
    provenance: dict[str, Any]


class Predicted(ResultModel):
    """Prediction for a number of ranks."""

    ranks: int
    nodes: int
    rank_batch: int
    images: MeasuredFloat  # of the predicted run
    time_s: MeasuredFloat
    low_s: MeasuredFloat  # 95 % confidence if predicted from a table, else a likely range
    high_s: MeasuredFloat
    step_s: MeasuredFloat
    images_per_s: MeasuredFloat
    efficiency: MeasuredFloat  # time of one rank over N times that of N ranks, of whole runs with start-up
    speedup: MeasuredFloat | None = None  # N times the efficiency
    gpu_hours: MeasuredFloat  # ranks times hours
    cost: MeasuredFloat | None = None  # GPU hours times the price of one
    # Seconds of the whole run by name, with the fixed cost
    parts: dict[str, MeasuredFloat] = Field(default_factory=dict)
    dominates: str = ""  # the largest part that is not computing


class MeasuredPoint(ResultModel):
    """A measured point of a prediction, with its fitted value."""

    ranks: int
    nodes: int
    rank_batch: int
    images: MeasuredFloat
    time_s: MeasuredFloat
    fitted_s: MeasuredFloat
    # Images/s per rank over that of the point with the fewest ranks (the first in the table), with start-up.
    efficiency: MeasuredFloat | None = None
    speedup: MeasuredFloat | None = None  # ranks times the efficiency
    fitted_efficiency: MeasuredFloat | None = None  # fitted time of one rank over N times that of N


class PredictionResult(ResultModel):
    """Predictions and their basis."""

    kind: Literal["prediction"] = "prediction"
    schema_version: int = 1
    basis: Literal["points", "run"]  # a table of times, or a profile and a network
    source: str
    form: str  # the formula in words
    terms: dict[str, MeasuredFloat]  # its coefficients in seconds
    points: tuple[MeasuredPoint, ...] = ()
    predictions: tuple[Predicted, ...]
    network: str = ""  # used for collectives
    notes: tuple[str, ...] = ()  # which terms the points do not determine
    command: tuple[str, ...] = ()
    provenance: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_of_speeds(self) -> bool:
        """Whether the points are speeds (`are_speeds`), which contain no start-up."""
        return are_speeds(self.points)

    @property
    def has_several_images(self) -> bool:
        """Whether measured and predicted times are for different numbers of images; speeds hold for any number."""
        measured = set() if self.is_of_speeds else {point.images for point in self.points}
        return len(measured | {each.images for each in self.predictions}) > 1

    @property
    def start_up_s(self) -> float | None:
        """Fitted seconds of a run that do not depend on its images; None if not determined."""
        return self.terms.get("f_s") if self.basis == "points" else None

    def time_of(self, point: MeasuredPoint) -> float:
        """Return the seconds of a point; for a speed, the seconds for the predicted number of images."""
        if not self.is_of_speeds or not self.predictions:
            return point.time_s
        return point.time_s * self.predictions[0].images / point.images


class _TimedPoint(Protocol):
    @property
    def images(self) -> float: ...

    @property
    def time_s(self) -> float: ...


def are_speeds(points: Sequence[_TimedPoint]) -> bool:
    """Return whether points are speeds, given as numbers of images in equal times."""
    return len({point.time_s for point in points}) == 1 and len({point.images for point in points}) > 1
