"""Run a trial: a process at a time, read from its run directory, and none left behind, whatever happens."""

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
    """A trial that nothing can be said without has failed; the process ends with the exit code that its own had."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def _nothing(trial: Trial, repeat: int) -> None:
    """Do nothing before a run."""


@dataclass(frozen=True)
class Runner:
    """Runs trials over the recipe in `recipe_file`, on `ranks` where a trial does not say on how many.

    `place` says in which folder a run of a trial is written; `begins` is called before it, and is where a cache is
    emptied. With `earlier`, a run whose result is in its folder is not made again where it still counts, and what a
    killed one has left there is removed. A run that takes longer than `limit_s` seconds is ended, and has failed. So
    has one that counted no step where it `needs_speed`: a whole run has an accuracy too. `oversubscribe` lets a trial
    have more ranks than a machine is otherwise given.
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
        """Run a trial once, and return how it has ended.

        An exception that comes meanwhile, such as that of Ctrl-C, ends the process that runs.
        Raise `TrialError` where another process is still writing what is to be run again, and where it cannot be told
        whether a run that is there still counts.
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
        """Return how a run ended that is there already: of the same recipe, on as many ranks, wherever it was made."""
        rundir = RunDir(self.place(trial, repeat))
        try:
            result = rundir.read_result()
        except PacelineError:
            return None
        ranks = self.ranks_of(trial)
        recipe = resolve_batch(vary(self.recipe, trial.patch), ranks)
        is_it = result.recipe_hash == recipe.hash and result.world_size == ranks
        is_whole = result.status in _ENDED and not self._lacks_speed(result)
        return Outcome(trial, repeat, rundir, result, is_known=True) if is_it and is_whole else None

    def _still_counts(self, earlier: Earlier, trial: Trial, repeat: int) -> Outcome | None:
        """Return how a run ended that is there and counts; make room for another where there is none."""
        known = self.known(trial, repeat)
        with _no_verdict():
            others = [] if known is None else earlier.others(known, self.recipe, self.ranks_of(trial), self.start)
        if known is not None and not others:
            return known
        rundir = RunDir(self.place(trial, repeat))
        if rundir.path.exists():
            with _no_verdict():
                with rundir.lock():
                    pass  # an open file, such as the lock, would keep its folder on NFS
                if known is not None:
                    earlier.put_away(known, others)
            if known is None:
                shutil.rmtree(rundir.path)
        return None

    def ranks_of(self, trial: Trial) -> int:
        """Return on how many ranks a trial is run."""
        return self.ranks if trial.ranks is None else trial.ranks

    def _lacks_speed(self, result: RunResult) -> bool:
        return self.needs_speed and not result.throughput.images_per_s > 0

    def _run(self, trial: Trial, repeat: int, rundir: RunDir, command: Sequence[str]) -> Outcome:
        process = self.start(command)
        try:
            said = process.communicate(timeout=self.limit_s)[1] or ""
        except subprocess.TimeoutExpired:
            why = f"was ended after {self.limit_s:,.0f} s"
            return Outcome(trial, repeat, rundir, None, why, _FAILED)
        finally:
            end(process)
        code = process.returncode
        if code:
            return Outcome(trial, repeat, rundir, None, complaint(said, code), code if code > 0 else _FAILED, said)
        try:
            result = rundir.read_result()
        except PacelineError as error:
            return Outcome(trial, repeat, rundir, None, str(error), _FAILED, said)
        if self._lacks_speed(result):
            why = "no step was counted behind those of measure.warmup_steps (train for longer, or set fewer)"
            return Outcome(trial, repeat, rundir, None, why, _FAILED, said)
        return Outcome(trial, repeat, rundir, result, said=said)


@contextlib.contextmanager
def _no_verdict() -> Iterator[None]:
    """Return a context whose errors are `TrialError`s: they say nothing of the trial, and may be gone the next time."""
    try:
        yield
    except PacelineError as error:
        raise TrialError(str(error), error.exit_code) from None


@contextlib.contextmanager
def interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Return a context in which these signals interrupt as Ctrl-C does, so that no child is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
