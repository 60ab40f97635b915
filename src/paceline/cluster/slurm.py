"""Write a job as a batch script for `sbatch`, with all text quoted."""

import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from paceline.cluster.job import ClusterJob
from paceline.cluster.site import Container, SlurmSite
from paceline.core.errors import RecipeError
from paceline.core.templates import text_environment
from paceline.core.units import Duration

_LINE_WIDTH: Final = 100
_UNQUOTED: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_TASK_ID: Final = '"$SLURM_ARRAY_TASK_ID"'


def shell_word(text: str) -> str:
    r"""Return `text` as one bash word on one line; unprintable characters become `$'\x0a'`."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_ansi_c_escape, text)) + "'"


def shell_command(groups: Iterable[Sequence[str]]) -> str:
    """Return quoted words as one command, with line breaks between groups only."""
    lines: list[str] = []
    for group in map(" ".join, groups):
        if lines and len(lines[-1]) + 1 + len(group) <= _LINE_WIDTH:
            lines[-1] += f" {group}"
        else:
            lines.append(group)
    return " \\\n    ".join(lines)


def directive(name: str, value: str | None) -> str:
    """Return `#SBATCH --name=value`, quoted for sbatch, or `#SBATCH --name` for None.

    sbatch undoes quotes and backslashes, but reads no shell syntax (https://slurm.schedmd.com/sbatch.html). Raise
    `RecipeError` for unprintable characters.
    """
    if value is None:
        return f"#SBATCH --{name}"
    if not value.isprintable():
        raise RecipeError(f"--{name}: {value!r} has a character that an #SBATCH line cannot hold (name another)")
    if _UNQUOTED.fullmatch(value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def comment(text: str) -> str:
    """Return `text` as a comment line, with unprintable characters escaped as in Python."""
    return "# " + "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _ansi_c_escape(character: str) -> str:
    """Return a character escaped for `$'...'`; undecodable bytes are preserved."""
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def build_script(job: ClusterJob, site: SlurmSite, python: str = sys.executable) -> str:
    """Return the bash script of a job; `python` is the default interpreter.

    Raise `RecipeError` for values that Slurm cannot take.
    """
    _check_container(job, site)
    venv = None if site.venv == "off" else Path(site.venv).expanduser()
    if site.python != "auto":
        python = str(Path(site.python).expanduser())
    elif site.container.runtime != "none":
        python = "python"
    elif venv:
        python = str(venv / "bin" / "python")
    program = _program_args(job, site, python)
    return (
        text_environment("paceline.cluster", quote=shell_word, comment=comment)
        .get_template("job.sh.j2")
        .render(
            job=job,
            site=site,
            venv=venv,
            directive=directive,
            directives=_directives(job, site),
            command=shell_command([*_srun_args(job, site), *program] if job.starts_ranks else program),
        )
    )


def output_pattern(job: ClusterJob, site: SlurmSite) -> str:
    """Return the output file pattern of a job. Raise `RecipeError` if Slurm cannot express it."""
    if site.output != "auto":
        return site.output
    folder = str(job.job_folder)
    if "\\" in folder:
        raise RecipeError(f"--run-dir: {folder!r} has a backslash, which Slurm cannot write to (name another)")
    return folder.replace("%", "%%") + ("/%A_%a.out" if job.tasks else "/%j.out")


def signal_lead_s(job: ClusterJob, site: SlurmSite) -> int:
    """Return how many seconds before the time limit Slurm signals the job."""
    limit_s: float = math.inf if site.time == "auto" else site.time.seconds
    wanted_s: float = min(job.grace_s, limit_s / 2) if site.lead == "auto" else site.lead.seconds
    return round(wanted_s)


def _check_container(job: ClusterJob, site: SlurmSite) -> None:
    if site.container.runtime != "none" and not job.starts_ranks and (job.nodes > 1 or _has_nodes_option(job)):
        raise RecipeError(
            f"slurm.container.runtime: {site.container.runtime} has no srun in it, which {job.args[0]} "
            "needs to start ranks on several nodes (set slurm.container.runtime=none, or leave --nodes out)"
        )
    if site.container.runtime == "pyxis" and not job.starts_ranks:
        raise RecipeError(
            f"slurm.container.runtime: pyxis needs srun, but {job.args[0]} is started without it (use apptainer)"
        )


def _has_nodes_option(job: ClusterJob) -> bool:
    return any(word.partition("=")[0] == "--nodes" for word in job.args)


def _directives(job: ClusterJob, site: SlurmSite) -> list[tuple[str, str | None]]:
    """Return sbatch's options and their values, None for an option without one."""
    values = {
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "reservation": site.reservation,
        "constraint": site.constraint,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks_per_node),
        "cpus-per-task": str(_cpus_per_rank(job, site)),
        "mem": site.memory,
        site.gpu_option: _gpu_request(job, site),
        "time": "auto" if site.time == "auto" else _time_limit(site.time),
        "array": _task_ranges(job.tasks) or "auto",
        "chdir": str(job.folder),
        "output": output_pattern(job, site),
        # A requeued job continues its output file.
        "open-mode": "append",
        # B: only the batch shell, which forwards the signal to a program without srun.
        "signal": f"{'' if job.starts_ranks else 'B:'}USR1@{signal_lead_s(job, site)}",
    }
    name = "".join(each if each.isprintable() else "_" for each in job.name)
    options: list[tuple[str, str | None]] = [("job-name", name)]
    options += [(option, value) for option, value in values.items() if value != "auto"]  # auto: the cluster's default
    options.append(("requeue" if site.requeue == "on" else "no-requeue", None))
    options += [("exclusive", None)] if site.exclusive == "on" else []
    if site.container.runtime == "shifter":
        options.append(("image", site.container.image))
        options += [("volume", ";".join(site.container.mounts))] if site.container.mounts else []
    for option, equals, value in (each.removeprefix("--").partition("=") for each in site.options):
        options.append((option, value if equals else None))
    return options


