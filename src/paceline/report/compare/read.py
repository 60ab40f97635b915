"""Read what is compared of each run: evaluations, speed, settings, hardware and plugin code."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.report.compare.code import PluginCode, read_plugin_code
from paceline.report.compare.settings import read_settings
from paceline.report.files import TolerantReader, is_experiment_dir
from paceline.report.lenient import parse_result
from paceline.report.thin import Series, downsample
from paceline.report.words import clean_text, finite_or_none

METRICS: Final = ("top1", "top5", "mean_class_accuracy")
_MAX_EVALS: Final = 20_000
_MAX_STEPS: Final = 4_000
_MAX_RECIPE_BYTES: Final = 256 << 10
_VERSIONS: Final = ("paceline", "torch")
_RUN_FILES: Final = ("recipe.yaml", "result.json", "plan.json")


@dataclass(frozen=True)
class EvalPoint:
    """An evaluation: the compared accuracy (0 to 1) and how much training preceded it; 0 if unknown.

    `loss` is None if it was NaN or infinite. `train_accuracy` and `train_loss` are of training images evaluated like
    validation images (`train.eval_train`); None without.
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
    """A run to compare. Missing values are empty; `problems` has a line per unreadable file.

    `settings` are the recipe's without its seed, as text by dotted path, with `ranks`, `device` and versions.
    `hardware` holds CPU, cores and GPUs as far as known. `code` identifies the run's plugins.
    """

    path: Path
    settings: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    ranks: int | None = None
    has_gpu: bool = False
    hardware: dict[str, str] = field(default_factory=dict)
    result: RunResult | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    evals: tuple[EvalPoint, ...] = ()
    steps: Series = field(default_factory=Series)
    code: PluginCode = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return clean_text(self.path.resolve().name, 60)

    @property
    def starved_share(self) -> float | None:
        """Return the share of time in which other processes held a CPU-starved run's cores; None for any other run."""
        return None if self.result is None else self.result.starved

    @property
    def status(self) -> str:
        """Return the status of the result, `unfinished` without one."""
        return "unfinished" if self.result is None else self.result.status


def read_compared_run(path: Path, metric: str) -> ComparedRun:
    """Read the run directory `path`, finished or not, for comparison by `metric`.

    Raise `PacelineError` if it is not a run directory.
    """
    rundir = RunDir(path)
    try:
        is_run = any((path / name).is_file() for name in _RUN_FILES)
        has_runs = is_experiment_dir(path)
    except OSError as error:
        raise PacelineError(f"{path}: cannot be read: {error.strerror} (name another run)") from None
    if has_runs:
        raise PacelineError(f"{path}: is an experiment (name its runs: {path}/trials/*)")
    if not is_run:
        raise PacelineError(f"{path}: is not a run directory (name one that paceline train has written)")
    reader = TolerantReader()
    result, problem = parse_result(reader.read_object(path / "result.json"))
    plan, machine = reader.read_object(path / "plan.json"), reader.read_object(path / "machine.json")
    settings, complaint = read_settings(reader.read_text(rundir.recipe, _MAX_RECIPE_BYTES))
    seed = settings.pop("seed", "")
    ranks = result.world_size if result is not None else _positive_int(plan.get("world_size"))
    device, has_gpu = _find_device(result, machine, settings)
    versions = {name: _one_line(machine.get(name, "")) for name in _VERSIONS}
    environment = {"ranks": str(ranks) if ranks else "", "device": device, **versions} if settings else {}
    records, _ = reader.read_sample(rundir.steps, _MAX_STEPS)
    return ComparedRun(
        path=path,
        settings={**settings, **{key: value for key, value in environment.items() if value}},
        seed=int(seed) if seed.isdecimal() else None,
        ranks=ranks,
        has_gpu=has_gpu,
        hardware=_find_hardware(machine, ranks, has_gpu),
        result=result,
        plan=plan,
        evals=tuple(_read_evals(islice(reader.read_records(rundir.evals), _MAX_EVALS), metric)),
        steps=downsample(records),
        code=_read_code(rundir, result, reader),
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
    """Return the device's name, and whether it is a GPU, estimated for an unfinished run."""
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


def _read_code(rundir: RunDir, result: RunResult | None, reader: TolerantReader) -> PluginCode:
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
