"""Read what is compared of each run, and define the result of a comparison."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from paceline.core.errors import PacelineError
from paceline.core.json_file import MeasuredFloat, ResultModel
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.core.source_digest import code_version
from paceline.core.statistics import Interval
from paceline.report.read_run import TolerantReader, is_experiment_dir, parse_result, require_run
from paceline.report.series import Series, downsample
from paceline.report.settings import read_plugin_code, read_settings
from paceline.report.text import clean_text, finite_or_none

_MAX_EVALS: Final = 20_000
_MAX_STEPS: Final = 4_000
_MAX_RECIPE_BYTES: Final = 256 << 10
TargetOrigin = Literal["asked", "recipes", "lowest_best", "lowest_learnt", "chance", "nothing"]
SpeedCause = Literal["starved", "hardware", "mixed", "software", "noise", "scatter"]


@dataclass(frozen=True)
class EvalPoint:
    """An evaluation: the compared accuracy (0 to 1), and the training before it; 0 if unknown.

    `loss` is None if it was not finite. `train_accuracy` and `train_loss` are of `train.eval_train`.
    """

    accuracy: float
    epoch: float
    images_seen: float
    trained_s: float
    loss: float | None = None
    train_accuracy: float | None = None
    train_loss: float | None = None


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare; missing values are empty.

    `settings` are the recipe's without its seed, as text by dotted path, with `ranks`, `device`, versions and the code
    of plugins. `hardware` holds CPU, cores and GPUs as far as known. `columns` are those of the last evaluation, and
    `evals` those evaluations that have the compared metric. `problems` has a line per unreadable file.
    """

    path: Path
    settings: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    ranks: int | None = None
    has_gpu: bool = False
    hardware: dict[str, str] = field(default_factory=dict)
    result: RunResult | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    columns: frozenset[str] = frozenset()
    evals: tuple[EvalPoint, ...] = ()
    steps: Series = field(default_factory=Series)
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return clean_text(self.path.resolve().name, 60)

    @property
    def starved_share(self) -> float | None:
        """Return the share of time in which others held a CPU-starved run's cores."""
        return None if self.result is None else self.result.starved

    @property
    def status(self) -> str:
        """Return the status of the result, `unfinished` without one."""
        return "unfinished" if self.result is None else self.result.status


def read_compared_run(path: Path, metric: str) -> ComparedRun:
    """Read a run directory, finished or not. Raise `PacelineError` if `path` is none."""
    rundir = RunDir(path)
    require_run(path)
    if is_experiment_dir(path):  # an experiment has a recipe, too
        raise PacelineError(f"{path}: is an experiment (name its runs: {path}/trials/*)")
    reader = TolerantReader()
    result, problem = parse_result(reader.read_object(path / "result.json"))
    plan, machine = reader.read_object(path / "plan.json"), reader.read_object(path / "machine.json")
    settings, complaint = read_settings(reader.read_text(rundir.recipe, _MAX_RECIPE_BYTES))
    seed = settings.pop("seed", "")
    ranks = result.world_size if result is not None else _positive_int(plan.get("world_size"))
    device, has_gpu = _find_device(result, machine, settings)
    versions = {"paceline": _one_line(code_version(machine)), "torch": _one_line(machine.get("torch", ""))}
    environment = {"ranks": str(ranks) if ranks else "", "device": device, **versions}
    environment |= _read_code(rundir, result, reader)
    evaluations = list(islice(reader.read_records(rundir.evals), _MAX_EVALS))
    records, _ = reader.read_sample(rundir.steps, _MAX_STEPS)
    return ComparedRun(
        path=path,
        settings={**settings, **{key: value for key, value in environment.items() if value}} if settings else {},
        seed=int(seed) if seed.isdecimal() else None,
        ranks=ranks,
        has_gpu=has_gpu,
        hardware=_find_hardware(machine, ranks, has_gpu),
        result=result,
        plan=plan,
        columns=frozenset(evaluations[-1] if evaluations else ()),
        evals=tuple(_read_evals(evaluations, metric)),
        steps=downsample(records),
        problems=tuple(filter(None, [problem, complaint, *reader.problems])),
    )


