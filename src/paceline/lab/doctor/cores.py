"""Check the CPU cores that this process may use: affinity, quota and NUMA nodes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.core.limits import find_limits
from paceline.core.units import count
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.here import HostContext

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_cores(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield findings on the CPU."""
    yield _check_usable_cores(host)
    yield _check_threads(host)
    yield _check_numa(host)


def _check_usable_cores(host: HostContext) -> DoctorFinding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    ranks, found = host.world.local_world_size, f"{usable} of {present} usable"
    requested = host.get_env_int("SLURM_CPUS_PER_TASK", 0)
    quota = find_limits(host.root / "proc", host.root / "sys/fs/cgroup").cores
    if quota < usable and (quota < ranks or quota % 1):
        return DoctorFinding.warning(
            "cores",
            f"{found}, but only {quota:g} s of CPU time per second{f' for {ranks} ranks' if ranks > 1 else ''}",
            f"give the container or job whole cores, at least one per rank (docker --cpuset-cpus, an integer "
            f"Kubernetes limit); paceline uses {max(1, int(quota))}, and more would be throttled",
        )
    found += f", {quota:g} s of CPU time per second" if quota < usable else ""
    if usable < requested and host.world.launcher == "slurm":
        return DoctorFinding.warning(
            "cores",
            f"{found}, but {requested} per task were requested from Slurm",
            "start with srun --cpus-per-task=$SLURM_CPUS_PER_TASK, which srun no longer takes from the job",
        )
    together = _count_node_cores(host, usable)
    if ranks > together:
        return DoctorFinding.warning(
            "cores", f"{found}, for {count(ranks, 'rank')}", f"start {together} per node, or request more"
        )
    return DoctorFinding.ok("cores", found)


def _count_node_cores(host: HostContext, usable: int) -> int:
    # Ranks bound to cores have different ones each, so look at the launcher's affinity, too.
    launchers = 0
    if host.world.launcher in ("local", "torchrun"):
        with contextlib.suppress(ProcessLookupError):  # the parent has exited
            launchers = len(os.sched_getaffinity(os.getppid()))
    return max(usable, launchers, host.world.given_cpus)


def _check_threads(host: HostContext) -> DoctorFinding:
    limits = [f"{name}={host.environ[name]}" for name in _THREAD_VARIABLES if name in host.environ]
    found = f"{', '.join(limits)} (set for each rank by parallel.threads)" if limits else "set for each rank"
    return DoctorFinding.ok("threads", found)


def _check_numa(host: HostContext) -> DoctorFinding:
    """Return the NUMA nodes with their cores and GPUs.

    https://docs.kernel.org/admin-guide/mm/numaperf.html,
    https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci
    """
    folders = sorted((host.root / "sys/devices/system/node").glob("node[0-9]*"), key=_parse_numa_node)
    if not folders:
        return DoctorFinding.ok("NUMA", "not reported by the kernel")
    gpus = _list_gpus_by_numa_node(host)
    cores_by_node = {
        _parse_numa_node(folder): host.read_text(f"sys/devices/system/node/{folder.name}/cpulist") for folder in folders
    }
    descriptions = [_format_numa_node(number, cores, gpus.get(number, [])) for number, cores in cores_by_node.items()]
    found = f"{count(len(cores_by_node), 'node')}: {'; '.join(descriptions)}"
    gpu_cores = {core for number in gpus for core in parse_core_list(cores_by_node.get(number, ""))}
    if gpu_cores and not gpu_cores & os.sched_getaffinity(0):
        return DoctorFinding.warning(
            "NUMA",
            f"{found}; this process may use no core near a GPU",
            "bind each rank near its GPU: srun --gpus-per-task=1 --gpu-bind=single:1, or numactl --cpunodebind=N",
        )
    return DoctorFinding.ok("NUMA", found)


def parse_core_list(text: str) -> set[int]:
    """Return the cores of a kernel's list, such as `0-3,8`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _list_gpus_by_numa_node(host: HostContext) -> dict[int, list[str]]:
    """Return the PCI addresses of NVIDIA GPUs by NUMA node, of those whose node is known."""
    gpus: dict[int, list[str]] = {}
    for folder in sorted((host.root / "proc/driver/nvidia/gpus").glob("*:*")):
        number = host.read_text(f"sys/bus/pci/devices/{folder.name.lower()}/numa_node")
        if number.isdecimal():  # -1 for a single or unknown node
            gpus.setdefault(int(number), []).append(folder.name)
    return gpus


def _format_numa_node(number: int, cores: str, gpus: list[str]) -> str:
    parts = [f"cores {cores}" if cores else "no cores", *([f"GPU {', '.join(gpus)}"] if gpus else [])]
    return f"{number} has {' and '.join(parts)}"


def _parse_numa_node(folder: Path) -> int:
    return int(folder.name.removeprefix("node"))
