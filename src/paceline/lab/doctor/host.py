"""Check one host: versions, cores, load, memory, limits and clock."""

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

from paceline import __version__
from paceline.core.host import INFINITY, CgroupLimits, find_limits, rank_cores
from paceline.core.process import cpu_ticks, descendants
from paceline.core.units import count, seconds, share, size
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.data.worker_limits import estimate_batch_bytes
from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.gpus import check_gpus
from paceline.lab.doctor.network import check_network, check_rendezvous
from paceline.lab.doctor.storage import check_storage
from paceline.measure.bottleneck import LOST_CPU_SHARE
from paceline.measure.cpu import core_ticks
from paceline.parallel.environ import count_gpus

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SAMPLE_S: Final = 0.5
"""Sampling time of the cores: 50 clock ticks each."""
_LOW_MEMORY_BYTES: Final = 2 * 2**30
_LOW_SHM_BYTES: Final = 2**29
"""Containers have 64 MiB by default: enough for one worker as below, but not for NCCL or larger images."""
_TYPICAL_BATCH_BYTES: Final = 2 * estimate_batch_bytes(64, 3, 224)
"""A rank's training and evaluation batch of 64 images of 224 px each."""
_PREFETCHED_BATCHES: Final = 2
"""Batches that a worker prefetches (`BATCHES_PER_WORKER` of `data.loaders.process`, which imports torch)."""
_MAX_WORKERS: Final = 16
_BASE_FILES: Final = 64
"""Files of a rank besides those below: the program's own, checkpoints, logs, images."""
_FILES_PER_WORKER: Final = 24
"""As in `data.worker_limits`: a training and an evaluation worker, and their batches."""
_RENDEZVOUS_FILES: Final = 21
_FILES_PER_RANK: Final = 2
"""Files of gloo: 21 + 2n for n ranks, measured with torch 2.15 by counting /proc/self/fd."""
_LOW_LOCKED_BYTES: Final = 2**30
_TIME_ERROR: Final = 5
"""TIME_ERROR, the clock is not synchronized: adjtimex(2)."""
_TIMEX: Final = struct.Struct("@I4xqqqq")
"""First fields of `struct timex` with a 64-bit long: modes, offset, freq, and maxerror in microseconds."""
_TIMEX_BYTES: Final = 256  # it has 208
KernelClock = tuple[int, float]
"""Return value of adjtimex(2), negative if unavailable; and the maximum error of the clock in seconds."""


