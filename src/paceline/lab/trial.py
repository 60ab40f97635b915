"""A trial: a variation of a recipe that is measured in processes of its own. What comes of it is read from run
directories alone. Which trials to run, and what their results mean, is said elsewhere."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.recipe.layers import Layer, merge
from paceline.recipe.load import validate
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import read_value, write_text

_GRACE_S: Final = 10.0
_FAILED: Final = 1


class TrialError(PacelineError):
    """A trial that nothing can be said without has failed; the process ends with the exit code that its own had."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(frozen=True)
class Trial:
    """A variation of a base recipe, how often it is run, and in a few words what it `explains`."""

    name: str
    patch: Patch = field(default_factory=Patch)
    repeats: int = 1
    explains: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a run of a trial; `repeat` counts from 1. Without a result, `error` says in one line why.

    `code` is the exit code of the process, and `said` what it wrote on standard error.
    """

    trial: Trial
    repeat: int
    rundir: RunDir
    result: RunResult | None
    error: str = ""
    code: int = 0
    said: str = ""


class Process(Protocol):
    """What is used of `subprocess.Popen`, in text mode."""

    @property
    def returncode(self) -> int | None:
        """The exit code, negative where a signal ended the process; None while it runs."""
        ...

    def communicate(self) -> tuple[str | None, str | None]:
        """Wait for the end; return what was written."""
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


def vary(recipe: Recipe, patch: Patch) -> Recipe:
    """Return `recipe` with `patch` over it. Raise `RecipeError` where the two do not fit."""
    return validate(merge([Layer(recipe.to_dict(), "default"), Layer(patch.values(), "command line")]))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe that `paceline train PATH` reads back. Raise `PacelineError` when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write_text(recipe.to_dict()), encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (name another --run-dir)") from None


def words_of(patch: Patch) -> list[str]:
    """Return a patch as the `KEY=VALUE` words that `Patch.parse` reads back to an equal one."""
    return [f"{path}={_word(value)}" for path, value in patch.assignments]


def _word(value: object) -> str:
    if isinstance(value, str):
        with contextlib.suppress(RecipeError):
            if read_value(value, "value") == value:
                return value
    return json.dumps(value)  # which is YAML too


def command_of(trial: Trial, recipe_file: Path, ranks: int, rundir: Path) -> list[str]:
    """Return the words that run a trial once: a `paceline train` in a fresh process of this Python."""
    # -P: a module in the current folder, which may be somebody's data, is not to be imported.
    program = [sys.executable, "-P", "-m", "paceline", "train", str(recipe_file)]
    return [*program, *words_of(trial.patch), "--ranks", str(ranks), "--run-dir", str(rundir), "--json"]


def interleaved(trials: Sequence[Trial]) -> Iterator[tuple[Trial, int]]:
    """Yield each trial as often as it is repeated, in turns (A B C A B C), with the number of the turn from 1.

    A machine that grows slower, or warmer, is then so for all of them.
    """
    for repeat in range(1, max((trial.repeats for trial in trials), default=0) + 1):
        yield from ((trial, repeat) for trial in trials if repeat <= trial.repeats)


def run_trials(
    trials: Sequence[Trial],
    recipe_file: Path,
    *,
    ranks: int,
    place: Callable[[Trial, int], Path],
    begins: Callable[[Trial, int], None] = lambda trial, repeat: None,
    start: Start = start_process,
) -> Iterator[Outcome]:
    """Run `trials` over the recipe in `recipe_file`, one process at a time and in turns; yield how each has ended.

    `place` says in which folder a run of a trial is written, and `begins` is called before it. A trial that has failed
    is not tried again, and the others go on. An exception that comes meanwhile, such as that of Ctrl-C, ends the
    process that runs.
    """
    failed: set[str] = set()
    for trial, repeat in interleaved(trials):
        if trial.name in failed:
            continue
        begins(trial, repeat)
        rundir = RunDir(place(trial, repeat))
        outcome = _run(trial, repeat, rundir, command_of(trial, recipe_file, ranks, rundir.path), start)
        if outcome.result is None:
            failed.add(trial.name)
        yield outcome


def _run(trial: Trial, repeat: int, rundir: RunDir, command: Sequence[str], start: Start) -> Outcome:
    process = start(command)
    try:
        said = process.communicate()[1] or ""
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
        return Outcome(trial, repeat, rundir, None, "no step was counted (ask for more --steps)", _FAILED, said)
    return Outcome(trial, repeat, rundir, result, said=said)


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
