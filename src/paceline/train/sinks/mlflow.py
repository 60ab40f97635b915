"""MLflow: one tracker run for all processes of a run, through the client API without global state.

Without MLFLOW_TRACKING_URI it writes to `mlruns` in the run directory. MLflow requires consent for such file stores,
and its telemetry is disabled then.
"""

import importlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.measure.rate import unix_s
from paceline.recipe.plan import Plan
from paceline.recipe.schema.log import Mlflow
from paceline.recipe.schema.recipe import Recipe
from paceline.train.logsink import EvalRecord, StepRecord
from paceline.train.sinks.note import TrackerState
from paceline.train.sinks.values import eval_metrics, flatten, result_metrics, run_config, step_metrics

_MAX_PARAMS: Final = 100
"""Most parameters per request that MLflow accepts (https://mlflow.org/docs/latest/api_reference/rest-api.html#log-batch)."""
_FILE_STORE_VARIABLES: Final = ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY")


class MlflowSink:
    """An MLflow run in the section's experiment.

    Its parameters are the recipe at the first start; MLflow does not allow changes.
    """

    def __init__(self, section: Mlflow, rundir: RunDir, recipe: Recipe, state: TrackerState) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._section = section
        self._rundir = rundir
        self._recipe = recipe
        self._tracker_state = state
        self._client: Any = None
        self._status = "FAILED"

    def started(self, plan: Plan, step: int) -> None:
        """Start a run, or resume the one of `note`."""
        self._client = _create_client(self._mlflow, self._rundir)
        if not self._tracker_state.is_new:
            self._client.update_run(self._tracker_state.run_id, status="RUNNING")
            return
        run = self._client.create_run(self._experiment_id(), run_name=self._tracker_state.title)
        self._tracker_state.set_run_id(run.info.run_id)
        named = iter(flatten(run_config(self._recipe, plan)))
        while params := [self._entities.Param(name, str(value)) for name, value in islice(named, _MAX_PARAMS)]:
            self._client.log_batch(self._tracker_state.run_id, params=params)

    def step(self, record: StepRecord) -> None:
        """Add a point to each curve."""
        self._log_metrics(step_metrics(record), record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Add a point to each curve."""
        self._log_metrics(eval_metrics(record), record.step)

    def warned(self, message: str) -> None:
        """Do nothing."""

    def finished(self, result: RunResult) -> None:
        """Add `result.json` as an artifact, and its numbers unless the run was preempted."""
        self._client.log_dict(self._tracker_state.run_id, result.model_dump(mode="json"), "result.json")
        if result.status == "preempted":
            self._status = "KILLED"
            return
        self._status = "FINISHED"
        self._log_metrics(result_metrics(result), result.steps)

    def close(self) -> None:
        """Set the final status."""
        self._client.set_terminated(self._tracker_state.run_id, status=self._status)

    def _experiment_id(self) -> str:
        name = self._section.experiment
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _log_metrics(self, values: Mapping[str, float], step: int) -> None:
        now_ms = int(unix_s() * 1000)
        metrics: Sequence[Any] = [self._entities.Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._tracker_state.run_id, metrics=metrics)


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
