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
from paceline.lab.child import Start, complaint, end, start_process
from paceline.lab.earlier import Earlier
from paceline.lab.trial import Outcome, Trial, command_of, vary
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

_FAILED: Final = 1
_ENDED: Final = ("completed", "target_reached")


class TrialError(PacelineError):
    """A trial that the experiment cannot do without has failed; paceline exits with the trial's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def _nothing(trial: Trial, repeat: int) -> None:
    """Do nothing before a run."""


@dataclass(frozen=True)
class Runner:
    """Runs trials of the recipe in `recipe_file`, on `ranks` ranks unless the trial sets its own number.

    `place` returns the run directory of a repeat, and `begins` is called before each run, for example to prepare the
    page cache. With `earlier`, existing runs are reused if they are still valid, and leftovers of killed runs are
    removed. A run fails if it takes longer than `limit_s` seconds, or if it has no measured steps while `needs_speed`
    is set. `oversubscribe` allows more ranks than the machine would normally get.
    """

    recipe: Recipe
    recipe_file: Path
    ranks: int
    place: Callable[[Trial, int], Path]
    begins: Callable[[Trial, int], None] = _nothing
    start: Start = start_process
    earlier: Earlier | None = None
    limit_s: float | None = None
    needs_speed: bool = True
    oversubscribe: bool = False

    def run(self, trial: Trial, repeat: int) -> Outcome:
        """Run a trial once and return its outcome.

        Terminates the child process if interrupted. Raise `TrialError` if another process is still writing the run, or
        if an existing run cannot be checked for validity.
        """
        if self.earlier is not None:
            known = self._still_counts(self.earlier, trial, repeat)
            if known is not None:
                return known
        rundir = RunDir(self.place(trial, repeat))
        self.begins(trial, repeat)
        options = ["--oversubscribe"] if self.oversubscribe else []
        command = command_of(trial, self.recipe, self.recipe_file, self.ranks_of(trial), rundir.path, options)
        return self._run(trial, repeat, rundir, command)

    def known(self, trial: Trial, repeat: int) -> Outcome | None:
        """Return the outcome of a completed run that exists, of the same recipe and number of ranks, or None."""
        rundir = RunDir(self.place(trial, repeat))
        try:
            result = rundir.read_result()
        except PacelineError:
            return None
        ranks = self.ranks_of(trial)
        recipe = resolve_batch(vary(self.recipe, trial.patch), ranks)
        is_same = result.recipe_hash == recipe.hash and result.world_size == ranks
        is_complete = result.status in _ENDED and not self._lacks_speed(result)
        return Outcome(trial, repeat, rundir, result, is_known=True) if is_same and is_complete else None

    def _still_counts(self, earlier: Earlier, trial: Trial, repeat: int) -> Outcome | None:
        """Return the outcome of a valid existing run; otherwise make room for a new one and return None."""
        known = self.known(trial, repeat)
        with _no_verdict():
            reasons = [] if known is None else earlier.others(known, self.recipe, self.ranks_of(trial), self.start)
        if known is not None and not reasons:
            return known
        rundir = RunDir(self.place(trial, repeat))
        if rundir.path.exists():
            with _no_verdict():
                with rundir.lock():
                    pass  # release it before moving: on NFS an open file keeps its folder
                if known is not None:
                    earlier.put_away(known, reasons)
            if known is None:
                shutil.rmtree(rundir.path)
        return None

    def ranks_of(self, trial: Trial) -> int:
        """Return the number of ranks of a trial."""
        return self.ranks if trial.ranks is None else trial.ranks

    def _lacks_speed(self, result: RunResult) -> bool:
        return self.needs_speed and not result.throughput.images_per_s > 0

    def _run(self, trial: Trial, repeat: int, rundir: RunDir, command: Sequence[str]) -> Outcome:
        process = self.start(command)
        try:
            stderr = process.communicate(timeout=self.limit_s)[1] or ""
        except subprocess.TimeoutExpired:
            why = f"was terminated after {self.limit_s:,.0f} s"
            return Outcome(trial, repeat, rundir, None, why, _FAILED)
        finally:
            end(process)
        code = process.returncode
        if code:
            return Outcome(trial, repeat, rundir, None, complaint(stderr, code), code if code > 0 else _FAILED, stderr)
        try:
            result = rundir.read_result()
        except PacelineError as error:
            return Outcome(trial, repeat, rundir, None, str(error), _FAILED, stderr)
        if self._lacks_speed(result):
            why = "no step was measured after the first measure.warmup_steps (train for longer, or set fewer)"
            return Outcome(trial, repeat, rundir, None, why, _FAILED, stderr)
        return Outcome(trial, repeat, rundir, result, said=stderr)


@contextlib.contextmanager
def _no_verdict() -> Iterator[None]:
    """Context manager: convert errors to `TrialError`, as they say nothing about the trial and may be transient."""
    try:
        yield
    except PacelineError as error:
        raise TrialError(str(error), error.exit_code) from None


@contextlib.contextmanager
def interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Context manager: make these signals interrupt like Ctrl-C, so that child processes are terminated."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