def _read_evals(records: Iterable[dict[str, Any]], metric: str) -> Iterator[EvalPoint]:
    # Averaged weights are the ones evaluated if the run has any.
    for record in records:
        accuracy = finite_or_none(record.get(f"ema_{metric}", record.get(metric)))
        if accuracy is not None and 0 <= accuracy <= 1:
            epoch, images, trained_s = (
                max(0.0, finite_or_none(record.get(key)) or 0.0) for key in ("epoch", "images_seen", "trained_s")
            )
            loss = finite_or_none(record.get("ema_loss", record.get("loss")))
            training = finite_or_none(record.get(f"train_{metric}")), finite_or_none(record.get("train_loss"))
            yield EvalPoint(accuracy, epoch, images, trained_s, loss, *training)


def _find_device(result: RunResult | None, machine: dict[str, Any], settings: dict[str, str]) -> tuple[str, bool]:
    """Return the device's name, and whether it is a GPU."""
    requested = settings.get("parallel.device", "auto")
    used = result.provenance.get("device", "") if result is not None else requested
    gpus = machine.get("cuda_devices")
    if isinstance(gpus, list) and gpus and used != "cpu":
        return _one_line(gpus[0]), True
    return _one_line(machine.get("cpu", "")), used == "cuda"


def _find_hardware(machine: dict[str, Any], ranks: int | None, has_gpu: bool) -> dict[str, str]:
    known = {name: _one_line(machine[name]) for name in ("cpu", "logical_cores") if machine.get(name)}
    gpus = machine.get("cuda_devices")
    if has_gpu and isinstance(gpus, list) and gpus:
        # A rank uses one GPU, in order: more visible GPUs do not matter.
        known["gpus"] = ", ".join(sorted({_one_line(gpu) for gpu in gpus[:ranks]}))
    # Ranks on CPUs share the machine's cores, so their number is a setting.
    return {**known, **({"ranks": str(ranks)} if ranks and has_gpu else {})}


def _read_code(rundir: RunDir, result: RunResult | None, reader: TolerantReader) -> dict[str, str]:
    # An unfinished run has recorded its code in the newest checkpoint only.
    if result is not None:
        return read_plugin_code(result.provenance.get("own_parts"))
    checkpoints = sorted(rundir.checkpoints.glob("step-*"), key=lambda folder: (len(folder.name), folder.name))
    return read_plugin_code(reader.read_object(checkpoints[-1] / "state.json").get("own_parts")) if checkpoints else {}


def _one_line(value: object) -> str:
    # Uncut: the value distinguishes runs.
    line = str(value)
    return clean_text(line, len(line))


def _positive_int(value: object) -> int | None:
    amount = finite_or_none(value)
    return int(amount) if amount is not None and amount >= 1 else None


class RunOutcome(ResultModel):
    """The outcome of a run: `accuracy` and `loss` of its last evaluation, `best` the highest accuracy.

    Evaluations are of the averaged weights if the run has any. `to_target_*` measure training up to the end of the
    evaluation that reached the target, the last of the required number in a row: seconds since the first step with
    evaluations and checkpoints, epochs and images; None if it was not reached. `images_per_s` is the steady throughput,
    and `gpu_hours` ranks times the hours of all processes; both are None for an unfinished run, whose `status` is
    `unfinished`. `energy_kwh` and `cost` are those that the run has recorded.
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
    energy_kwh: float | None = None
    cost: float | None = None


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
    energy_kwh: Interval | None = None
    cost: Interval | None = None


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

        Unless all runs reach the target, the most accurate comes first, and groups without evaluation last.
        """
        indices = list(range(len(self.groups)))
        if self.all_reach_target:
            return indices
        last = [each.accuracy.value if each.accuracy is not None else -1.0 for each in self.groups]
        return sorted(indices, key=lambda index: -last[index])
