"""Run a command under observation for a number of steps, then end it. Torch-free.

The command gets a session of its own: Ctrl-C reaches it through this process only.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import fsum
from pathlib import Path
from typing import Any, Final

from paceline.core.files import make_folder, open_to_read, open_to_write
from paceline.core.json_file import read_json
from paceline.core.process import PROC, descendants, die_with_parent_command, read_text_or_empty
from paceline.core.run_dir import write_atomic
from paceline.core.stages import EPOCH_BOUNDARY
from paceline.core.units import count, duration
from paceline.core.watch_result import RECORDS, WatchResult
from paceline.watch.launch import WATCH_LOSSES, WATCH_PATCHES, find_program, observed_environ
from paceline.watch.records import ProcessRecords, RecordReader
from paceline.watch.summary import choose_ranks, measured_steps, summarize

OUTPUT: Final = "output.log"
"""File of the folder with what the command prints, on both of its outputs."""
_ENDED: Final = "ended.json"
_POLL_S: Final = 0.1
_GRACE_S: Final = 10.0
"""Seconds from SIGTERM to SIGKILL: a script may write a checkpoint, and torchrun ends its ranks."""
_TAIL_BYTES: Final = 64 << 10
_MAX_REASON: Final = 300
_ERROR: Final = re.compile(r"\b(?!ChildFailed)[A-Z]\w*(?:Error|Exception): |\berror: ")
"""Errors of Python and of command lines; torchrun's own says nothing of the cause."""


@dataclass(frozen=True)
class MeasuredRun:
    """A command observed for its first steps.

    `step_seconds` are those of rank 0 after the warm-up, without pauses; `span_s` is their mean with the pauses in
    which epochs begin. `losses` are those of rank 0 by step from 1, those of the warm-up too. `exit_code` is None if
    the command was ended because it had taken enough steps. `failure` says in a line why it has too few, "" if it has
    enough. `unapplied` says why patches found no place in the script, by name.
    """

    result: WatchResult
    step_seconds: tuple[float, ...]
    span_s: float
    losses: Mapping[int, float]
    exit_code: int | None
    failure: str
    unapplied: Mapping[str, str]


