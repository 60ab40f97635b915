"""Build the log sinks of a recipe."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

from paceline.core.console import report_lost_consoles
from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.recipe.plugins import SINK, PluginRef
from paceline.recipe.schema.recipe import Recipe
from paceline.recipe.schema.train import Log, Mlflow, OwnSink, SinkSection, Trackio, Wandb
from paceline.training.logging.async_sink import FLUSH_S, STARTUP_S, AsyncSink, TimeBudget
from paceline.training.logging.base import LogSink, SinkGroup, eval_columns
from paceline.training.logging.files import FileSink, SafeSink
from paceline.training.logging.trackers import MlflowSink, RunConfig, TensorBoardSink, TrackioSink, WandbSink


def build_sinks(
    rundir: RunDir,
    recipe: Recipe,
    resume_step: int,
    extra: Sequence[LogSink],
    *,
    last_eval: int | None = None,
    is_multi_label: bool = False,
) -> SinkGroup:
    """Return rank 0's sinks: files, TensorBoard, trackers, and `extra` ones such as the terminal's."""
    # A full disk or a lost console does not end the run: each warns through the other.
    consoles: list[LogSink] = []
    columns = eval_columns(recipe.train, recipe.optim, is_multi_label=is_multi_label)
    files = SafeSink(FileSink(rundir, resume_step, columns, last_eval=last_eval), SinkGroup(consoles))
    consoles.extend(SafeSink(each, files, "console") for each in extra)
    report_lost_consoles(files.warned)
    budgets = TimeBudget(FLUSH_S), TimeBudget(STARTUP_S)

    def run_async(name: str, make: Callable[[], LogSink]) -> AsyncSink:
        return AsyncSink(make, name, SinkGroup([files, *consoles]).warned, *budgets)

    config = {**recipe.to_dict(), "recipe_hash": recipe.hash}
    trackers = []
    if recipe.log.tensorboard != "off" and _is_installed("tensorboard"):
        trackers.append(run_async("log.tensorboard", partial(TensorBoardSink, rundir, config, resume_step)))
    for position, section in enumerate(recipe.log.sinks):
        path = f"log.sinks[{position}]"
        trackers.append(run_async(f"{path}: {section.name}", partial(build_tracker, section, path, rundir, config)))
    return SinkGroup([files, *trackers, *consoles], [tracker.request_close for tracker in trackers])


def require_sinks(log: Log) -> None:
    """Raise `RecipeError` for configured packages that are not installed."""
    # `recipe.plugins` checks custom sinks.
    if log.tensorboard == "on" and not _is_installed("tensorboard"):
        raise RecipeError("log.tensorboard: on, but it is not installed (pip install 'paceline[tensorboard]')")
    for position, section in enumerate(log.sinks):
        if not isinstance(section, OwnSink) and not _is_installed(section.name):
            fix = f"pip install 'paceline[{section.name}]', or leave it out"
            raise RecipeError(f"log.sinks[{position}]: {section.name} is not installed ({fix})")


def build_tracker(section: SinkSection, path: str, rundir: RunDir, config: RunConfig) -> LogSink:
    """Import the package of `section` (at `path` of the recipe), and return its sink."""
    match section:
        case Wandb():
            return WandbSink(section, rundir, config)
        case Mlflow():
            return MlflowSink(section, rundir, config)
        case Trackio():
            return TrackioSink(section, rundir, config)
        case OwnSink():
            sink: LogSink = PluginRef(path, section.name, section.args, SINK).make(run_dir=rundir.path)
            return sink


def _is_installed(package: str) -> bool:
    """Return whether `package` can be imported, without importing it. A bare folder of that name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
