"""Log to TensorBoard, trackio, MLflow and Weights & Biases. Packages are imported only when they are configured."""

import contextlib
import importlib
import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from paceline.core.files import replace_file
from paceline.core.json_file import read_json
from paceline.core.results import FINISHED, RunResult
from paceline.core.run_dir import RunDir
from paceline.measure.throughput import unix_s
from paceline.recipe.plan import Plan
from paceline.recipe.schema.train import Mlflow, Trackio, Wandb
from paceline.recipe.yaml import to_yaml_text
from paceline.training.logging.async_sink import FLUSH_S
from paceline.training.logging.base import EvalRecord, LogSink, StepRecord, flatten_shares
from paceline.training.logging.files import read_history

RunConfig = Mapping[str, Any]
"""The recipe as nested plain values, with its hash as `recipe_hash`."""
PlainValue = str | int | float | bool | None
_MAX_PARAMS: Final = 100
"""MLflow's limit per request (https://mlflow.org/docs/latest/api_reference/rest-api.html#log-batch)."""
_ID_BYTES: Final = 4
"""As in W&B's own IDs: 8 characters."""
_FILE_STORE_VARIABLES: Final = ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY")
_INIT_TIMEOUT_S: Final = 30.0
"""Seconds for W&B's server to respond; training does not wait for it. Chosen; W&B's default is 90."""


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a logged step, without unmeasured ones."""
    return step_curves(record) | {
        "train/epoch": record.epoch,
        "train/images_seen": record.images_seen,
        "train/trained_s": record.trained_s,
    }


def step_curves(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a logged step that TensorBoard gets too."""
    curves = {"train/loss": record.loss, "train/lr": record.lr, "images_per_s": record.images_per_s}
    measured = {"train/top1": record.top1, "train/top5": record.top5}
    curves |= {name: value for name, value in measured.items() if value is not None}
    return curves | {f"stages/{name}": value for name, value in flatten_shares(record.stage_shares).items()}


def eval_metrics(record: EvalRecord) -> dict[str, float]:
    """Return the metrics of an evaluation, without unmeasured ones."""
    report = record.report
    values: dict[str, float | None] = {
        "eval/epoch": record.epoch,
        "eval/images_seen": record.images_seen,
        "eval/trained_s": record.trained_s,
        "eval/train_s": record.train_s,
        "eval/epoch_s": record.epoch_s,
        "eval/images_per_s": record.images_per_s,
        "eval/batch_top1": record.batch_top1,
        "eval/batch_top5": record.batch_top5,
        **{f"val/{name}": value for name, value in report.val.to_row("python").items()},
    }
    if report.ema is not None:
        values |= {f"ema/{name}": value for name, value in report.ema.to_row("python").items() if name != "images"}
    if report.train is not None and report.gap is not None:
        values |= {"train_eval/top1": report.train.top1, "train_eval/loss": report.train.loss, "gap": report.gap}
    return {name: value for name, value in values.items() if value is not None}


def flatten_result(result: RunResult) -> dict[str, PlainValue]:
    """Return the result as flat plain values, `throughput.images_per_s` and so on. Lists become JSON text."""
    return dict(flatten(result.model_dump(mode="json")))


