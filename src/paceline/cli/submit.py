"""`paceline submit`: write a job for Slurm or Kubernetes, queue it, and follow it."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from paceline.cli.options import SubmitOptions
from paceline.cli.submit_jobs import (
    PreparedJob,
    build_jobs,
    build_shape,
    parse_submit_args,
    prepare_job,
    refuse_local_run,
)
from paceline.cluster.job import ClusterJob
from paceline.cluster.site import Site, load_site
from paceline.cluster.slurm import build_script
from paceline.cluster.slurm_client import SlurmClient, SlurmError, follow_until_end
from paceline.core.console import progress_console
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import make_folder
from paceline.core.run_dir import RunDir, write_atomic
from paceline.core.units import count
from paceline.recipe.load import load
from paceline.recipe.yaml import to_yaml_text

_FIRST_PAUSE_S: Final = 2.0
_MAX_PAUSE_S: Final = 30.0
"""Seconds between polls of a quiet job, to spare the controller."""
_GROWTH: Final = 1.5
_ENGINES: Final = ("slurm", "kubernetes")


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


class _Backoff:
    """Sleep between polls, longer each time until reset."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def __call__(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(_MAX_PAUSE_S, _GROWTH * self._next_s)

    def reset(self) -> None:
        self._next_s = _FIRST_PAUSE_S


@dataclass(frozen=True)
class _JobFile:
    """Job, and the text that the scheduler reads at `path`."""

    job: ClusterJob
    path: Path
    text: str


def submit(options: SubmitOptions) -> int:
    """Run `paceline submit`; return the exit code, with `--wait` that of the job."""
    request = parse_submit_args(options.args, trust_code=options.trust_code)
    scheduler = _check_engine(options.engine)
    site = _load_site(options.site, request.site, scheduler, os.environ)
    _refuse_without_effect(scheduler, options)
    shape = build_shape(request.verb, options)
    run_dir, as_json = options.run_dir and options.run_dir.expanduser(), options.as_json
    stage = site.slurm.stage if scheduler == "slurm" else "off"
    prepared = prepare_job(request, shape, run_dir, stage, array=options.array)
    if prepared.note:
        print(f"warning: {prepared.note}", file=sys.stderr)
    with _claim_rundir(prepared, run_dir, dry_run=options.dry_run) as rundir:
        written = _build_files(prepared, rundir, site, scheduler, array=options.array)
        if options.dry_run:
            show_scripts(rundir.path, [(each.path, each.text) for each in written], as_json=as_json)
            return 0
        frozen = _frozen_files(prepared, written[-1].job)
        _refuse_other_experiment(prepared, rundir, frozen)
        with _remove_on_failure(frozen):
            _write_files(written, frozen)
            if scheduler == "kubernetes":
                return _create_objects(written[-1], site, as_json=as_json)
            slurm = SlurmClient(os.environ, lambda line: print(line, file=sys.stderr))
            queued = _queue_jobs(slurm, written)
    submitted = Submission(tuple(queued), _output_file(slurm, queued[-1], site))
    if options.wait:
        is_known = site.slurm.output == "auto"
        return follow_job(submitted, slurm, Path(submitted.output) if is_known else None, as_json=as_json)
    show_submitted(submitted, as_json=as_json)
    return 0


def _check_engine(name: str) -> str:
    if name not in _ENGINES:
        raise RecipeError(f"--engine: {name!r} is not a scheduler (write slurm or kubernetes)")
    return name


def _load_site(name: str | None, args: Sequence[str], engine: str, environ: Mapping[str, str]) -> Site:
    """Return the site: `--site`, else PACELINE_SITE, else the user's own file."""
    idle = next((word for word in args if not word.startswith(f"{engine}.")), None)
    if idle is not None:
        raise RecipeError(f"{idle.partition('=')[0]}: has no effect with --engine {engine} (leave it out)")
    user_file = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "paceline" / "site.yaml"
    variable = environ.get("PACELINE_SITE") or None
    origin = "--site" if name else "PACELINE_SITE"
    return load_site(name or variable, args, user_file if user_file.is_file() else None, origin)


