"""Run trials one at a time, or reuse the runs that an experiment already has."""

import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.core.results import FINISHED, RunResult, starved_note
from paceline.core.run_dir import RunDir, run_lock
from paceline.core.units import duration
from paceline.lab.process import ProcessStarter, extract_error, start_process, terminate_process
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, build_launch_command, build_train_command
from paceline.recipe.plan import resolve_batch
from paceline.recipe.plugins import changed_code, stale_code
from paceline.recipe.schema import Recipe

_VERSION_KEYS: Final = ("torch", "torchvision", "numpy", "python")
_GPU_VERSION_KEYS: Final = ("cuda", "nccl", "driver")
RUN_TIMEOUT_S: Final = 1800.0
"""Time limit of a short run, in seconds: settings that hang or compile for longer are not fast."""
_QUERY_TIMEOUT_S: Final = 600.0
"""Time limit for a process that describes its machine; it imports torch, on a cluster from a slow disk."""
_EXIT_FAILED: Final = 1
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that interrupt an experiment like Ctrl-C; Slurm sends SIGUSR1 before the time limit."""


@dataclass(frozen=True)
class ReusePolicy:
    """Decide which existing runs are reused, and archive the others in `replaced_dir`.

    A run is reused if it had the same hardware, versions and plugin code, and the cores to itself. Runs on more than
    `max_nodes` nodes cannot be repeated here and are always reused; `describe_inconsistent_runs` reports how they
    differ. `report` receives a line per archived run. Runs that are not timed may have shared their cores.
    """

    replaced_dir: Path
    report: Callable[[str], None]
    max_nodes: int = 0
    is_timed: bool = True
    _machines: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def find_differences(self, known: TrialOutcome, ranks: int, start: ProcessStarter, *, on_cpu: bool) -> list[str]:
        """Return what has changed since a run on `ranks`; empty if the run can be reused.

        `start` starts the process that describes the machine. Raise `PacelineError` if that fails.
        """
        assert known.result is not None, "a run is known by its result"
        # A table must not mix measurements of two machines. Recipe and ranks have been compared before.
        if known.trial.nodes > self.max_nodes:
            return []
        layout = (known.trial.nodes, ranks if known.trial.nodes else 0)
        if layout not in self._machines:
            self._machines[layout] = query_machine(*layout, start)
        previous = known.result.provenance
        # A run that shared its cores was measured too slow.
        starved = starved_note([known.result]) if self.is_timed else ""
        return [
            *diff_machines(previous, self._machines[layout], on_cpu=on_cpu),
            *(f"other code of {name}" for name in stale_code(previous.get("own_parts", {}))),
            *([f"no cores to itself: {starved}"] if starved else []),
        ]

    def archive(self, known: TrialOutcome, others: list[str]) -> None:
        """Move a run to the archive and report why. Raise `PacelineError` if it cannot be moved."""
        path = known.rundir.path
        try:
            self.replaced_dir.mkdir(exist_ok=True)
            archived = next(each for each in _iter_unused_names(self.replaced_dir / path.name) if not each.exists())
            path.rename(archived)
        except OSError as error:
            raise PacelineError(f"{path}: cannot be moved: {error.strerror} (name another --run-dir)") from None
        subject = f"{known.trial.name}, run {known.repeat}: is run again"
        self.report(f"{subject}: the existing run had {', '.join(others)}; it is kept in {archived}")


def _iter_unused_names(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def describe_inconsistent_runs(outcomes: Sequence[TrialOutcome]) -> str:
    """Return a sentence on the runs with other hardware, versions or code than the first; "" if all are consistent."""
    runs = [(outcome, outcome.result.provenance) for outcome in outcomes if outcome.result is not None]
    # Slurm gives a job step cores by its shape, so compare cores only between runs of the same shape.
    first_by_shape: dict[tuple[int | None, int], tuple[str, Mapping[str, Any]]] = {}
    names_by_difference: dict[str, list[str]] = {}
    for outcome, machine in runs:
        name = f"{outcome.trial.name}, run {outcome.repeat}"
        first_name, first = next(iter(first_by_shape.values()), (name, machine))
        shape = (outcome.trial.ranks, outcome.trial.nodes)
        shape_name, first_of_shape = first_by_shape.setdefault(shape, (name, machine))
        on_cpu = machine.get("device") == first.get("device") == "cpu"
        changes = [
            *_diff_hardware_and_versions(machine, first, f"{first_name}:", on_cpu=on_cpu),
            *_diff_fields(("logical_cores",), machine, first_of_shape, f"{shape_name}:"),
            *(
                f"other code of {plugin} than {first_name}"
                for plugin in changed_code(first.get("own_parts", {}), machine.get("own_parts", {}))
            ),
        ]
        if changes:
            names_by_difference.setdefault(", ".join(changes), []).append(name)
    if not names_by_difference:
        return ""
    details = "; ".join(
        f"{names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''} had {changes}"
        for changes, names in names_by_difference.items()
    )
    return f"Not all runs were made under the same conditions, so they differ by more than what was varied: {details}."


def diff_machines(previous: Mapping[str, Any], current: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    """Return which hardware and versions of a previous run differ, such as `torch 2.10.0 (here 2.11.0)`.

    Both are as in `machine.json`; values that one of them lacks are not compared. `on_cpu` ignores GPUs.
    """
    cores = _diff_fields(("logical_cores",), previous, current, "here")
    return [*cores, *_diff_hardware_and_versions(previous, current, "here", on_cpu=on_cpu)]


def _diff_hardware_and_versions(
    previous: Mapping[str, Any], current: Mapping[str, Any], whose: str, *, on_cpu: bool
) -> list[str]:
    differences = _diff_fields(("cpu",), previous, current, whose)
    # A checkout keeps the version of its installation while its files change, so the version alone is not enough.
    versions = _diff_fields(("paceline",), previous, current, whose)
    digests = [machine.get("paceline_sha256") for machine in (previous, current)]
    if not all(digests):
        differences += versions
    elif digests[0] != digests[1]:
        differences += versions or [f"other code of paceline {previous.get('paceline', '')}".rstrip()]
    differences += _diff_fields(_VERSION_KEYS, previous, current, whose)
    if on_cpu:
        return differences
    gpus, other_gpus = (
        ", ".join(dict.fromkeys(machine.get("cuda_devices", ()))) or "no GPU" for machine in (previous, current)
    )
    if gpus != other_gpus:
        return [*differences, f"{gpus} ({whose} {other_gpus})"]
    return differences + _diff_fields(_GPU_VERSION_KEYS, previous, current, whose)


def _diff_fields(
    names: Sequence[str], previous: Mapping[str, Any], current: Mapping[str, Any], whose: str
) -> list[str]:
    changed = [name for name in names if name in previous and name in current and previous[name] != current[name]]
    labels = {name: "" if name == "cpu" else f"{name.replace('_', ' ')} " for name in changed}
    return [f"{label}{previous[name]} ({whose} {current[name]})" for name, label in labels.items()]


def query_machine(nodes: int, ranks: int, start: ProcessStarter) -> Mapping[str, Any]:
    """Return the content of `machine.json` for a run on this machine, or on `nodes` nodes with `ranks` ranks.

    Raise `PacelineError` if the process does not answer.
    """
    # Ask in a process started like the run's: Slurm may give a job step fewer cores than the job has, and querying a
    # GPU here would load its driver for as long as the experiment lasts.
    command = [sys.executable, "-P", "-m", "paceline.measure.machine"]
    process = start(build_launch_command(command, nodes, ranks, ["--output=0"]))  # the output of rank 0 only
    try:
        stdout, stderr = process.communicate(timeout=_QUERY_TIMEOUT_S)
        machine: dict[str, Any] = json.loads(stdout or "")
    except subprocess.TimeoutExpired:
        why = f"no answer in {duration(_QUERY_TIMEOUT_S)}"
    except ValueError:
        why = extract_error(stderr or "", process.returncode or 0)
    else:
        return machine
    finally:
        terminate_process(process)
    raise PacelineError(f"python {' '.join(command[2:])}: cannot describe its machine: {why} (fix it)")


class TrialError(PacelineError):
    """A necessary trial of an experiment has failed; paceline exits with the trial's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def _do_nothing(trial: Trial, repeat: int) -> None:
    """Do nothing before a run."""


