"""Slurm allocation of this process: its nodes, and how to start job steps on them."""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.core.errors import WorldError
from paceline.core.units import count
from paceline.lab.child import ProcessStarter, start_process

_TASK_VARIABLE: Final = re.compile(
    r"SLURM_(STEP_\w+|STEPID|PROCID|LOCALID|NODEID|TASK_PID|NTASKS\w*|NPROCS|TASKS_PER_NODE|DISTRIBUTION|CPU_BIND\w*)"
)
"""Variables that describe the calling process, or the tasks of its job; a step of ours gets its own.

Names: https://slurm.schedmd.com/srun.html, sections "Input" and "Output environment variables".
"""


def refuse_more_nodes(nodes: Sequence[int], environ: Mapping[str, str]) -> None:
    """Raise `WorldError` for nodes outside of an allocation, and for more than it has."""
    if not nodes:
        return
    if "SLURM_JOB_ID" not in environ:
        raise WorldError(f"--nodes: {_join_numbers(nodes)}, but this is not a Slurm allocation (use salloc or sbatch)")
    allocated = allocated_nodes(environ)
    if max(nodes) > allocated:
        raise WorldError(
            f"--nodes: {max(nodes)} is more than the {count(allocated, 'node')} of the allocation (request more)"
        )


def allocated_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes in the current allocation, 0 outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return 0
    text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return int(text) if text.isdecimal() else 1


def gpus_per_node(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs per node of the allocation, 0 if Slurm does not report it."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def srun_starter(environ: Mapping[str, str]) -> ProcessStarter:
    """Return a function that starts `srun` without the variables of the calling task."""
    dropped = [word for name in sorted(environ) if _TASK_VARIABLE.fullmatch(name) for word in ("-u", name)]
    given = ["SLURM_OVERLAP=1"]  # share resources that another step holds, such as the one of this process
    # Since Slurm 22.05, srun does not inherit the CPUs per task of the job.
    if "SLURM_CPUS_PER_TASK" in environ and "SRUN_CPUS_PER_TASK" not in environ:
        given.append(f"SRUN_CPUS_PER_TASK={environ['SLURM_CPUS_PER_TASK']}")
    # On SIGTERM srun ends its step on every node, which it could not on SIGKILL.
    return lambda command: start_process(["env", *dropped, *given, *command], signal.SIGTERM)


def _join_numbers(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
