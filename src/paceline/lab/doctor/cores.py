"""What of a machine's cores this process may use, by affinity and by quota, and where they are."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.core.limits import find_limits
from paceline.core.units import count
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.here import Here

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def core_findings(here: Here) -> Iterator[Finding]:
    """Yield what there is to know of the CPU."""
    yield _cores(here)
    yield _threads(here)
    yield _numa(here)


def _cores(here: Here) -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    ranks, found = here.world.local_world_size, f"{usable} of {present} usable"
    asked = here.number("SLURM_CPUS_PER_TASK", 0)
    quota = find_limits(here.root / "proc", here.root / "sys/fs/cgroup").cores
    if quota < usable and (quota < ranks or quota % 1):
        return Finding.look(
            "cores",
            f"{found}, but only {quota:g} s of CPU time a second{f' for {ranks} ranks' if ranks > 1 else ''}",
            f"give the container or job whole cores, one a rank or more (docker --cpuset-cpus, an integer Kubernetes "
            f"limit); paceline counts on {max(1, int(quota))}, and who spends more stands still",
        )
    found += f", {quota:g} s of CPU time a second" if quota < usable else ""
    if usable < asked and here.world.launcher == "slurm":
        return Finding.look(
            "cores",
            f"{found}, and Slurm was asked for {asked} a task",
            "start with srun --cpus-per-task=$SLURM_CPUS_PER_TASK, which srun no longer takes from the job",
        )
    together = _of_all_ranks(here, usable)
    if ranks > together:
        return Finding.look(
            "cores", f"{found}, for {count(ranks, 'rank')}", f"start {together} a node, or ask for more"
        )
    return Finding.ok("cores", found)


def _of_all_ranks(here: Here, usable: int) -> int:
    """Return how many cores the ranks of this node have together: those bound to cores have others than this one."""
    launchers = 0
    if here.world.launcher in ("local", "torchrun"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            launchers = len(os.sched_getaffinity(os.getppid()))
    return max(usable, launchers, here.world.given_cpus)


def _threads(here: Here) -> Finding:
    limits = [f"{name}={here.environ[name]}" for name in _THREADS if name in here.environ]
    found = f"{', '.join(limits)} (set for each rank by parallel.threads)" if limits else "set for each rank"
    return Finding.ok("threads", found)


def _numa(here: Here) -> Finding:
    """Return which cores and GPUs are close to which memory.

    https://docs.kernel.org/admin-guide/mm/numaperf.html and, for devices,
    https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci.
    """
    folders = sorted((here.root / "sys/devices/system/node").glob("node[0-9]*"), key=_number_of)
    if not folders:
        return Finding.ok("NUMA", "not told by the kernel")
    gpus = _gpus_of_nodes(here)
    near = {_number_of(folder): here.text(f"sys/devices/system/node/{folder.name}/cpulist") for folder in folders}
    told = [_node(number, cores, gpus.get(number, [])) for number, cores in near.items()]
    found = f"{count(len(near), 'node')}: {'; '.join(told)}"
    close = {core for number in gpus for core in parse_cores(near.get(number, ""))}
    if close and not close & os.sched_getaffinity(0):
        return Finding.look(
            "NUMA",
            f"{found}; this process may use no core that is near a GPU",
            "bind each rank near its GPU: srun --gpus-per-task=1 --gpu-bind=single:1, or numactl --cpunodebind=N",
        )
    return Finding.ok("NUMA", found)


def parse_cores(text: str) -> set[int]:
    """Return the cores of a kernel's list, such as `0-3,8`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _gpus_of_nodes(here: Here) -> dict[int, list[str]]:
    """Return the addresses of NVIDIA's GPUs by node, of those whose node is known."""
    gpus: dict[int, list[str]] = {}
    for folder in sorted((here.root / "proc/driver/nvidia/gpus").glob("*:*")):
        number = here.text(f"sys/bus/pci/devices/{folder.name.lower()}/numa_node")
        if number.isdecimal():  # -1 where there is one node, or none is known
            gpus.setdefault(int(number), []).append(folder.name)
    return gpus


def _node(number: int, cores: str, gpus: list[str]) -> str:
    parts = [f"cores {cores}" if cores else "no cores", *([f"GPU {', '.join(gpus)}"] if gpus else [])]
    return f"{number} has {' and '.join(parts)}"


def _number_of(folder: Path) -> int:
    return int(folder.name.removeprefix("node"))