def _gpu_request(job: ClusterJob, site: SlurmSite) -> str:
    if not job.gpus_per_node:
        return "auto"
    kinds = [] if site.gpu_type == "auto" else [site.gpu_type]
    return ":".join([*(["gpu"] if site.gpu_option == "gres" else []), *kinds, str(job.gpus_per_node)])


def _time_limit(limit: Duration) -> str:
    minutes, second = divmod(round(limit.seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def _task_ranges(tasks: Sequence[int]) -> str:
    """Return task numbers as Slurm ranges, such as `0-3,7`."""
    runs: list[list[int]] = []
    for task in sorted(tasks):
        if runs and task == runs[-1][-1] + 1:
            runs[-1].append(task)
        else:
            runs.append([task])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _cpus_per_rank(job: ClusterJob, site: SlurmSite) -> int | Literal["auto"]:
    if site.cpus_per_rank != "auto" or site.cpus_per_node == "auto":
        return site.cpus_per_rank
    return max(1, site.cpus_per_node // job.ranks_per_node)


def _srun_args(job: ClusterJob, site: SlurmSite) -> list[list[str]]:
    # Without it, the other ranks would wait in a collective for one that failed.
    options = ["--kill-on-bad-exit=1"]
    if _cpus_per_rank(job, site) != "auto":
        # Since Slurm 22.05, srun does not inherit the CPUs per task of the job.
        options.append(f"--cpus-per-task={_cpus_per_rank(job, site)}")
    if site.container.runtime == "pyxis":
        options += [f"--container-image={site.container.image}", f"--container-workdir={job.folder}"]
        options.append(f"--container-mounts={','.join(_container_mounts(job, site.container))}")
    return [["srun"], *([shell_word(option)] for option in (*options, *site.srun))]


def _program_args(job: ClusterJob, site: SlurmSite, python: str) -> list[list[str]]:
    # -P: do not import modules from the working directory, which may hold data.
    args = list(map(shell_word, job.args))
    started = [*_container_args(job, site.container), shell_word(python), "-P", "-m", "paceline"]
    groups = [[*started, args[0]]]
    for word, quoted in zip(job.args[1:], args[1:], strict=True):
        is_value = len(groups) > 1 and groups[-1][0].startswith("--") and len(groups[-1]) == 1
        if is_value and not word.startswith("-"):
            groups[-1].append(quoted)
        else:
            groups.append([quoted])
    groups += [["--ranks", str(job.num_ranks)]] if job.starts_ranks else []
    return [*groups, ["--task", _TASK_ID]] if job.tasks else groups


def _container_args(job: ClusterJob, container: Container) -> list[str]:
    """Return the quoted command prefix that runs in a container."""
    match container.runtime:
        case "apptainer":
            gpus = ["--nv"] if job.gpus_per_node else []
            binds = [f"--bind={shell_word(mount)}" for mount in _container_mounts(job, container)]
            folder = f"--pwd={shell_word(str(job.folder))}"
            return ["apptainer", "exec", *gpus, *binds, folder, shell_word(container.image)]
        case "shifter":
            return ["shifter"]
        case _:
            return []


def _container_mounts(job: ClusterJob, container: Container) -> list[str]:
    """Return bind mounts as HERE:THERE. Raise `RecipeError` for a colon or comma."""
    folders = list(dict.fromkeys([str(job.folder), str(job.run_dir)]))
    wrong = next((folder for folder in folders if ":" in folder or "," in folder), None)
    if wrong is not None:
        raise RecipeError(
            f"slurm.container: {wrong!r} has a colon or comma, which mounts cannot contain (name another)"
        )
    return [*(f"{folder}:{folder}" for folder in folders), *container.mounts]