def _refuse_without_effect(engine: str, options: SubmitOptions) -> None:
    if options.wait and options.dry_run:
        raise RecipeError("--wait: there is nothing to wait for with --dry-run (leave one out)")
    if options.wait and engine != "slurm":
        raise RecipeError(f"--wait: follows Slurm jobs, not {engine} jobs (leave it out)")
    if options.array and engine != "slurm":
        raise RecipeError(f"--array: is for Slurm, not for {engine} (leave it out)")


@contextlib.contextmanager
def _claim_rundir(prepared: PreparedJob, run_dir: Path | None, *, dry_run: bool) -> Iterator[RunDir]:
    """Yield the run directory as an absolute path; one created here is removed on failure."""
    given = prepared.run or run_dir
    if given is not None:
        yield RunDir(given.absolute())
        return
    now = datetime.now().astimezone()
    if dry_run:
        yield RunDir(Path("runs").absolute() / f"{prepared.name}-{now:%Y%m%d-%H%M%S}")
        return
    rundir = RunDir(RunDir.claim(prepared.name, now).path.absolute())
    try:
        yield rundir
    except BaseException:
        shutil.rmtree(rundir.path / "job", ignore_errors=True)
        rundir.release()
        raise


def _build_files(prepared: PreparedJob, rundir: RunDir, site: Site, engine: str, *, array: bool) -> list[_JobFile]:
    folder = Path.cwd()
    jobs = build_jobs(prepared, rundir.path, folder, _header_lines(prepared), array=array)
    if engine == "kubernetes":
        from paceline.cluster.kubernetes import build_manifests

        refuse_local_run(prepared, site.kubernetes.mount)
        (job,) = jobs
        text = build_manifests(job, site.kubernetes, files=_frozen_files(prepared, job))
        return [_JobFile(job, job.job_folder / f"{_file_stem(job)}.yaml", text)]

    slurm = site.slurm if prepared.can_resume else site.slurm.model_copy(update={"requeue": "off"})
    return [_JobFile(job, job.job_folder / f"{_file_stem(job)}.sh", build_script(job, slurm)) for job in jobs]


def _file_stem(job: ClusterJob) -> str:
    """Return the file name without suffix; an evaluation keeps the script of its training."""
    if job.tasks:
        return f"tasks-{job.nodes}n"
    return "eval" if job.args[0] == "eval" else "job"


def _header_lines(prepared: PreparedJob) -> list[str]:
    lines = [shlex.join(("paceline", *sys.argv[1:]))]
    if prepared.ladder:
        lines.append(f"{prepared.name.replace('-', ' ', 1)}, as submitted, in job/{prepared.ladder_file}")
    if prepared.is_frozen:
        lines.append(f"recipe {prepared.recipe.hash}, as submitted, in job/recipe-{prepared.recipe.hash}.yaml")
    return lines


def _frozen_files(prepared: PreparedJob, job: ClusterJob) -> dict[Path, str]:
    files = {job.frozen_ladder: prepared.ladder} if prepared.ladder else {}
    if prepared.is_frozen:
        files[job.frozen_recipe] = f"# recipe {prepared.recipe.hash}\n{to_yaml_text(prepared.recipe.to_dict())}"
    return files


def _refuse_other_experiment(prepared: PreparedJob, rundir: RunDir, frozen: Mapping[Path, str]) -> None:
    """Raise `RecipeError` if the run directory holds, or has queued, a different run."""
    if prepared.request.verb != "train":
        return  # an experiment checks this itself
    queued = [path for path in sorted((rundir.path / "job").glob("recipe-*.yaml")) if path not in frozen]
    if rundir.recipe.exists():
        from paceline.training.resume import check_rundir

        check_rundir(rundir, prepared.recipe, resume=True)
    elif queued:
        from paceline.training.resume import list_forbidden_changes

        for path in queued:
            refused = list_forbidden_changes(load(str(path)).recipe.to_dict(), prepared.recipe.to_dict())
            if refused:
                fix = "name another, or remove that file if its job was cancelled"
                raise RecipeError(f"--run-dir: {path} is queued with {', '.join(refused)} ({fix})")


