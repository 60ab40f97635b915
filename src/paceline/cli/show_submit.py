"""Tell what was handed to a scheduler, where it writes, and how to follow it; and follow a job of Slurm's."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.cluster.job import Job
from paceline.cluster.slurm_jobs import Slurm, follow
from paceline.core.console import progress_console
from paceline.core.units import count

_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 30.0
"""Between looks at a job that says nothing and stays as it is: the controller has others to answer."""
_GROWTH: Final = 1.5


@dataclass(frozen=True)
class Queued:
    """A job that Slurm knows by its `number`, and the script that it runs."""

    number: str
    job: Job
    script: Path

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        tasks = {"tasks": list(self.job.tasks)} if self.job.tasks else {}
        return {"job_id": self.number, "script": str(self.script), "nodes": self.job.nodes, **tasks}


@dataclass(frozen=True)
class Submitted:
    """All jobs that were queued, the main one last, and the file of what that one says."""

    jobs: tuple[Queued, ...]
    output: str

    @property
    def main(self) -> Queued:
        """The job that is followed, and that starts after the others."""
        return self.jobs[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "job_id": self.main.number,
            "job_ids": [each.number for each in self.jobs],
            "jobs": [each.to_dict() for each in self.jobs],
            "script": str(self.main.script),
            "run_dir": str(self.main.job.run_dir),
            "output": self.output,
        }


def show_scripts(run_dir: Path, scripts: Sequence[tuple[Path, str]], *, as_json: bool) -> None:
    """Print what would be written and handed over; one alone as it is, several with their names between."""
    if as_json:
        print(json.dumps({"run_dir": str(run_dir), "scripts": {str(path): text for path, text in scripts}}))
        return
    for path, text in scripts:
        if len(scripts) > 1:
            print(f"# ----- {path}")
        sys.stdout.write(text)


def show_submitted(submitted: Submitted, *, as_json: bool) -> None:
    """Tell the jobs' numbers, where the run directory is, and how to follow."""
    if as_json:
        print(json.dumps(submitted.to_dict()))
        return
    for line in _introduction(submitted):
        print(line)
    print(f"follow         tail -F {shlex.quote(submitted.output)}")
    print(f"state          squeue --job {','.join(_numbers(submitted))}   ({_how_to_end(submitted)})")


def show_wait(submitted: Submitted, slurm: Slurm, output: Path | None, *, as_json: bool) -> int:
    """Follow the main job to its end, and tell what it says; return its exit code. Ctrl-C ends the following alone.

    `output` is its file, where Slurm need not be asked for it.
    """
    number, out = submitted.main.number, progress_console(as_json=as_json)
    pause = _Pause()

    def say(line: str) -> None:
        pause.start_over()
        print(line, file=out, flush=True)

    for line in _introduction(submitted):
        say(line)
    try:
        end = follow(
            lambda: slurm.look(number),
            lambda state: say(f"job {number}: {state}"),
            say,
            pause,
            output,
        )
    except KeyboardInterrupt:
        print(f"stopped following: job {number} goes on ({_how_to_end(submitted)})", file=sys.stderr)
        raise
    if as_json:
        ended = {"state": end.state, "exit_code": end.exit_code, "restarts": end.restarts}
        print(json.dumps(submitted.to_dict() | ended))
    return end.exit_code


class _Pause:
    """Waits between looks at a job, longer and longer until it starts over."""

    def __init__(self) -> None:
        self._next_s = _PAUSE_S

    def __call__(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(_LONGEST_PAUSE_S, _GROWTH * self._next_s)

    def start_over(self) -> None:
        """Look again soon, as something has changed."""
        self._next_s = _PAUSE_S


def show_kubernetes(job: Job, path: Path, steps: Sequence[str], said: str, there: str, *, as_json: bool) -> None:
    """Tell where the manifests are, what kubectl has said (nothing: it is not here), and what comes next.

    `there` is the run directory as pods see it.
    """
    if as_json:
        folders = {"run_dir": str(job.run_dir), "run_dir_in_pods": there}
        print(json.dumps({"script": str(path), **folders, "is_created": bool(said), "next": list(steps)}))
        return
    print(said.strip() or f"nothing was created, as kubectl is not here; the manifests are in {path}")
    print(f"run directory  {there}, as pods see it")
    for step in steps:
        print(f"    {step}")


def _numbers(submitted: Submitted) -> list[str]:
    return [each.number for each in submitted.jobs]


def _how_to_end(submitted: Submitted) -> str:
    numbers = _numbers(submitted)
    return f"scancel {' '.join(numbers)} ends {'it' if len(numbers) == 1 else 'them'}"


def _introduction(submitted: Submitted) -> list[str]:
    """Return what was queued and where it writes."""
    *before, main = submitted.jobs
    lines = [
        f"job {each.number} is queued: {count(len(each.job.tasks), 'task')} on {count(each.job.nodes, 'node')} each"
        for each in before
    ]
    size = f"{count(main.job.nodes, 'node')}, {count(main.job.num_ranks, 'rank')}"
    after = f", after {', '.join(each.number for each in before)}" if before else ""
    return [
        *lines,
        f"job {main.number} is queued{after}: {main.job.name} on {size}",
        f"script         {main.script}",
        f"run directory  {main.job.run_dir}",
        f"output         {submitted.output}",
    ]
