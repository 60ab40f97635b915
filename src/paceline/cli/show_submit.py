"""Print submitted jobs and how to follow them, and follow a Slurm job."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.cluster.job import ClusterJob
from paceline.cluster.slurm_jobs import SlurmClient, follow_until_end
from paceline.core.console import progress_console
from paceline.core.units import count

_FIRST_PAUSE_S: Final = 2.0
_MAX_PAUSE_S: Final = 30.0
"""Seconds between polls of a quiet job, to spare the controller."""
_GROWTH: Final = 1.5


@dataclass(frozen=True)
class QueuedJob:
    """Job with its Slurm job ID `number`, and its script."""

    number: str
    job: ClusterJob
    script: Path

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        tasks = {"tasks": list(self.job.tasks)} if self.job.tasks else {}
        return {"job_id": self.number, "script": str(self.script), "nodes": self.job.nodes, **tasks}


@dataclass(frozen=True)
class Submission:
    """All queued jobs, the main one last, and its output file."""

    jobs: tuple[QueuedJob, ...]
    output: str

    @property
    def main(self) -> QueuedJob:
        """Job that is followed, and starts after the others."""
        return self.jobs[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "job_id": self.main.number,
            "job_ids": [each.number for each in self.jobs],
            "jobs": [each.to_dict() for each in self.jobs],
            "script": str(self.main.script),
            "run_dir": str(self.main.job.run_dir),
            "output": self.output,
        }


def show_scripts(run_dir: Path, scripts: Sequence[tuple[Path, str]], *, as_json: bool) -> None:
    """Print the scripts; several with their paths between."""
    if as_json:
        print(json.dumps({"run_dir": str(run_dir), "scripts": {str(path): text for path, text in scripts}}))
        return
    for path, text in scripts:
        if len(scripts) > 1:
            print(f"# ----- {path}")
        sys.stdout.write(text)


def show_submitted(submitted: Submission, *, as_json: bool) -> None:
    """Print job IDs, run directory, and how to follow the job."""
    if as_json:
        print(json.dumps(submitted.to_dict()))
        return
    for line in _queued_lines(submitted):
        print(line)
    print(f"follow         tail -F {shlex.quote(submitted.output)}")
    print(f"state          squeue --job {','.join(_job_numbers(submitted))}   ({_cancel_hint(submitted)})")


def follow_job(submitted: Submission, slurm: SlurmClient, output: Path | None, *, as_json: bool) -> int:
    """Follow the main job to its end, print its output, and return its exit code. Ctrl-C stops following only.

    `output` is its file, if known without asking Slurm.
    """
    number, out = submitted.main.number, progress_console(as_json=as_json)
    pause = _Backoff()

    def print_line(line: str) -> None:
        pause.reset()
        print(line, file=out, flush=True)

    for line in _queued_lines(submitted):
        print_line(line)
    try:
        end = follow_until_end(
            lambda: slurm.query_job(number),
            lambda state: print_line(f"job {number}: {state}"),
            print_line,
            pause,
            output,
        )
    except KeyboardInterrupt:
        print(f"stopped following: job {number} keeps running ({_cancel_hint(submitted)})", file=sys.stderr)
        raise
    if as_json:
        ended = {"state": end.state, "exit_code": end.exit_code, "restarts": end.restarts}
        print(json.dumps(submitted.to_dict() | ended))
    return end.exit_code


class _Backoff:
    """Sleep between polls, longer each time until reset."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def __call__(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(_MAX_PAUSE_S, _GROWTH * self._next_s)

    def reset(self) -> None:
        """Reset to the first pause after a change."""
        self._next_s = _FIRST_PAUSE_S


def show_kubernetes(
    job: ClusterJob, path: Path, steps: Sequence[str], kubectl_output: str, pod_run_dir: str, *, as_json: bool
) -> None:
    """Print the manifests' path, the output of kubectl ("" if not installed), and the next commands.

    `pod_run_dir` is the run directory as pods see it.
    """
    if as_json:
        folders = {"run_dir": str(job.run_dir), "run_dir_in_pods": pod_run_dir}
        print(json.dumps({"script": str(path), **folders, "is_created": bool(kubectl_output), "next": list(steps)}))
        return
    print(kubectl_output.strip() or f"nothing was created, as kubectl is not installed; the manifests are in {path}")
    print(f"run directory  {pod_run_dir}, as pods see it")
    for step in steps:
        print(f"    {step}")


def _job_numbers(submitted: Submission) -> list[str]:
    return [each.number for each in submitted.jobs]


def _cancel_hint(submitted: Submission) -> str:
    numbers = _job_numbers(submitted)
    return f"scancel {' '.join(numbers)} ends {'it' if len(numbers) == 1 else 'them'}"


def _queued_lines(submitted: Submission) -> list[str]:
    """Return lines about the queued jobs, their script, run directory and output."""
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
