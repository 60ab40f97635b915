"""Write a job as a script that `sbatch` takes, and that reads as one written by hand: what is needed, what is loaded,
the program, and what happens when it was asked to leave.

It starts nothing and asks no Slurm: `cluster.slurm_jobs` does. Facts are those of https://slurm.schedmd.com/sbatch.html
and srun.html (22.05): `--signal` reaches the tasks of `srun`, or with `B:` the batch shell alone, up to a minute early;
`srun` does not take `--cpus-per-task` over from the job; what a preempted batch shell has started itself hears nothing.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from paceline.cluster.job import Job
from paceline.cluster.quoting import comment, directive, shell_command, shell_word
from paceline.cluster.slurm_site import Container, SlurmSite
from paceline.core.errors import RecipeError
from paceline.core.units import Duration

_LEFT: Final = 75
"""What a program ends with that was asked to leave and has saved (docs/reference/exit-codes.md)."""
_ASKED_AT_ONCE: Final = 138
"""128 + SIGUSR1: what one ends with that was asked before it could take note."""
_TASK: Final = '"$SLURM_ARRAY_TASK_ID"'
_END: Final = (
    "# When the job ends, so that the run leaves in time. Slurm says it to the tasks itself since 23.02.",
    'ends=$(squeue --noheader --format=%e --job "$SLURM_JOB_ID")',
    'export PACELINE_END_TIME="${SLURM_JOB_END_TIME:-$(date +%s --date="$ends" 2> /dev/null)}"',
)
_RANKS: Final = "# A task is a rank, and finds its place in Slurm's variables; when one fails, the others are ended."
_ALONE: Final = "# Slurm's warning reaches this shell alone, which passes it on to the program that it has started."
_NUMBER: Final = '"$SLURM_JOB_ID"'
_NUMBER_OF_TASK: Final = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
"""One task of an array has the number of the whole array as its SLURM_JOB_ID, which means all of its tasks."""


def script(job: Job, site: SlurmSite, python: str = sys.executable) -> str:
    """Return the bash script of a job; `python` runs it where the site does not say which does.

    Raise `RecipeError` for what Slurm cannot be told.
    """
    _refuse(job, site)
    blocks = [
        ["#!/bin/bash", *map(comment, job.said)],
        _directives(job, site),
        _environment(site),
        _ranks(job, site, python) if job.is_ranks else _alone(job, site, python),
        _ending(job, site),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def output_of(job: Job, site: SlurmSite) -> str:
    """Return the file of what a job says, by Slurm's pattern for file names. Raise `RecipeError` where it has none."""
    if site.output != "auto":
        return site.output
    folder = str(job.job_folder)
    if "\\" in folder:
        raise RecipeError(f"--run-dir: {folder!r} has a backslash, which Slurm's output cannot have (name another)")
    return folder.replace("%", "%%") + ("/%A_%a.out" if job.tasks else "/%j.out")


def lead_s(job: Job, site: SlurmSite) -> int:
    """Return how many seconds before its time limit a job is asked to leave by a signal, if it has not left by itself.

    As long as it may take to leave, which Slurm may lengthen by up to a minute; of a short limit no more than half.
    """
    limit_s: float = math.inf if site.time == "auto" else site.time.seconds
    wanted_s: float = min(job.grace_s, limit_s / 2) if site.lead == "auto" else site.lead.seconds
    return round(wanted_s)


def _refuse(job: Job, site: SlurmSite) -> None:
    """Raise `RecipeError` for a container that cannot hold the program."""
    if site.container.runtime != "none" and not job.is_ranks and (job.nodes > 1 or _says_nodes(job)):
        raise RecipeError(
            f"slurm.container.runtime: {site.container.runtime} has no srun in it, which {job.words[0]} over nodes "
            "starts its ranks by (set slurm.container.runtime=none, or leave --nodes out)"
        )
    if site.container.runtime == "pyxis" and not job.is_ranks:
        raise RecipeError(
            f"slurm.container.runtime: pyxis starts with srun, and {job.words[0]} is started without (use apptainer)"
        )


