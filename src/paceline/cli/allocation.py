"""The Slurm allocation that this process is in: how many nodes it has, and how steps of ours are started on them."""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.core.errors import WorldError
from paceline.core.units import count
from paceline.lab.child import Start, start_process

_OF_A_TASK: Final = re.compile(
    r"SLURM_(STEP_\w+|STEPID|PROCID|LOCALID|NODEID|TASK_PID|NTASKS\w*|NPROCS|TASKS_PER_NODE|DISTRIBUTION|CPU_BIND\w*)"
)
"""What describes the process that asks, or how many tasks its job was asked for: a step of ours has its own.

The names are those of https://slurm.schedmd.com/srun.html, sections "Input" and "Output environment variables".
"""


def refuse_more_nodes(nodes: Sequence[int], environ: Mapping[str, str]) -> None:
    """Raise `WorldError` for nodes outside of an allocation, and for more of them than it has."""
    if not nodes:
        return
    if "SLURM_JOB_ID" not in environ:
        raise WorldError(
            f"--nodes: {_listed(nodes)}, but this is no allocation of Slurm's (start it in one, with salloc or sbatch)"
        )
    there = nodes_of(environ)
    if max(nodes) > there:
        raise WorldError(
            f"--nodes: {max(nodes)} is more than the {count(there, 'node')} of the allocation (ask Slurm for more)"
        )


def nodes_of(environ: Mapping[str, str]) -> int:
    """Return how many nodes the allocation has that this process is in, 0 where it is in none."""
    if "SLURM_JOB_ID" not in environ:
        return 0
    text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return int(text) if text.isdecimal() else 1


def gpus_of_a_node(environ: Mapping[str, str]) -> int:
    """Return how many GPUs the allocation has on a node, 0 where Slurm does not say."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def start_in(environ: Mapping[str, str]) -> Start:
    """Return what starts `srun`: a step that knows nothing of the process that asks for it.

    It shares what another step may hold, such as one that this process is in; steps of ours come one by one. Since
    Slurm 22.05 `srun` does not take the job's CPUs a task over by itself.
    """
    dropped = [word for name in sorted(environ) if _OF_A_TASK.fullmatch(name) for word in ("-u", name)]
    given = ["SLURM_OVERLAP=1"]
    if "SLURM_CPUS_PER_TASK" in environ and "SRUN_CPUS_PER_TASK" not in environ:
        given.append(f"SRUN_CPUS_PER_TASK={environ['SLURM_CPUS_PER_TASK']}")
    # srun ends its step on every node when it is asked to end; killed, it could not.
    return lambda command: start_process(["env", *dropped, *given, *command], signal.SIGTERM)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
