"""Build the log sinks of a recipe."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.core.console import report_lost_consoles
from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.recipe.plugins import SINK, PluginRef
from paceline.recipe.schema.recipe import Recipe
from paceline.recipe.schema.train import Log, Mlflow, OwnSink, SinkSection, Trackio, Wandb
from paceline.training.logging.async_sink import FLUSH_S, STARTUP_S, AsyncSink, DedupSink, TimeBudget, TrackerState
from paceline.training.logging.base import LogSink, SinkGroup, eval_columns
from paceline.training.logging.files import FileSink, SafeSink, read_history
from paceline.training.logging.trackers import TensorBoardSink


def build_sinks(
    rundir: RunDir, recipe: Recipe, resume_step: int, extra: Sequence[LogSink], *, last_eval: int | None = None
) -> SinkGroup:
    """Return rank 0's sinks: files, TensorBoard, trackers, and `extra` ones such as the terminal's."""
    # A full disk or a lost console does not end the run: each warns through the other.
    consoles: list[LogSink] = []
    files = SafeSink(
        FileSink(rundir, resume_step, eval_columns(recipe.train, recipe.optim), last_eval=last_eval),
        SinkGroup(consoles),
    )
    consoles.extend(SafeSink(each, files, "console") for each in extra)
    report_lost_consoles(files.warned)
    async_sinks = _AsyncSinkBuilder(SinkGroup([files, *consoles]).warned, TimeBudget(FLUSH_S), TimeBudget(STARTUP_S))
    trackers = []
    if recipe.log.tensorboard != "off" and _is_installed("tensorboard"):
        trackers.append(async_sinks.build("log.tensorboard", partial(TensorBoardSink, rundir, recipe, resume_step)))
    for position, section in enumerate(recipe.log.sinks):
        path = f"log.sinks[{position}]"
        make = partial(_build_dedup_tracker, section, path, rundir, recipe)
        trackers.append(async_sinks.build(f"{path}: {section.name}", make))
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


def build_tracker(section: SinkSection, path: str, rundir: RunDir, recipe: Recipe, state: TrackerState) -> LogSink:
    """Import the package of `section` (at `path` of the recipe), and return its sink."""
    match section:
        case Wandb():
            from paceline.training.logging.trackers import WandbSink

            return WandbSink(section, rundir, recipe, state)
        case Mlflow():
            from paceline.training.logging.trackers import MlflowSink

            return MlflowSink(section, rundir, recipe, state)
        case Trackio():
            from paceline.training.logging.trackers import TrackioSink

            return TrackioSink(section, recipe, state)
        case OwnSink():
            sink: LogSink = PluginRef(path, section.name, section.args, SINK).make(run_dir=rundir.path)
            return sink


def _build_dedup_tracker(section: SinkSection, path: str, rundir: RunDir, recipe: Recipe) -> LogSink:
    """Return a tracker that receives no record twice."""
    state = TrackerState(rundir, section.name)
    return DedupSink(build_tracker(section, path, rundir, recipe, state), state, partial(read_history, rundir))


@dataclass(frozen=True)
class _AsyncSinkBuilder:
    """Common arguments of all sinks that run in a thread."""

    warn: Callable[[str], None]
    close_budget: TimeBudget
    startup_budget: TimeBudget

    def build(self, name: str, make: Callable[[], LogSink]) -> AsyncSink:
        return AsyncSink(make, name, self.warn, self.close_budget, self.startup_budget)


def _is_installed(package: str) -> bool:
    """Return whether `package` can be imported, without importing it. A bare folder of that name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