@contextlib.contextmanager
def _remove_on_failure(frozen: Mapping[Path, str]) -> Iterator[None]:
    new = [path for path in frozen if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder of a ladder
                path.parent.rmdir()
        raise


def _write_files(written: Sequence[_JobFile], frozen: Mapping[Path, str]) -> None:
    folder = written[-1].job.job_folder
    texts = {each.path: each.text for each in written} | dict(frozen)
    try:
        for path, text in texts.items():
            make_folder(path.parent, parents=True)
            write_atomic(path, text)
    except OSError as error:
        raise RecipeError(f"--run-dir: {folder} cannot be written to: {error.strerror} (name another)") from None


def _queue_jobs(slurm: SlurmClient, written: Sequence[_JobFile]) -> list[QueuedJob]:
    queued: list[QueuedJob] = []
    try:
        for each in written:
            after = [other.number for other in queued] if each is written[-1] else []
            queued.append(QueuedJob(slurm.submit(each.path, after), each.job, each.path))
    except BaseException:
        if queued:
            slurm.cancel([each.number for each in queued])  # tasks without the job that concludes
        raise
    return queued


def _output_file(slurm: SlurmClient, main: QueuedJob, site: Site) -> str:
    """Return the output file, or the site's pattern if Slurm does not report the file."""
    if site.slurm.output == "auto":
        return str(main.job.job_folder / f"{main.number}.out")
    with contextlib.suppress(SlurmError):
        return str(slurm.query_job(main.number).output or site.slurm.output)
    return site.slurm.output


def _create_objects(written: _JobFile, site: Site, *, as_json: bool) -> int:
    """Create the job with kubectl, or print how to. Raise `PacelineError` if its objects exist."""
    from paceline.cluster.kubernetes import kubectl_commands, run_dir_in_pods

    create, *then = kubectl_commands(written.job, site.kubernetes, written.path)
    *_, delete = then
    pod_run_dir = str(run_dir_in_pods(written.job, site.kubernetes))
    if shutil.which("kubectl", path=os.environ.get("PATH")) is None:
        show_kubernetes(written.job, written.path, [create, *then], "", pod_run_dir, as_json=as_json)
        return 0
    where = [*(["-n", site.kubernetes.namespace] if site.kubernetes.namespace else []), "-f", str(written.path)]
    # Objects that exist would stay unchanged beside the new ones.
    existing = _run_kubectl("get", "--ignore-not-found", "--output=name", *where).split()
    if existing:
        raise PacelineError(f"kubectl: {', '.join(existing)} exists already (delete it first: {delete})")
    show_kubernetes(written.job, written.path, then, _run_kubectl("create", *where), pod_run_dir, as_json=as_json)
    return 0


def _run_kubectl(*args: str) -> str:
    command = ["kubectl", *args]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ended.returncode:
        output = " ".join((ended.stderr or ended.stdout).split())
        raise PacelineError(f"kubectl: {output or 'failed without a message'}")
    return ended.stdout


def show_scripts(run_dir: Path, scripts: Sequence[tuple[Path, str]], *, as_json: bool) -> None:
    """Print the scripts, several with their paths."""
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
    """Follow the main job to its end, print its output, and return its exit code.

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
    # Ctrl-C ends following, not the job.
    except KeyboardInterrupt:
        print(f"stopped following: job {number} keeps running ({_cancel_hint(submitted)})", file=sys.stderr)
        raise
    if as_json:
        ended = {"state": end.state, "exit_code": end.exit_code, "restarts": end.restarts}
        print(json.dumps(submitted.to_dict() | ended))
    return end.exit_code


def show_kubernetes(
    job: ClusterJob, path: Path, steps: Sequence[str], kubectl_output: str, pod_run_dir: str, *, as_json: bool
) -> None:
    """Print the manifests' path, kubectl's output ("" if not installed), and the next commands.

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