def _says_nodes(job: Job) -> bool:
    return any(word.partition("=")[0] == "--nodes" for word in job.words)


def _directives(job: Job, site: SlurmSite) -> list[str]:
    """Return the `#SBATCH` lines, in the order that people write them."""
    name = "".join(each if each.isprintable() else "_" for each in job.name)
    asked = {
        "job-name": name,
        "partition": _said(site.partition),
        "account": _said(site.account),
        "qos": _said(site.qos),
        "reservation": _said(site.reservation),
        "constraint": _said(site.constraint),
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks_per_node),
        "cpus-per-task": _said(str(_cpus(job, site))),
        "mem": _said(site.memory),
        site.gpu_option: _gpus(job, site),
        "time": None if site.time == "auto" else _clock(site.time),
        "array": _ranges(job.tasks) or None,
        "chdir": str(job.folder),
        "output": output_of(job, site),
        "open-mode": "append",
        "signal": f"{'' if job.is_ranks else 'B:'}USR1@{lead_s(job, site)}",
    }
    lines = [directive(option, value) for option, value in asked.items() if value is not None]
    lines.append("#SBATCH --requeue" if site.requeue == "on" else "#SBATCH --no-requeue")
    lines += ["#SBATCH --exclusive"] if site.exclusive == "on" else []
    if site.container.runtime == "shifter":
        lines.append(directive("image", site.container.image))
        lines += [directive("volume", ";".join(site.container.mounts))] if site.container.mounts else []
    for option, equals, value in (each.removeprefix("--").partition("=") for each in site.options):
        lines.append(directive(option, value) if equals else f"#SBATCH --{option}")
    return lines


def _said(value: str) -> str | None:
    """Return what a site wants, None where the cluster is to decide."""
    return None if value == "auto" else value


def _gpus(job: Job, site: SlurmSite) -> str | None:
    """Return how many GPUs of a node are asked for, and of which kind; None for none."""
    if not job.gpus_per_node:
        return None
    kinds = [] if site.gpu_type == "auto" else [site.gpu_type]
    return ":".join([*(["gpu"] if site.gpu_option == "gres" else []), *kinds, str(job.gpus_per_node)])


