"""Result types of experiments, as they are written to `experiment.json`."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from paceline.core.result_model import MeasuredFloat, ResultModel
from paceline.core.statistics import Interval


class ParityResult(ResultModel):
    """Whether a rung trains to the same loss as the rung below it, on the same samples in the same order.

    `loss` and `loss_below` are means over the counted steps, `gap` is loss / loss below - 1 over pairs of runs.
    `verdict` is `same` if the whole interval of the gap is within `tolerance`, `differs` if none of it is, else `open`;
    `why` is a sentence.
    """

    loss: MeasuredFloat
    loss_below: MeasuredFloat
    gap: Interval
    tolerance: MeasuredFloat
    verdict: Literal["same", "differs", "open"]
    why: str


class RungResult(ResultModel):
    """One rung of a ladder: a change of settings and its measured effect.

    `patch` are its KEY=VALUE words over the rung below (`below`), the last kept one. `expects` are the stages that
    should shrink; `shrank` has each stage's device seconds per step (below, with this rung). `over_below` and
    `over_first` are ratios of images/s, the latter a product over the rungs in between. `stages` are device seconds per
    step, which may overlap. `epoch_s` are seconds of an epoch of the training set without evaluations, `steps_s` those
    of the counted steps. `startup_s` is from the start of the process to the first step, including `compile_s`;
    `prepare_s` was spent once on data. Memory is rank 0's, in bytes. `runs` are folders below the experiment's, with
    `ranks` ranks each. `status`: `failed` with a reason (`why`), `left_out` if it does not fit this machine or recipe.
    `starved` says in how many runs other processes used the cores, or ""; such a rung counts as no gain.
    None: not measured, or an older result.
    """

    name: str
    explains: str
    patch: tuple[str, ...]
    status: Literal["kept", "dropped", "failed", "left_out"]
    why: str
    below: str = ""
    expects: tuple[str, ...] = ()
    shrank: dict[str, tuple[MeasuredFloat, MeasuredFloat]] = Field(default_factory=dict)
    images_per_s: Interval | None = None
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    over_below: Interval | None = None
    over_first: Interval | None = None
    stages: dict[str, MeasuredFloat] = Field(default_factory=dict)
    step_s: MeasuredFloat | None = None
    epoch_s: MeasuredFloat | None = None
    steps_s: MeasuredFloat | None = None
    startup_s: MeasuredFloat | None = None
    compile_s: MeasuredFloat | None = None
    prepare_s: MeasuredFloat = 0.0
    host_bytes: int | None = None
    device_bytes: int | None = None
    parity: ParityResult | None = None
    verdict: dict[str, str] = Field(default_factory=dict)
    starved: str = ""
    runs: tuple[str, ...] = ()
    ranks: int | None = None


class LadderResult(ResultModel):
    """The result of a ladder, with its rungs in order.

    `best` names the last kept rung, `best_patch` all its changes to the recipe; `stopped` says why the ladder `auto`
    ended, else "".
    """

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
    best: str
    best_patch: tuple[str, ...]
    stopped: str = ""
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]


class ScalePoint(ResultModel):
    """A number of ranks and its measurements.

    `efficiency` is images/s per rank over that of the smallest number of ranks, in pairs of runs of one round;
    `speedup` is ranks times it. `epoch_s` are seconds of an epoch of the training set without evaluations, `steps_s`
    those of the counted steps of a short run. `exposed_s` is the time per step that waits for gradients,
    `exposed_share` its share, `straggler_share` the share lost to the latest rank. `top1` is the accuracy of whole
    runs, if requested; `top1_gap` is that minus the accuracy of the smallest number of ranks over common seeds, the
    cost of larger batches. `error` says why a point was not measured. `runs` are folders below the experiment's. None:
    not measured, not defined, or an older result.
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
    """A batch size, a warm-up and a learning-rate rule, and the outcome of whole runs over `seeds`.

    `lr_rule` is `any` at the recipe's own batch size, where all rules agree; `warmup` is "" if the schedule has none.
    `lr` is the peak. `to_target_s` and `to_target_epochs` are means over the `reached` runs that reached the target.
    Means of times and rates are geometric. `epoch_s` are seconds of an epoch at `images_per_s`. `error` says why the
    first failed run failed.
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
    """Speed over numbers of ranks (`points`), or training over batch sizes (`batches`); the other one is empty.

    `mode` is `weak` if each rank keeps its batch, `strong` if the global batch is kept, `batch` for batch sizes.
    `steps` are the counted steps per run, 0 for whole runs; `repeats` are rounds, with a seed each for whole runs.
    `target` is a top-1 accuracy. `caution` names resources such as cores that the ranks of one machine share, and
    differences in hardware or versions between runs. `sentences` are findings of a study of batch sizes. `epoch_images`
    are images per epoch, None if unknown. `wall_s` is the sum of all successful runs.
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
    """A candidate that `tune` tried: `patch` are its KEY=VALUE words over the best settings before it, named by `over`.

    `ratio` is its speed over that of `over` in pairs of runs (without bounds for one short run). `round` counts from 1,
    `steps` are those of its longest run, `trials` is the number of runs. `status`: `won`, `lost`, `no_gain` (not
    distinguishable from 1), `differs` (trains to another loss), `no_room` (out of memory), `failed`, `starved` (other
    processes used the cores, so nothing is known). `explains` summarizes the change; `parity` is None if losses were
    not compared.
    """

    name: str
    patch: tuple[str, ...]
    over: str
    round: int
    steps: int
    trials: int
    images_per_s: MeasuredFloat | None
    ratio: Interval | None
    status: Literal["won", "lost", "no_gain", "differs", "no_room", "failed", "starved"]
    why: str
    runs: tuple[str, ...] = ()
    explains: str = ""
    parity: ParityResult | None = None