@dataclass(frozen=True)
class TrialRunner:
    """Run trials of the recipe in `recipe_file`, on `ranks` ranks unless the trial sets its own number.

    `get_folder` returns the run directory of a repeat, and `before_run` is called before each run. With `reuse_policy`,
    existing valid runs are reused, and leftovers of killed runs are removed. A run fails if it takes longer than
    `timeout_s` seconds, or if it has no measured steps while `needs_speed` is set. `oversubscribe` allows more ranks
    than the machine would normally get. A killed run is repeated, or with `resumes` resumed.
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
    resumes: bool = False

    def run(self, trial: Trial, repeat: int) -> TrialOutcome:
        """Run a trial once and return its outcome; terminate the child process if interrupted.

        Raise `TrialError` if another process is still writing the run, or if an existing run cannot be validated.
        """
        if self.reuse_policy is not None:
            known = self._find_reusable(self.reuse_policy, trial, repeat)
            if known is not None:
                return known
        rundir = RunDir(self.get_folder(trial, repeat))
        self.before_run(trial, repeat)
        options = ["--oversubscribe"] if self.oversubscribe else []
        options += ["--resume"] if self.resumes else []
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
        is_complete = result.status in FINISHED and not self._lacks_speed(result)
        return TrialOutcome(trial, repeat, rundir, result, is_reused=True) if is_same and is_complete else None

    def _find_reusable(self, policy: ReusePolicy, trial: Trial, repeat: int) -> TrialOutcome | None:
        """Return the outcome of a valid existing run; otherwise make room for a new one."""
        known, rundir = self.find_existing(trial, repeat), RunDir(self.get_folder(trial, repeat))
        on_cpu = apply_patch(self.recipe, trial.patch).parallel.device == "cpu"
        try:
            others = policy.find_differences(known, self.get_ranks(trial), self.spawn, on_cpu=on_cpu) if known else []
            if known is not None and not others:
                return known
            if rundir.path.exists():
                # Fails if another process is still writing the run.
                with run_lock(rundir.path):
                    pass  # release it before moving: on NFS an open file keeps its folder
                if known is not None:
                    policy.archive(known, others)
                elif not self.resumes:
                    shutil.rmtree(rundir.path)
        except PacelineError as error:  # it says nothing about the trial, and may be transient
            raise TrialError(str(error), error.exit_code) from None
        return None

    def get_ranks(self, trial: Trial) -> int:
        """Return the number of ranks of a trial."""
        return self.ranks if trial.ranks is None else trial.ranks

    def _lacks_speed(self, result: RunResult) -> bool:
        return self.needs_speed and not result.throughput.images_per_s > 0

    def _run_command(self, trial: Trial, repeat: int, rundir: RunDir, command: Sequence[str]) -> TrialOutcome:
        process, stderr = self.spawn(command), ""

        def build_failure(why: str, code: int = _EXIT_FAILED) -> TrialOutcome:
            return TrialOutcome(trial, repeat, rundir, None, why, code, stderr)

        try:
            stderr = process.communicate(timeout=self.timeout_s)[1] or ""
        except subprocess.TimeoutExpired:
            return build_failure(f"was terminated after {duration(self.timeout_s or 0.0)}")
        finally:
            terminate_process(process)
        code = process.returncode
        # A signal is a negative return code, which no process can exit with.
        if code:
            return build_failure(extract_error(stderr, code), code if code > 0 else _EXIT_FAILED)
        try:
            result = rundir.read_result()
        except PacelineError as error:
            return build_failure(str(error))
        if self._lacks_speed(result):
            why = "no step was measured after the first measure.warmup_steps (train for longer, or set fewer)"
            return build_failure(why)
        return TrialOutcome(trial, repeat, rundir, result, stderr=stderr)


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Make signals to stop interrupt like Ctrl-C within a `with` block, so that child processes are terminated."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