def _clock(limit: Duration) -> str:
    """Return a length of time as Slurm reads it: hours, minutes and seconds."""
    minutes, second = divmod(round(limit.seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def _ranges(tasks: Sequence[int]) -> str:
    """Return the numbers of tasks as Slurm takes them, such as `0-3,7`."""
    runs: list[list[int]] = []
    for task in sorted(tasks):
        if runs and task == runs[-1][-1] + 1:
            runs[-1].append(task)
        else:
            runs.append([task])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _environment(site: SlurmSite) -> list[str]:
    """Return the lines that load modules, do what the site wants, activate its Python and set its variables."""
    lines = [" ".join(["module load", *map(shell_word, site.modules)])] if site.modules else []
    lines += [site.setup.rstrip("\n")] if site.setup.strip() else []
    if site.venv != "off":
        lines.append(f"source {shell_word(str(Path(site.venv).expanduser() / 'bin' / 'activate'))}")
    return lines + [f"export {name}={shell_word(value)}" for name, value in site.environ.items()]


def _cpus(job: Job, site: SlurmSite) -> int | Literal["auto"]:
    """Return the CPUs of each rank: as many as the site says, or its share of the node's."""
    if site.cpus_per_rank != "auto" or site.cpus_per_node == "auto":
        return site.cpus_per_rank
    return max(1, site.cpus_per_node // job.ranks_per_node)


def _ranks(job: Job, site: SlurmSite, python: str) -> list[str]:
    """Return the lines that start the program as ranks and wait for them."""
    options = ["--kill-on-bad-exit=1"]
    if _cpus(job, site) != "auto":
        options.append(f"--cpus-per-task={_cpus(job, site)}")
    if site.container.runtime == "pyxis":
        options += [f"--container-image={site.container.image}", f"--container-workdir={job.folder}"]
        options.append(f"--container-mounts={','.join(_mounts(job, site.container))}")
    started = [["srun"], *([shell_word(option)] for option in (*options, *site.srun))]
    return [*_END, "", _RANKS, shell_command([*started, *_program(job, site, python)]), "code=$?"]


def _alone(job: Job, site: SlurmSite, python: str) -> list[str]:
    """Return the lines that start the program as a process of the batch shell, and wait for it through a signal."""
    return [
        _ALONE,
        "is_asked=",
        "trap 'is_asked=yes; kill -TERM $!' USR1",
        shell_command(_program(job, site, python)) + " &",
        "program=$!",
        'while kill -0 "$program" 2> /dev/null; do  # the signal ends the wait, not the program',
        '    wait "$program"',
        "done",
        'wait "$program"  # which has ended, and says how',
        "code=$?",
    ]


def _program(job: Job, site: SlurmSite, python: str) -> list[list[str]]:
    """Return the program's words, quoted, an option and its value together."""
    words = list(map(shell_word, job.words))
    started = [*_container(job, site.container), shell_word(_python(site, python)), "-P", "-m", "paceline"]
    groups = [[*started, words[0]]]
    for word, quoted in zip(job.words[1:], words[1:], strict=True):
        is_value = len(groups) > 1 and groups[-1][0].startswith("--") and len(groups[-1]) == 1
        if is_value and not word.startswith("-"):
            groups[-1].append(quoted)
        else:
            groups.append([quoted])
    groups += [["--ranks", str(job.num_ranks)]] if job.is_ranks else []
    return [*groups, ["--task", _TASK]] if job.tasks else groups


def _python(site: SlurmSite, python: str) -> str:
    if site.python != "auto":
        return str(Path(site.python).expanduser())
    if site.container.runtime != "none":
        return "python"
    return python if site.venv == "off" else str(Path(site.venv).expanduser() / "bin" / "python")


def _container(job: Job, container: Container) -> list[str]:
    """Return the words, quoted, of what starts the program in a container; none without one, or where srun does."""
    match container.runtime:
        case "apptainer":
            gpus = ["--nv"] if job.gpus_per_node else []
            binds = [f"--bind={shell_word(mount)}" for mount in _mounts(job, container)]
            folder = f"--pwd={shell_word(str(job.folder))}"
            return ["apptainer", "exec", *gpus, *binds, folder, shell_word(container.image)]
        case "shifter":
            return ["shifter"]
        case _:
            return []


def _mounts(job: Job, container: Container) -> list[str]:
    """Return what a container sees of the node, as HERE:THERE. Raise `RecipeError` for a path that cannot be told."""
    folders = list(dict.fromkeys([str(job.folder), str(job.run_dir)]))
    wrong = next((folder for folder in folders if ":" in folder or "," in folder), None)
    if wrong is not None:
        raise RecipeError(f"slurm.container: {wrong!r} has a colon or comma, which mounts cannot have (name another)")
    return [*(f"{folder}:{folder}" for folder in folders), *container.mounts]


def _ending(job: Job, site: SlurmSite) -> list[str]:
    """Return the lines that queue the job again where it has left early, and end it as the program has ended."""
    if site.requeue == "off":
        return ['exit "$code"']
    if job.is_ranks:
        why = f"# {_LEFT}: asked to leave, and saved; {_ASKED_AT_ONCE}: asked before it had begun. Failures to Slurm."
        condition = f'{{ [ "$code" -eq {_LEFT} ] || [ "$code" -eq {_ASKED_AT_ONCE} ]; }}'
    else:
        why = "# Asked to leave before it had ended: started again, it goes on where it was."
        condition = '[ -n "$is_asked" ] && [ "$code" -ne 0 ]'
    condition += f' && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {site.restarts} ]'
    number = _NUMBER_OF_TASK if job.tasks else _NUMBER
    return [why, f"if {condition}; then", f"    scontrol requeue {number}", "fi", 'exit "$code"']