def check_cores(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield findings on the CPU."""
    yield _check_usable_cores(host)
    yield _check_threads(host)
    yield _check_numa(host)


def _check_usable_cores(host: HostContext) -> DoctorFinding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    ranks, found = host.world.local_world_size, f"{usable} of {present} usable"
    requested = host.get_env_int("SLURM_CPUS_PER_TASK", 0)
    # A quota of whole cores works as fewer cores; a fraction throttles all threads for a part of each period.
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
    return max(usable, launchers, host.world.allocated_cpus)


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


def _sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


class CpuTicks(NamedTuple):
    """Clock ticks of the cores: used by all processes, stolen by a hypervisor, and used by paceline."""

    busy: int
    stolen: int
    own: int


def sample_ticks(
    host: HostContext, cores: Sequence[int], wait: Callable[[float], object] = _sleep
) -> tuple[CpuTicks, float]:
    """Return the ticks used of `cores` during a sample, and the ticks per core in it."""
    # Ranks that `doctor --ranks` started have the same parent and do not count as other processes.
    before, start_s = _read_ticks(host, cores), host.now()
    wait(_SAMPLE_S)
    after, end_s = _read_ticks(host, cores), host.now()
    passed = CpuTicks(*(after_ticks - before_ticks for before_ticks, after_ticks in zip(before, after, strict=True)))
    return passed, ((end_s - start_s) or _SAMPLE_S) * os.sysconf("SC_CLK_TCK")


def check_load(host: HostContext, wait: Callable[[float], object] = _sleep) -> DoctorFinding:
    """Return how many of the usable cores other processes keep busy."""
    cores = sorted(os.sched_getaffinity(0))
    if not host.read_text("proc/stat"):
        return DoctorFinding.ok("load", "not reported by the kernel")
    passed, ticks_per_core = sample_ticks(host, cores, wait)
    others = max(0, passed.busy - passed.own + passed.stolen) / ticks_per_core
    busy_share = min(1.0, others / len(cores))
    found = f"other processes keep {others:.1f} of {len(cores)} cores busy ({share(busy_share)})"
    load_average = host.read_text("proc/loadavg").split()[:1]
    if load_average:
        found += f", load average {load_average[0]}"
    if busy_share < LOST_CPU_SHARE:
        return DoctorFinding.ok("load", found)
    hypervisor = ", or move off a shared virtual machine" if passed.stolen > passed.busy - passed.own else ""
    return DoctorFinding.warning("load", found, f"stop them before measuring: a run would share the cores{hypervisor}")


def _read_ticks(host: HostContext, cores: Sequence[int]) -> CpuTicks:
    proc = host.root / "proc"
    top = os.getpid() if host.world.local_world_size == 1 else os.getppid()
    own = sum(cpu_ticks(pid, proc) for pid in {os.getpid(), top, *descendants(top, proc)})
    return CpuTicks(*core_ticks(cores, proc), own)


def check_memory_and_limits(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield findings on memory and limits, for images of a typical size."""
    yield _check_memory(host)
    yield _check_shared_memory(host)
    yield _check_open_files(host)
    yield from _check_locked_memory(host)


def _check_memory(host: HostContext) -> DoctorFinding:
    lines = host.read_text("proc/meminfo").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if not {"MemAvailable", "MemTotal"} <= values.keys():
        return DoctorFinding.ok("memory", "not reported by the kernel")
    available, total = (int(values[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limits, scope = find_limits(host.root / "proc", host.root / "sys/fs/cgroup"), ""
    if limits.memory_bytes < total:
        total, scope = int(limits.memory_bytes), " that this container or job may use"
        available = min(available, _compute_available_memory(limits))
    found = f"{size(available)} free of {size(total)}{scope}"
    if available < _LOW_MEMORY_BYTES:
        return DoctorFinding.warning("memory", found, "stop other programs, request more, or lower data.workers")
    return DoctorFinding.ok("memory", found)


def _compute_available_memory(limits: CgroupLimits) -> int:
    used = 0  # if the usage is unknown
    with contextlib.suppress(OSError, ValueError):
        used = limits.used_memory_bytes()
    return max(0, int(limits.memory_bytes) - used)


def _check_shared_memory(host: HostContext) -> DoctorFinding:
    folder = host.root / "dev" / "shm"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return DoctorFinding.problem("shared memory", f"no {folder}", "mount a tmpfs there, or set data.workers=0")
    ranks = host.world.local_world_size
    workers = min(_MAX_WORKERS, max(1, _count_rank_cores(host) - 1))
    # Batches of workers travel through shared memory, as do those in preparation.
    usual, least = (ranks * (_PREFETCHED_BATCHES * num + 1) * _TYPICAL_BATCH_BYTES for num in (workers, 1))
    found = f"{size(free)} free in {folder}"
    advice = "start the container with --shm-size=8g (Kubernetes: mount an emptyDir of medium Memory there)"
    if free < least:
        per_rank = f" of each of {ranks} ranks" if ranks > 1 else ""
        needed = f"one worker{per_rank} with batches of 64 images needs {size(least)}"
        return DoctorFinding.problem("shared memory", f"{found}; {needed}", f"{advice}, or set data.workers=0")
    if free < max(usual, _LOW_SHM_BYTES):
        needed = f"{count(workers, 'worker')} per rank with batches of 64 images need {size(usual)}"
        return DoctorFinding.warning("shared memory", f"{found}; {needed}", f"{advice}, or set data.workers lower")
    return DoctorFinding.ok("shared memory", found)


def _check_open_files(host: HostContext) -> DoctorFinding:
    soft, hard = (
        INFINITY if limit == resource.RLIM_INFINITY else limit for limit in _get_limits(resource.RLIMIT_NOFILE)
    )
    ranks, workers = host.world.world_size, min(_MAX_WORKERS, _count_rank_cores(host))
    rendezvous_files = _RENDEZVOUS_FILES + _FILES_PER_RANK * ranks if ranks > 1 else 0
    needed = _BASE_FILES + rendezvous_files + _FILES_PER_WORKER * workers
    found = f"{_format_limit(soft)} (at most {_format_limit(hard)})"
    if hard < needed:
        advice = f"raise it (ulimit -n {needed}; docker --ulimit nofile={needed}), or set data.workers=0"
        return DoctorFinding.problem("open files", f"{found}; a rank may need {needed:,}", advice)
    if soft < needed:
        return DoctorFinding.warning("open files", f"{found}; a rank may need {needed:,}", f"ulimit -n {needed}")
    return DoctorFinding.ok("open files", found)


def _check_locked_memory(host: HostContext) -> Iterator[DoctorFinding]:
    # InfiniBand locks the memory that it transfers; only GPUs of several nodes use it.
    is_used = host.spans_nodes and count_gpus(host.environ, host.root / "dev")
    if not is_used or not any((host.root / "sys/class/infiniband").glob("*")):
        return
    soft, _ = _get_limits(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= _LOW_LOCKED_BYTES:
        yield DoctorFinding.ok("locked memory", "any amount" if soft == resource.RLIM_INFINITY else size(soft))
        return
    advice = "ulimit -l unlimited, on every node (docker --ulimit memlock=-1), or NCCL_IB_DISABLE=1, which is slower"
    yield DoctorFinding.warning("locked memory", f"{size(soft)}, but InfiniBand needs more", advice)


def _count_rank_cores(host: HostContext) -> int:
    return rank_cores(host.world, host.root / "proc", host.root / "sys/fs/cgroup")


def _get_limits(kind: int) -> tuple[int, int]:
    return resource.getrlimit(kind)


def _format_limit(limit: float) -> str:
    return "any number" if limit == INFINITY else f"{limit:,.0f}"


def read_kernel_clock() -> KernelClock:
    """Query the kernel's clock state without changing it."""
    if not sys.platform.startswith("linux") or struct.calcsize("@l") != 8:
        return -1, 0.0
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: read only
    state = ctypes.CDLL(None).adjtimex(buffer)
    *_, max_error_us = _TIMEX.unpack_from(buffer.raw)
    return state, max_error_us / 1e6


def check_clock(host: HostContext, read_clock: Callable[[], KernelClock] = read_kernel_clock) -> DoctorFinding:
    """Check that the clock is synchronized."""
    state, off_s = read_clock()
    if state < 0:
        return DoctorFinding.ok("clock", "not reported by the kernel")
    if state != _TIME_ERROR:
        return DoctorFinding.ok("clock", f"synchronized, at most {seconds(off_s)} off")
    if host.spans_nodes:
        return DoctorFinding.warning(
            "clock", "not synchronized, according to the kernel", "run an NTP client (chrony) on it"
        )
    return DoctorFinding.ok("clock", "fine for one machine (not set by NTP, which only several nodes need)")


def check_host(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield the findings on this machine, in the order in which a run would depend on them."""
    # In the order in which a run would depend on them.
    yield _check_versions()
    yield from check_cores(host)
    yield check_load(host)
    yield from check_gpus(host)
    yield _check_native_core()
    yield from check_memory_and_limits(host)
    yield from check_storage(host)
    yield from check_network(host)
    yield from check_rendezvous(host)
    yield check_clock(host)


def _check_versions() -> DoctorFinding:
    found = [f"Python {platform.python_version()}", f"paceline {__version__}"]
    missing = []
    for name in ("torch", "torchvision", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return DoctorFinding.problem("versions", f"{', '.join(found)}; no {', '.join(missing)}", "pip install paceline")
    return DoctorFinding.ok("versions", ", ".join(found))


def _check_native_core() -> DoctorFinding:
    core = load_native()
    if core is None:
        lost, _, advice = NATIVE_MISSING_MESSAGE.rpartition(" (")
        return DoctorFinding.warning("native core", lost, advice.removesuffix(")"))
    return DoctorFinding.ok("native core", f"built, uses {core.isa()}")
