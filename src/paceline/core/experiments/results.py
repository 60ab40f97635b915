"""Result types of experiments, as they are written to `experiment.json`."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from paceline.core.result_model import MeasuredFloat, ResultModel
from paceline.core.statistics import Interval


class ParityResult(ResultModel):
    """Whether a rung trains as the rung below does, on the same samples in the same order.

    `loss` and `loss_below` are means over the counted steps, `gap` the relative difference (loss / loss below - 1) over
    pairs of runs. `verdict` is `same` where all of the gap's interval lies within `tolerance` of none, `differs` where
    none of it does, and `open` where the runs do not tell; `why` says it in a sentence.
    """

    loss: MeasuredFloat
    loss_below: MeasuredFloat
    gap: Interval
    tolerance: MeasuredFloat
    verdict: Literal["same", "differs", "open"]
    why: str


class RungResult(ResultModel):
    """A rung: what it changes, and what that bought.

    `patch` are the KEY=VALUE words that it lays over the rung below it, which is the last one that was kept. `expects`
    are the stages that it was to shrink; `shrank` says of each by how much, in device seconds of a step (below, here).
    `over_below` and `over_first` are ratios of images/s, the latter the product of those in between; None for the
    first rung and where nothing was measured. `stages` are device seconds of a step, which may overlap.
    `epoch_s` are the seconds of an epoch of the training set at this speed, without evaluations, and `steps_s` those of
    the steps that counted, as many as the ladder says: None in results that were written before they were there.
    `startup_s` is from the start of the process to the first step, `compile_s` of it compiling, `prepare_s` what was
    spent once on data. Memory is rank 0's, in bytes. `runs` are folders below the experiment's, `ranks` on how many
    each ran. `status` is `failed` where it could not be run (`why` says it), and `left_out` where it does not fit this
    machine or recipe. `starved` says in how many of the runs other processes held the cores, "" where in none: it is no
    gain then, whatever was measured.
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
    """A ladder that was climbed: its rungs from the first up, and what they were measured on.

    `best` is the name of the last rung that was kept and `best_patch` all that it lays over the recipe; `stopped` says
    why the ladder `auto` looked no further, "" for others.
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
    """A number of ranks, and what was measured on it.

    `efficiency` is images/s over those of the smallest number of ranks, each divided by its ranks, in pairs of runs of
    one turn; None for that one itself and where it failed. `speedup` is ranks times it. `epoch_s` are the seconds of an
    epoch of the training set at this speed, without evaluations, and `steps_s` those of the steps that counted of a
    short run; None in results that were written before they were there. `compute_exposed_s` is what a step waits for
    gradients and `exposed_share` its share of a step, `straggler_share` the share that is lost to the latest rank: None
    on one rank. `top1` is the accuracy of whole runs, where it was asked for, and `top1_gap` that less the accuracy of
    the smallest number of ranks, over the seeds that both were trained with: what larger batches cost. `error` says why
    a point could not be measured. `runs` are folders below the experiment's.
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


class TriedResult(ResultModel):
    """Settings that were tried: `patch` are the KEY=VALUE words over the best known when they were, which `over` names.

    `ratio` is their speed over that of `over`, in pairs of runs (or, where there was one short run alone, without
    bounds). `round` counts from 1, `steps` are those of its longest run and `trials` how many runs it took.
    `status`: `won`, `lost`, `no_gain` (not to be told from 1), `differs` (trains to another loss), `no_room` (out of
    memory), `failed`, `starved` (other processes held the cores meanwhile, so that nothing is known). `explains` says
    in a few words what they change; `parity` is None where losses were not compared.
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
    """The fastest settings that were found, and all that were tried on the way.

    `first` and `best` are images/s of the recipe as it was and of the tuned one, `gain` their ratio in pairs of runs.
    `best_patch` is what is changed, `recipe_file` where the tuned recipe was written, `trials` how many runs it all
    took, `grid` how many settings there are in the space that was searched, and `stopped` why the search ended.
    `first_verdict` and `verdict` say what held the recipe back, and what holds the tuned one back.
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
    """A value, as it is written in `patch`, and what was measured with it.

    `images_per_s` is the mean over runs, all ranks together, and `spread` the lowest and the highest of them; of one
    run the 10th and 90th percentile of its windows, None where it had one of them. `step_s` is a step at that speed and
    `epoch_s` an epoch of training alone. `stages` are rank 0's device seconds of a step, and `data_wait_s` the one that
    waits. `is_fastest` holds for the highest speed and for those whose spread overlaps with its. `error` says why
    nothing was measured, and `starved` in how many of the runs other processes held the cores, "" where in none. `runs`
    are folders below the experiment's.
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
    """The speed of a recipe over the values of one field, `key`, each measured in `repeats` short runs, in turns.

    `steps` are the counted steps of a run. `fastest` is the value with the highest speed and `sentence` says which are
    not to be told from it. `wall_s` is that of all runs that have ended well.
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
    """A number of ranks that was not measured: seconds for `images` images, and between which they are likely to lie.

    Of a table, `low_s` and `high_s` are meant for 95 % confidence; of a run they are a likely range. `efficiency` is
    that of whole runs, the time of one rank over N times that of N, with the start-up of both, and `speedup` is N times
    it (None in results that were written before it was there). `step_s` is a step, and
    `parts` what it and the fixed cost are made of: seconds of the whole run by name; `dominates` names the largest of
    them that is no computing. `gpu_hours` are ranks times hours, `cost` those times the price of an hour (None without
    one).
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
    """A point that the prediction rests on: what was measured, and what the fitted form says of it.

    `efficiency` is images/s per rank over that of the point with the fewest ranks (the first of those in the table), of
    whole runs with their start-up, and `speedup` is ranks times it. `fitted_efficiency` is the fitted time of one rank
    over N times that of N. All three are None in results that were written before they were there.
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
    """Predictions, and what they rest on.

    `basis` is `points` (a table of times) or `run` (a profile and a network). `form` is the formula in words, `terms`
    its coefficients: seconds by name. `network` names what collectives were reckoned with. `notes` say what the points
    leave open, such as a term that none of them can tell.
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
        """Whether the points are speeds: the images of one and the same time, which has no start-up in it."""
        return are_speeds(self.points)

    @property
    def has_several_images(self) -> bool:
        """Whether not all times are of the same number of images; speeds are those of any number."""
        measured = set() if self.is_of_speeds else {point.images for point in self.points}
        return len(measured | {each.images for each in self.predictions}) > 1

    @property
    def start_up_s(self) -> float | None:
        """The seconds of a run that do not depend on its images, by the fit; None where the points do not tell."""
        return self.terms.get("f_s") if self.basis == "points" else None

    def time_of(self, point: MeasuredPoint) -> float:
        """Return the seconds that a point took: of a speed, those that it needs for the images that are predicted."""
        if not self.is_of_speeds or not self.predictions:
            return point.time_s
        return point.time_s * self.predictions[0].images / point.images


class _TimedPoint(Protocol):
    @property
    def images(self) -> float: ...

    @property
    def time_s(self) -> float: ...


def are_speeds(points: Sequence[_TimedPoint]) -> bool:
    """Return whether points are speeds: images of the same time."""
    return len({point.time_s for point in points}) == 1 and len({point.images for point in points}) > 1
