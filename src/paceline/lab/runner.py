"""Run trials: a process at a time, read from its run directory, and none left behind, whatever happens."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.rundir import RunDir
from paceline.lab.trial import Outcome, Trial, command_of, interleaved, vary
from paceline.recipe.schema import Recipe

_GRACE_S: Final = 10.0
_FAILED: Final = 1
_ENDED: Final = ("completed", "target_reached")


class TrialError(PacelineError):
    """A trial that nothing can be said without has failed; the process ends with the exit code that its own had."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class Process(Protocol):
    """What is used of `subprocess.Popen`, in text mode."""

    @property
    def returncode(self) -> int | None:
        """The exit code, negative where a signal ended the process; None while it runs."""
        ...

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Wait for the end; return what was written. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def poll(self) -> int | None:
        """Return the exit code where it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


Start = Callable[[Sequence[str]], Process]


def start_process(command: Sequence[str]) -> "subprocess.Popen[str]":
    """Start `command` in a session of its own, so that a Ctrl-C of the terminal reaches it through us alone."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _nothing(trial: Trial, repeat: int) -> None:
    """Do nothing before a run."""


@dataclass(frozen=True)
class Runner:
    """Runs trials over the recipe in `recipe_file`, on `ranks` where a trial does not say on how many.

    `place` says in which folder a run of a trial is written; `begins` is called before it, and is where a cache is
    emptied. With `goes_on`, a run whose result is in its folder is not made again, and what a killed one has left there
    is removed. A run that takes longer than `limit_s` seconds is ended, and has failed.
    """

    recipe: Recipe
    recipe_file: Path
    ranks: int
    place: Callable[[Trial, int], Path]
    begins: Callable[[Trial, int], None] = _nothing
    start: Start = start_process
    goes_on: bool = False
    limit_s: float | None = None

    def run(self, trial: Trial, repeat: int) -> Outcome:
        """Run a trial once, and return how it has ended.

        An exception that comes meanwhile, such as that of Ctrl-C, ends the process that runs.
        Raise `TrialError` where another process is still writing what is to be run again.
        """
        rundir = RunDir(self.place(trial, repeat))
        if self.goes_on:
            known = self.known(trial, repeat)
            if known is not None:
                return known
            _clear(rundir)
        self.begins(trial, repeat)
        command = command_of(trial, self.recipe_file, self.ranks_of(trial), rundir.path)
        return self._run(trial, repeat, rundir, command)

    def known(self, trial: Trial, repeat: int) -> Outcome | None:
        """Return how a run ended that is there already: of the same recipe, on as many ranks."""
        rundir = RunDir(self.place(trial, repeat))
        try:
            result = rundir.read_result()
        except PacelineError:
            return None
        is_it = result.recipe_hash == vary(self.recipe, trial.patch).hash and result.world_size == self.ranks_of(trial)
        is_whole = result.status in _ENDED and result.throughput.images_per_s > 0
        return Outcome(trial, repeat, rundir, result, is_known=True) if is_it and is_whole else None

    def ranks_of(self, trial: Trial) -> int:
        """Return on how many ranks a trial is run."""
        return self.ranks if trial.ranks is None else trial.ranks

    def _run(self, trial: Trial, repeat: int, rundir: RunDir, command: Sequence[str]) -> Outcome:
        process = self.start(command)
        try:
            said = process.communicate(timeout=self.limit_s)[1] or ""
        except subprocess.TimeoutExpired:
            why = f"was ended after {self.limit_s:,.0f} s"
            return Outcome(trial, repeat, rundir, None, why, _FAILED)
        finally:
            _end(process)
        code = process.returncode
        if code:
            return Outcome(trial, repeat, rundir, None, _complaint(said, code), code if code > 0 else _FAILED, said)
        try:
            result = rundir.read_result()
        except PacelineError as error:
            return Outcome(trial, repeat, rundir, None, str(error), _FAILED, said)
        if not result.throughput.images_per_s > 0:
            why = "no step was counted behind those of measure.warmup_steps (train for longer, or set fewer)"
            return Outcome(trial, repeat, rundir, None, why, _FAILED, said)
        return Outcome(trial, repeat, rundir, result, said=said)


def run_trials(trials: Sequence[Trial], runner: Runner) -> Iterator[Outcome]:
    """Run `trials` in turns; yield how each run has ended. One that has failed is not tried again; the others go on."""
    failed: set[str] = set()
    for trial, repeat in interleaved(trials):
        if trial.name in failed:
            continue
        outcome = runner.run(trial, repeat)
        if outcome.result is None:
            failed.add(trial.name)
        yield outcome


def _clear(rundir: RunDir) -> None:
    """Remove what a killed run has left. Raise `TrialError` where processes of it live on."""
    if not rundir.path.exists():
        return
    try:
        with rundir.lock():
            pass  # an open file, such as the lock, would keep its folder on NFS
    except RecipeError as error:
        raise TrialError(str(error), error.exit_code) from None
    shutil.rmtree(rundir.path)


def _end(process: Process) -> None:
    """End a process that still runs, and its ranks with it: by force after a while, and at once at a second Ctrl-C."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _complaint(said: str, code: int) -> str:
    """Return the first error that a process named, else the last that it said, else how it ended."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if named:
        return named[0]
    if code < 0:
        return f"was killed by signal {-code}"
    return lines[-1] if lines else f"ended with exit code {code}"


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
