"""The life of an experiment, for all verbs of the lab: open its folder, run, conclude, and resume."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from paceline.cli.args import count_ranks
from paceline.cli.options import (
    BatchStudyOptions,
    CvOptions,
    LadderOptions,
    LrFindOptions,
    ProfileOptions,
    ScaleOptions,
    TuneOptions,
)
from paceline.cli.progress_output import OnRunStart, PrintLine, progress_output
from paceline.cli.ranks import refuse_too_many
from paceline.cli.start_line import announce, describe_hardware
from paceline.core.console import progress_console
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import Experiment, ExperimentDir, open_experiment
from paceline.core.experiments.results import RungResult, ScalePoint
from paceline.core.experiments.task_lock import lock_task
from paceline.core.run_dir import RunDir, run_lock
from paceline.core.units import per_second
from paceline.data.files import printable
from paceline.lab.patches import TINY_LR_SHARE, build_measurement_patch
from paceline.lab.repeat import ArrayTask
from paceline.lab.runner import RUN_TIMEOUT_S, ReusePolicy, TrialError, TrialRunner, interrupt_on_signals
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, build_run_name, write_recipe
from paceline.models.weights_recipe import with_weights_defaults
from paceline.parallel.environ import world_from_environ
from paceline.recipe.consent import require_consent
from paceline.recipe.load import LoadedRecipe, Patch, load
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

RowT = TypeVar("RowT", RungResult, ScalePoint)
ExperimentOptions = (
    LadderOptions | ScaleOptions | BatchStudyOptions | TuneOptions | ProfileOptions | LrFindOptions | CvOptions
)


@dataclass(frozen=True)
class Session:
    """Folder of a running experiment, a callback for the start of each run, and one that prints a line."""

    folder: ExperimentDir
    on_start: OnRunStart
    print_line: PrintLine


@dataclass(frozen=True)
class ShortRuns:
    """The short runs of an experiment; `recipe` is `loaded` with the settings of a measurement."""

    loaded: LoadedRecipe
    recipe: Recipe
    ranks: int
    steps: int
    repeats: int
    oversubscribe: bool

    @property
    def total_steps(self) -> int:
        """Steps of each run, those of the measurement warm-up included."""
        return self.recipe.measure.warmup_steps + self.steps

    @property
    def result_fields(self) -> dict[str, Any]:
        """Fields that the results of all experiments of short runs have."""
        return {
            "recipe": self.loaded.name,
            "recipe_hash": self.loaded.recipe.hash,
            "ranks": self.ranks,
            "steps": self.steps,
            "warmup_steps": self.recipe.measure.warmup_steps,
            "repeats": self.repeats,
            "command": ("paceline", *sys.argv[1:]),
        }

    def build_runner(
        self, session: Session, before_run: Callable[[Trial], None] | None = None, *, is_timed: bool = True
    ) -> TrialRunner:
        """Write the recipes, and return the runner. `before_run` reads a trial's files into the page cache.

        Runs that are not timed may take any time, and may share their cores.
        """
        folder, warm_cache = session.folder, before_run or self._warm_cache
        write_recipe(self.loaded.recipe, folder.recipe)
        write_recipe(self.recipe, folder.measured)

        def before(trial: Trial, repeat: int) -> None:
            session.on_start(trial, repeat)
            if is_timed:
                warm_cache(trial)

        return TrialRunner(
            self.recipe,
            folder.measured,
            self.ranks,
            get_folder=lambda trial, repeat: (
                folder.trials / build_run_name(trial, self.recipe, trial.ranks or self.ranks, repeat)
            ),
            before_run=before,
            reuse_policy=ReusePolicy(folder.replaced, session.print_line, is_timed=is_timed),
            timeout_s=RUN_TIMEOUT_S if is_timed else None,
            needs_speed=is_timed,
            oversubscribe=self.oversubscribe,
        )

    def _warm_cache(self, trial: Trial) -> None:
        from paceline.lab.page_cache import prepare_page_cache

        # Otherwise the first run would read the files from disk, and all others from memory.
        with contextlib.suppress(PacelineError):  # the run will report it
            prepare_page_cache(apply_patch(self.recipe, trial.patch), is_cold=False)


def plan_short_runs(
    name: str,
    overrides: Patch,
    options: TuneOptions | ProfileOptions | LrFindOptions,
    *,
    lr_share: float = TINY_LR_SHARE,
    build_patch: Callable[[Recipe], Patch] | None = None,
) -> ShortRuns:
    """Return the short runs of a recipe on the ranks of this machine. Raise `PacelineError` if they cannot be started.

    `lr_share` is the learning rate as a share of its peak. `build_patch` returns what turns the recipe into a run, in
    place of that of a measurement.
    """
    loaded, ranks = load_for_ranks(name, overrides, options)
    refuse_too_many(ranks, loaded.recipe.parallel.device, oversubscribe=options.oversubscribe)
    if build_patch is None:
        patch = build_measurement_patch(loaded.recipe, options.steps, overrides, lr_share=lr_share)
    else:
        patch = build_patch(loaded.recipe)
    recipe = apply_patch(loaded.recipe, patch)
    return ShortRuns(loaded, recipe, ranks, options.steps, options.repeats, options.oversubscribe)


def load_for_ranks(
    name: str, overrides: Patch, options: TuneOptions | ProfileOptions | LrFindOptions | CvOptions
) -> tuple[LoadedRecipe, int]:
    """Return a recipe with its batch size on `options.ranks`, `auto` being those of this machine, and their number.

    Raise `PacelineError` if it cannot be loaded.
    """
    loaded = with_weights_defaults(load(name, overrides))
    require_consent(loaded, trust_code=options.trust_code)
    ranks = count_ranks(options.ranks, os.environ)
    return replace(loaded, recipe=resolve_batch(loaded.recipe, ranks)), ranks


def refuse_launcher(verb: str, fix: str = "start it without a launcher, with --ranks") -> None:
    """Raise `RecipeError` if torchrun or Slurm started this process: `verb` starts its own ranks."""
    launcher = world_from_environ(os.environ).launcher
    if launcher != "single":
        raise RecipeError(f"{verb}: starts its own ranks, but {launcher} started this process ({fix})")


def run_experiment(
    name: str,
    request: dict[str, Any],
    options: ExperimentOptions,
    run: Callable[[Session], Experiment | None],
    *,
    total: int | None = None,
    length: str = "short",
) -> int:
    """Run an experiment in its folder unless it finished earlier, print its result, and return 0.

    `request` is all that the runs depend on, and `total` the number of runs, None if unknown. An experiment of which
    `run` returns None stays unfinished.
    """
    announce(f"{name}: {length} runs on {describe_hardware()}")
    with locked_experiment(name, request, options.run_dir, as_json=options.as_json) as folder:
        if folder.result.exists():
            result = folder.read()
        else:
            with _session(folder, options, total) as session:
                unfinished = run(session)
            if unfinished is None:
                return 0
            result = unfinished
            finish_experiment(folder, result)
    show_experiment(result, folder, as_json=options.as_json)
    return 0


@contextlib.contextmanager
def locked_experiment(
    name: str, request: dict[str, Any], run_dir: Path | None, *, as_json: bool
) -> Iterator[ExperimentDir]:
    """Return a context that locks an experiment's folder: a new one, or an unfinished one of the same request.

    An interrupt prints how to resume.
    """
    out = progress_console(as_json=as_json)
    folder = _open_folder(name, request, run_dir, lambda line: print(line, file=out, flush=True))
    # Which of its runs still count is decided per run, by `ReusePolicy`.
    with run_lock(folder.path), _print_resume_hint(folder):
        yield folder


def run_task(
    request: dict[str, Any],
    options: ExperimentOptions,
    task: ArrayTask,
    run: Callable[[Session], Sequence[TrialOutcome]],
) -> int:
    """Run one task of an experiment in its shared folder, without a conclusion, and return 0.

    A finished experiment runs nothing. Raise `RecipeError` if the folder is not named or holds something else, or if
    the task or the whole experiment is running.
    """
    if options.run_dir is None:
        raise RecipeError("--task: runs in a folder that all tasks share (add --run-dir DIR)")
    folder = _open_folder("", request, options.run_dir, lambda line: None)
    outcomes: Sequence[TrialOutcome] = ()
    with lock_task(folder.path, task.number), _print_resume_hint(folder), _session(folder, options) as session:
        if folder.result.exists():
            session.print_line(f"{folder.path}: has finished, so task {task.number} is not run")
        else:
            outcomes = run(session)
    if options.as_json:
        runs = [each.rundir.path.relative_to(folder.path).as_posix() for each in outcomes if each.result is not None]
        print(json.dumps({"task": task.number, "what": task.description, "runs": runs}, indent=2))
    return 0


@contextlib.contextmanager
def _session(folder: ExperimentDir, options: ExperimentOptions, total: int | None = None) -> Iterator[Session]:
    out = progress_console(as_json=options.as_json)
    with interrupt_on_signals(), progress_output(out, total) as (on_start, print_line):
        yield Session(folder, on_start, print_line)


def _open_folder(name: str, request: dict[str, Any], run_dir: Path | None, print_line: PrintLine) -> ExperimentDir:
    # A run that stops early at the end of the job would count as failed; the job's signal stops the whole experiment.
    os.environ["PACELINE_END_TIME"] = ""
    return open_experiment(name, request, run_dir, datetime.now().astimezone(), print_line)


@contextlib.contextmanager
def _print_resume_hint(folder: ExperimentDir) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: run the same command to resume {printable(folder.path)}", file=sys.stderr)
        raise


def finish_experiment(folder: ExperimentDir, result: Experiment) -> None:
    """Write tables, result and report, and remove generated data."""
    from paceline.cli.report import try_write_report
    from paceline.report.experiment_tables import write_tables

    shutil.rmtree(folder.data, ignore_errors=True)
    write_tables(folder, result)
    # Last but the report: the result file marks the experiment as complete.
    folder.write(result)
    try_write_report(RunDir(folder.path))


def with_steps_time(row: RowT, num_steps: int) -> RowT:
    """Return a rung or a point of a scaling with the time of all measured steps."""
    return row if row.step_s is None else row.model_copy(update={"steps_s": num_steps * row.step_s})


def show_experiment(result: Experiment, folder: ExperimentDir, *, as_json: bool) -> None:
    """Print the summary of an experiment's report, and its folder."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    from paceline.report.experiment_tables import build_experiment_page
    from paceline.report.render_terminal import print_page

    print_page(build_experiment_page(folder, result))
    print(f"folder: {printable(folder.path)}")
    if folder.report.is_file():
        print(f"report: {printable(folder.report)}")


def describe_outcome(outcome: TrialOutcome, num_repeats: int) -> str:
    """Return a line with the speed of a run, or its error."""
    name = outcome.trial.name + (f", repeat {outcome.repeat}" if num_repeats > 1 else "")
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    images_per_s = outcome.result.throughput.images_per_s
    return f"{name}: " + (
        f"{per_second(images_per_s)} images/s" if images_per_s > 0 else "no step was counted after measure.warmup_steps"
    )


def raise_failed(outcome: TrialOutcome) -> NoReturn:
    """Raise `TrialError` for a run that failed."""
    if outcome.exit_code == 1:  # a bug of paceline's: print its traceback too
        lines = (line for line in outcome.stderr.splitlines() if not line.startswith("error: "))
        print(*lines, sep="\n", file=sys.stderr)
    raise TrialError(outcome.error, outcome.exit_code)