class TuneResult(ResultModel):
    """The fastest settings that `tune` found, and all that it tried.

    `first` and `best` are images/s of the original and the tuned recipe, `gain` is their ratio in pairs of runs.
    `best_patch` is the change, `recipe_file` the tuned recipe, `trials` the number of runs, `grid` the size of the
    search space, `stopped` why the search ended. `first_verdict` and `verdict` are the bottlenecks before and after.
    """

    kind: Literal["tune"] = "tune"
    schema_version: int = 1
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int
    warmup_steps: int
    repeats: int
    first: Interval
    best: Interval
    gain: Interval | None
    best_patch: tuple[str, ...]
    recipe_file: str
    tried: tuple[TriedResult, ...]
    trials: int
    grid: int
    stopped: str
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]
    first_verdict: dict[str, str] = Field(default_factory=dict)
    verdict: dict[str, str] = Field(default_factory=dict)


class SweepPoint(ResultModel):
    """One value of the swept field, and its measurements.

    `images_per_s` is the mean over runs, of all ranks; `spread` their minimum and maximum, or the 10th and 90th
    percentile of windows for a single run (None with one window). `step_s` is a step at that speed, `epoch_s` an epoch
    of training alone. `stages` are rank 0's device seconds per step, including `data_wait_s`. `is_fastest` holds for
    the highest speed and those whose spread overlaps it. `error` says why nothing was measured, `starved` in how many
    runs other processes used the cores, or "". `runs` are folders below the experiment's.
    """

    value: str
    patch: tuple[str, ...]
    batch_size: int | None = None
    images_per_s: Interval | None = None
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    is_fastest: bool = False
    step_s: MeasuredFloat | None = None
    data_wait_s: MeasuredFloat | None = None
    epoch_s: MeasuredFloat | None = None
    stages: dict[str, MeasuredFloat] = Field(default_factory=dict)
    bottleneck: str = ""
    starved: str = ""
    error: str = ""
    runs: tuple[str, ...] = ()


class SweepResult(ResultModel):
    """The speed of a recipe over values of the field `key`, each measured in `repeats` short, interleaved runs.

    `steps` are the counted steps per run. `fastest` is the fastest value; `sentence` names those that cannot be
    distinguished from it. `wall_s` is the sum of all successful runs.
    """

    kind: Literal["sweep"] = "sweep"
    schema_version: int = 1
    key: str
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int
    warmup_steps: int
    repeats: int
    points: tuple[SweepPoint, ...]
    fastest: str
    sentence: str
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]


class Predicted(ResultModel):
    """Prediction for a number of ranks: seconds for `images` images, with a range.

    `low_s` and `high_s` are a 95 % interval if predicted from a table, else a likely range. `efficiency` is the time of
    one rank over N times that of N ranks, of whole runs with start-up; `speedup` is N times it (None in older results).
    `step_s` is one step. `parts` are seconds of the whole run by name, including the fixed cost; `dominates` is the
    largest part that is not computing. `gpu_hours` are ranks times hours, `cost` those times the price of an hour (None
    without a price).
    """

    ranks: int
    nodes: int
    rank_batch: int
    images: MeasuredFloat
    time_s: MeasuredFloat
    low_s: MeasuredFloat
    high_s: MeasuredFloat
    step_s: MeasuredFloat
    images_per_s: MeasuredFloat
    efficiency: MeasuredFloat
    speedup: MeasuredFloat | None = None
    gpu_hours: MeasuredFloat
    cost: MeasuredFloat | None = None
    parts: dict[str, MeasuredFloat] = Field(default_factory=dict)
    dominates: str = ""


class MeasuredPoint(ResultModel):
    """A measured point of a prediction, with its fitted value.

    `efficiency` is images/s per rank over that of the point with the fewest ranks (the first in the table), of whole
    runs with start-up; `speedup` is ranks times it. `fitted_efficiency` is the fitted time of one rank over N times
    that of N. None in older results.
    """

    ranks: int
    nodes: int
    rank_batch: int
    images: MeasuredFloat
    time_s: MeasuredFloat
    fitted_s: MeasuredFloat
    efficiency: MeasuredFloat | None = None
    speedup: MeasuredFloat | None = None
    fitted_efficiency: MeasuredFloat | None = None


class PredictionResult(ResultModel):
    """Predictions and their basis.

    `basis` is `points` (a table of times) or `run` (a profile and a network). `form` is the formula in words, `terms`
    its coefficients in seconds. `network` is the one used for collectives. `notes` name terms that the points do not
    determine.
    """

    kind: Literal["prediction"] = "prediction"
    schema_version: int = 1
    basis: Literal["points", "run"]
    source: str
    form: str
    terms: dict[str, MeasuredFloat]
    points: tuple[MeasuredPoint, ...] = ()
    predictions: tuple[Predicted, ...]
    network: str = ""
    notes: tuple[str, ...] = ()
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