def result_metrics(result: RunResult) -> dict[str, float]:
    """Return the numbers of a result as metrics, `result/throughput.images_per_s` and so on."""
    values = flatten_result(result).items()
    numbers = {name: value for name, value in values if isinstance(value, int | float) and not isinstance(value, bool)}
    return {f"result/{name}": float(value) for name, value in numbers.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, PlainValue]]:
    """Yield (dotted path, value) of each value in nested sections. A list is one value, as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", json.dumps(value)
        else:
            yield f"{prefix}{key}", value


class TensorBoardSink(LogSink):
    """Event files for TensorBoard."""

    def __init__(self, rundir: RunDir, config: RunConfig, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._config = config
        self._writer = SummaryWriter(str(rundir.tensorboard), purge_step=resume_step + 1)

    def started(self, plan: Plan, step: int) -> None:
        """Write the configuration as an indented Markdown code block."""
        text = to_yaml_text({**self._config, "world_size": plan.world_size})
        self._writer.add_text("recipe", "".join(f"    {line}" for line in text.splitlines(keepends=True)), step)

    def step(self, record: StepRecord) -> None:
        """Write loss, learning rate, images/s and, if measured, training accuracy and the shares of stages."""
        self._scalars(step_curves(record), record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Write the metrics of the raw and averaged weights, and on training images."""
        report = record.report
        for tag, result in (("val", report.val), ("ema", report.ema)):
            if result is not None:
                values = {name: each for name, each in result.to_row("python").items() if each is not None}
                del values["images"]
                self._scalars({f"{tag}/{name}": value for name, value in values.items()}, record.step)
        if report.train is not None and report.gap is not None:
            scalars = {"train_eval/top1": report.train.top1, "train_eval/loss": report.train.loss, "gap": report.gap}
            self._scalars(scalars, record.step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class TrackerRun:
    """`tracking.NAME.json` in the run directory: the ID of the run in a tracker, "" before there is one.

    A resumed run continues it. The steps since its checkpoint are sent again, with the same values.
    """

    def __init__(self, rundir: RunDir, name: str) -> None:
        self._path = rundir.path / f"tracking.{name}.json"
        self.title = rundir.path.resolve().name
        try:
            self.id = str(read_json(self._path)["run"])
        except (OSError, ValueError, KeyError, TypeError):
            self.id = ""

    def create(self, run_id: str = "") -> str:
        """Store the tracker's run ID, or generate one; return it."""
        self.id = run_id or secrets.token_hex(_ID_BYTES)
        with contextlib.suppress(OSError), replace_file(self._path) as file:  # a full disk costs a second run
            file.write(json.dumps({"run": self.id}).encode() + b"\n")
        return self.id


class TrackioSink(LogSink):
    """A trackio run. trackio identifies runs by name, so the name ends with an ID."""

    def __init__(self, section: Trackio, rundir: RunDir, config: RunConfig) -> None:
        self._trackio = importlib.import_module("trackio")
        self._section = section
        self._config = config
        self._tracker_run = TrackerRun(rundir, section.name)
        self._run: Any = None

    def started(self, plan: Plan, step: int) -> None:
        """Start a run, or resume the one of `TrackerRun`."""
        name = f"{self._tracker_run.title}-{self._tracker_run.id or self._tracker_run.create()}"
        _print_to_stderr()
        self._run = self._trackio.init(
            project=self._section.project,
            name=name,
            resume="allow",
            config={**self._config, "world_size": plan.world_size},
            embed=False,
            auto_log_gpu=False,  # `measure.telemetry` does
            auto_log_cpu=False,
        )

    def step(self, record: StepRecord) -> None:
        """Add a row."""
        self._run.log(step_metrics(record), step=record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Add a row."""
        self._run.log(eval_metrics(record), step=record.step)

    def finished(self, result: RunResult) -> None:
        """Add the numbers of the result as a row, unless the run was preempted."""
        if result.status != "preempted":
            self._run.log(result_metrics(result), step=result.steps)

    def close(self) -> None:
        """Flush and finish."""
        _print_to_stderr()  # it may have imported further modules
        self._run.finish()


def _print_to_stderr() -> None:
    """Redirect `print` in trackio's modules to stderr."""
    # trackio prints progress to stdout, which carries paceline's output. `sys.stdout` itself is shared by all threads.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            vars(module)["print"] = partial(print, file=sys.stderr)


class MlflowSink(LogSink):
    """An MLflow run in the section's experiment.

    Its parameters are the recipe at the first start; MLflow does not allow changes.
    """

    def __init__(self, section: Mlflow, rundir: RunDir, config: RunConfig) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._section = section
        self._rundir = rundir
        self._config = config
        self._tracker_run = TrackerRun(rundir, section.name)
        self._client: Any = None
        self._status = "FAILED"

    def started(self, plan: Plan, step: int) -> None:
        """Start a run, or resume the one of `TrackerRun`."""
        self._client = _create_client(self._mlflow, self._rundir)
        if self._tracker_run.id:
            self._client.update_run(self._tracker_run.id, status="RUNNING")
            return
        run = self._client.create_run(self._experiment_id(), run_name=self._tracker_run.title)
        self._tracker_run.create(run.info.run_id)
        named = iter(flatten({**self._config, "world_size": plan.world_size}))
        while params := [self._entities.Param(name, str(value)) for name, value in islice(named, _MAX_PARAMS)]:
            self._client.log_batch(self._tracker_run.id, params=params)

    def step(self, record: StepRecord) -> None:
        """Add a point to each curve."""
        self._log_metrics(step_metrics(record), record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Add a point to each curve."""
        self._log_metrics(eval_metrics(record), record.step)

    def finished(self, result: RunResult) -> None:
        """Add `result.json` as an artifact, and its numbers unless the run was preempted."""
        self._client.log_dict(self._tracker_run.id, result.model_dump(mode="json"), "result.json")
        if result.status == "preempted":
            self._status = "KILLED"
            return
        self._status = "FINISHED"
        self._log_metrics(result_metrics(result), result.steps)

    def close(self) -> None:
        """Set the final status."""
        self._client.set_terminated(self._tracker_run.id, status=self._status)

    def _experiment_id(self) -> str:
        name = self._section.experiment
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _log_metrics(self, values: Mapping[str, float], step: int) -> None:
        now_ms = int(unix_s() * 1000)
        metrics: Sequence[Any] = [self._entities.Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._tracker_run.id, metrics=metrics)


def _create_client(mlflow: Any, rundir: RunDir) -> Any:
    """Return a client for the configured store, or for files in the run directory."""
    if mlflow.is_tracking_uri_set():
        return mlflow.MlflowClient()
    variables = vars(importlib.import_module("mlflow.environment_variables"))
    for name in _FILE_STORE_VARIABLES:
        if name in variables:  # older releases need neither
            variables[name].set(True)
    if _FILE_STORE_VARIABLES[1] in variables:
        importlib.import_module("mlflow.telemetry").set_telemetry_client()  # disables it
    return mlflow.MlflowClient(tracking_uri=(rundir.path.resolve() / "mlruns").as_uri())


# W&B is configured to print nothing, to limit upload time, and not to collect code, git state or system metrics (see
# `measure.telemetry`). Offline, each process of a run has its own folder, which W&B syncs as the whole run: the last
# one synced replaces the others (https://github.com/wandb/wandb/issues/3841), so each process logs the complete run.
class WandbSink(LogSink):
    """A W&B run with W&B's own steps. The exit code is 0 for a finished run, else 1."""

    def __init__(self, section: Wandb, rundir: RunDir, config: RunConfig) -> None:
        self._wandb = importlib.import_module("wandb")
        self._section = section
        self._rundir = rundir
        self._config = config
        self._tracker_run = TrackerRun(rundir, section.name)
        self._run: Any = None
        self._exit_code = 1

    def started(self, plan: Plan, step: int) -> None:
        """Start a run, or resume the one of `TrackerRun`."""
        section = self._section
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            finish_timeout=FLUSH_S,
            init_timeout=_INIT_TIMEOUT_S,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
        )
        mode = resolve_wandb_mode(self._wandb, settings, section.mode)
        if mode == "offline":  # for the whole process: W&B would send telemetry otherwise
            self._wandb.setup(settings=self._wandb.Settings(mode=mode))
        run_id = self._tracker_run.id or self._tracker_run.create()
        self._run = self._wandb.init(
            project=section.project,
            entity=None if section.entity == "auto" else section.entity,
            name=self._tracker_run.title,
            id=run_id,
            resume=None if mode == "offline" else "allow",
            dir=str(self._rundir.path),
            config={**self._config, "world_size": plan.world_size},
            mode=mode,
            reinit="create_new",  # do not end a run that other code has in this process
            settings=settings,
        )
        for record in read_history(self._rundir, step) if mode == "offline" else ():
            if isinstance(record, StepRecord):
                self.step(record)
            else:
                self.evaluated(record)

    def step(self, record: StepRecord) -> None:
        """Add a row to the history."""
        self._run.log(step_metrics(record), step=record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Add to the row of the step, or a new row."""
        self._run.log(eval_metrics(record), step=record.step)

    def finished(self, result: RunResult) -> None:
        """Write the result to the summary."""
        self._run.summary.update({f"result/{name}": value for name, value in flatten_result(result).items()})
        self._exit_code = 0 if result.status in FINISHED else 1
        if result.status == "preempted":
            self._run.mark_preempting()

    def close(self) -> None:
        """Flush and finish."""
        self._run.finish(exit_code=self._exit_code)


def resolve_wandb_mode(wandb: Any, settings: Any, mode: str) -> str:
    """Return the W&B mode for the recipe's mode `mode`.

    `auto` is the mode of W&B's settings (WANDB_MODE, `wandb offline`). If that is the default, online, it requires
    credentials (WANDB_API_KEY, settings, netrc), and is offline without them.
    """
    if mode != "auto":
        return mode
    configured: str = wandb.setup(settings=settings).settings.mode
    if configured != "online":
        return configured
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
