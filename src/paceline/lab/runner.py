"""Run trials one at a time in child processes, and leave none behind."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.lab.child import ProcessStarter, extract_error, start_process, terminate_process
from paceline.lab.earlier import ReusePolicy
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, build_train_command
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

_EXIT_FAILED: Final = 1
_COMPLETED_STATUSES: Final = ("completed", "target_reached")


class TrialError(PacelineError):
    """A trial that the experiment cannot do without has failed; paceline exits with the trial's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def _do_nothing(trial: Trial, repeat: int) -> None:
    """Do nothing before a run."""


@dataclass(frozen=True)
class TrialRunner:
    """Runs trials of the recipe in `recipe_file`, on `ranks` ranks unless the trial sets its own number.

    `get_folder` returns the run directory of a repeat, and `before_run` is called before each run, for example to prepare the
    page cache. With `reuse_policy`, existing runs are reused if they are still valid, and leftovers of killed runs are
    removed. A run fails if it takes longer than `timeout_s` seconds, or if it has no measured steps while `needs_speed`
    is set. `oversubscribe` allows more ranks than the machine would normally get.
    """

    recipe: Recipe
    recipe_file: Path
    ranks: int
    get_folder: Callable[[Trial, int], Path]
    before_run: Callable[[Trial, int], None] = _do_nothing
    spawn: ProcessStarter = start_process
    reuse_policy: ReusePolicy | None = None
    timeout_s: float | None = None
    needs_speed: bool = True
    oversubscribe: bool = False

    def run(self, trial: Trial, repeat: int) -> TrialOutcome:
        """Run a trial once and return its outcome.

        Terminates the child process if interrupted. Raise `TrialError` if another process is still writing the run, or
        if an existing run cannot be checked for validity.
        """
        if self.reuse_policy is not None:
            known = self._find_reusable(self.reuse_policy, trial, repeat)
            if known is not None:
                return known
        rundir = RunDir(self.get_folder(trial, repeat))
        self.before_run(trial, repeat)
        options = ["--oversubscribe"] if self.oversubscribe else []
        command = build_train_command(trial, self.recipe, self.recipe_file, self.get_ranks(trial), rundir.path, options)
        return self._run_command(trial, repeat, rundir, command)

    def find_existing(self, trial: Trial, repeat: int) -> TrialOutcome | None:
        """Return the outcome of a completed run that exists, of the same recipe and number of ranks, or None."""
        rundir = RunDir(self.get_folder(trial, repeat))
        try:
            result = rundir.read_result()
        except PacelineError:
            return None
        ranks = self.get_ranks(trial)
        recipe = resolve_batch(apply_patch(self.recipe, trial.patch), ranks)
        is_same = result.recipe_hash == recipe.hash and result.world_size == ranks
        is_complete = result.status in _COMPLETED_STATUSES and not self._lacks_speed(result)
        return TrialOutcome(trial, repeat, rundir, result, is_reused=True) if is_same and is_complete else None

    def _find_reusable(self, earlier: ReusePolicy, trial: Trial, repeat: int) -> TrialOutcome | None:
        """Return the outcome of a valid existing run; otherwise make room for a new one and return None."""
        known = self.find_existing(trial, repeat)
        with _raise_as_trial_error():
            reasons = (
                [] if known is None else earlier.find_differences(known, self.recipe, self.get_ranks(trial), self.spawn)
            )
        if known is not None and not reasons:
            return known
        rundir = RunDir(self.get_folder(trial, repeat))
        if rundir.path.exists():
            with _raise_as_trial_error():
                with rundir.lock():
                    pass  # release it before moving: on NFS an open file keeps its folder
                if known is not None:
                    earlier.archive(known, reasons)
            if known is None:
                shutil.rmtree(rundir.path)
        return None

    def get_ranks(self, trial: Trial) -> int:
        """Return the number of ranks of a trial."""
        return self.ranks if trial.ranks is None else trial.ranks

    def _lacks_speed(self, result: RunResult) -> bool:
        return self.needs_speed and not result.throughput.images_per_s > 0

    def _run_command(self, trial: Trial, repeat: int, rundir: RunDir, command: Sequence[str]) -> TrialOutcome:
        process = self.spawn(command)
        try:
            stderr = process.communicate(timeout=self.timeout_s)[1] or ""
        except subprocess.TimeoutExpired:
            why = f"was terminated after {self.timeout_s:,.0f} s"
            return TrialOutcome(trial, repeat, rundir, None, why, _EXIT_FAILED)
        finally:
            terminate_process(process)
        code = process.returncode
        if code:
            return TrialOutcome(
                trial, repeat, rundir, None, extract_error(stderr, code), code if code > 0 else _EXIT_FAILED, stderr
            )
        try:
            result = rundir.read_result()
        except PacelineError as error:
            return TrialOutcome(trial, repeat, rundir, None, str(error), _EXIT_FAILED, stderr)
        if self._lacks_speed(result):
            why = "no step was measured after the first measure.warmup_steps (train for longer, or set fewer)"
            return TrialOutcome(trial, repeat, rundir, None, why, _EXIT_FAILED, stderr)
        return TrialOutcome(trial, repeat, rundir, result, stderr=stderr)


@contextlib.contextmanager
def _raise_as_trial_error() -> Iterator[None]:
    """Context manager: convert errors to `TrialError`, as they say nothing about the trial and may be transient."""
    try:
        yield
    except PacelineError as error:
        raise TrialError(str(error), error.exit_code) from None


@contextlib.contextmanager
def interrupt_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Context manager: make these signals interrupt like Ctrl-C, so that child processes are terminated."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