def run_measured(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    *,
    warmup: int,
    steps: int,
    timeout_s: float,
    patches: Mapping[str, Any] | None = None,
) -> MeasuredRun:
    """Run `command` until each rank has taken `warmup` and `steps` optimizer steps, then end it and its processes.

    `environ` are all its variables, and `patches` the values of `ScriptPatches`. Its records and its output are written
    to `folder`. The command may end before by itself. Raise `PacelineError` if its program is missing, and `OSError` if
    the folder cannot be written.
    """
    program = [find_program(command, environ), *command[1:]]
    records = folder / RECORDS
    make_folder(records, parents=True)
    reader = RecordReader(records)
    observed = {**observed_environ(environ, records), WATCH_LOSSES: "1", WATCH_PATCHES: json.dumps(patches or {})}
    with open_to_write(folder / OUTPUT, "wb") as output:
        process = subprocess.Popen(
            die_with_parent_command(program, signal.SIGTERM),
            env=observed,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code, is_late = _wait(process, reader, warmup + steps, timeout_s)
        finally:
            end_process_tree(process)
    run = _read_run(command, reader, code, warmup, steps)
    if _have_taken(reader.processes(), warmup + steps):
        ended = {"exit_code": code, "command": list(command), "patches": dict(patches or {})}
        write_atomic(folder / _ENDED, json.dumps(ended) + "\n")
        return run
    return replace(run, failure=_explain_failure(reader, code, warmup + steps, timeout_s if is_late else None, folder))


def read_measured(
    command: Sequence[str], folder: Path, *, warmup: int, steps: int, patches: Mapping[str, Any] | None = None
) -> MeasuredRun | None:
    """Return the run that `run_measured` wrote to `folder` with the same command and patches.

    Return None if there is none, or if it has not ended well.
    """
    try:
        ended = read_json(folder / _ENDED)
        code, settings = ended["exit_code"], (ended["command"], ended["patches"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if settings != (list(command), dict(patches or {})):
        return None
    return _read_run(command, RecordReader(folder / RECORDS), code, warmup, steps)


def _read_run(command: Sequence[str], reader: RecordReader, code: int | None, warmup: int, steps: int) -> MeasuredRun:
    reader.update()
    processes = reader.processes()
    ranks, _ = choose_ranks(processes)
    measured = tuple(islice(measured_steps(ranks[0], warmup), steps)) if ranks else ()
    return MeasuredRun(
        result=summarize(processes, command, code or 0, warmup, reader.stray_notes()),
        step_seconds=tuple(each.step_s for each in measured),
        span_s=_mean_span_s(ranks[0], measured[0].n, measured[-1].n) if measured else 0.0,
        losses=ranks[0].losses if ranks else {},
        exit_code=code,
        failure="",
        unapplied={name: why for name, why in (ranks[0].patches if ranks else {}).items() if why},
    )


def _wait(
    process: "subprocess.Popen[bytes]", reader: RecordReader, needed: int, timeout_s: float
) -> tuple[int | None, bool]:
    """Return the exit code, None if the command still runs, and whether it took too long."""
    limit_s = time.monotonic() + timeout_s
    while True:
        code = process.poll()
        if code is not None:
            return (code if code >= 0 else 128 - code), False
        reader.update()
        if _have_taken(reader.processes(), needed):
            return None, False
        if _find_error(reader):  # no more steps will be seen
            return None, False
        if time.monotonic() > limit_s:
            return None, True
        # Short enough to end soon after the last step, and long enough to leave the cores to the command.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


def _have_taken(processes: Sequence[ProcessRecords], needed: int) -> bool:
    ranks, _ = choose_ranks(processes)
    is_complete = bool(ranks) and len(ranks) >= ranks[0].process.world_size
    return is_complete and min(each.num_steps for each in ranks) >= needed


def end_process_tree(process: "subprocess.Popen[bytes]") -> None:
    """End a process started in a session of its own, and all processes below it: SIGTERM, and after 10 s SIGKILL."""
    # torchrun starts each rank in a session of its own, so their group is not enough.
    below = {pid: _start_tick(pid) for pid in descendants(process.pid)}
    try:
        if process.poll() is None:
            _send(os.killpg, process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            below |= {pid: _start_tick(pid) for pid in descendants(process.pid)}
    finally:  # also after Ctrl-C while waiting
        for pid, started in below.items():
            if _start_tick(pid) == started != "":  # another process may have got the number of one that has ended
                _send(os.kill, pid, signal.SIGKILL)
        _send(os.killpg, process.pid, signal.SIGKILL)
        process.wait()


def _send(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


def _start_tick(pid: int) -> str:
    # proc(5): field 22; field 2, in parentheses, may contain spaces.
    return " ".join(read_text_or_empty(PROC / str(pid) / "stat").rpartition(")")[2].split()[19:20])


def _mean_span_s(records: ProcessRecords, first: int, last: int) -> float:
    """Return the mean seconds of steps `first` to `last`, with the pauses in which epochs begin and without others."""
    steps = {each.n: each for each in records.steps}
    start_s, end_s = steps[first].start_s, steps[last].end_s
    paused_s = fsum(
        max(0.0, min(each.end_s, end_s) - max(each.start_s, start_s))
        for each in records.pauses
        if each.name != EPOCH_BOUNDARY
    )
    return max(0.0, end_s - start_s - paused_s) / (last - first + 1)


def _find_error(reader: RecordReader) -> str:
    """Return the note of an observer that has failed, "" if there is none."""
    notes = [*reader.stray_notes(), *(text for each in reader.processes() for text in each.notes)]
    return next((text for text in notes if text.startswith("the observer ")), "")


def _explain_failure(reader: RecordReader, code: int | None, needed: int, timeout_s: float | None, folder: Path) -> str:
    ranks, _ = choose_ranks(reader.processes())
    taken = min((each.num_steps for each in ranks), default=0)
    steps = f"took {count(taken, 'step')} of {needed:,}" if taken else "took no step of a PyTorch optimizer"
    if error := _find_error(reader):
        return f"{steps}: {error}"
    if timeout_s is None:
        steps += " and ended" + (f" with exit code {code}" if code else "")
    else:
        steps += f" in {duration(timeout_s)}"
    reason = "" if taken and not code else _read_reason(folder / OUTPUT)
    return f"{steps}: {reason}" if reason else steps


def _read_reason(path: Path) -> str:
    """Return the last line that names an error, else the last line."""
    with open_to_read(path) as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return [*lines[-1:], *errors[-1:]][-1][:_MAX_REASON] if lines else ""
