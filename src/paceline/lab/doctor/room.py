"""Check memory, shared memory for worker processes, open files, and locked memory.

Judged for typical images; `needs` checks a recipe.
"""

import contextlib
import resource
import shutil
from collections.abc import Iterator
from typing import Final

from paceline.core.limits import INFINITY, CgroupLimits, find_limits, rank_cores
from paceline.core.units import count, size
from paceline.data.preflight import estimate_batch_bytes
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.here import HostContext
from paceline.parallel.environ import count_gpus

_LOW_MEMORY_BYTES: Final = 2 * 2**30
_LOW_SHM_BYTES: Final = 2**29
"""Containers have 64 MiB by default: enough for one worker as below, but not for NCCL or larger images."""
_TYPICAL_BATCH_BYTES: Final = 2 * estimate_batch_bytes(64, 3, 224)
"""A rank's training and evaluation batch of 64 images of 224 px each."""
_PREFETCHED_BATCHES: Final = 2
"""Batches that a worker prefetches (`data.processes.PREFETCH`, whose module imports torch)."""
_MAX_WORKERS: Final = 16
_BASE_FILES: Final = 64
"""Files of a rank besides those below: the program's own, checkpoints, logs, images."""
_FILES_PER_WORKER: Final = 24
"""As in `data.preflight`: a training and an evaluation worker, and their batches."""
_RENDEZVOUS_FILES: Final = 21
_FILES_PER_RANK: Final = 2
"""Files of gloo: 21 + 2n for n ranks, measured with torch 2.15 by counting /proc/self/fd."""
_LOW_LOCKED_BYTES: Final = 2**30


def check_memory_and_limits(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield findings on memory and limits."""
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
    """Return the unused bytes of a limit; all of them if usage is unknown."""
    used = 0
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
    usual, least = (ranks * (_PREFETCHED_BATCHES * num + 1) * _TYPICAL_BATCH_BYTES for num in (workers, 1))
    found = f"{size(free)} free in {folder}"
    advice = "start the container with --shm-size=8g (Kubernetes: mount an emptyDir of medium Memory there)"
    if free < least:
        of = f" of each of {ranks} ranks" if ranks > 1 else ""
        needed = f"one worker{of} with batches of 64 images needs {size(least)}"
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
    """Yield the limit of locked memory, which InfiniBand needs, if GPUs of several nodes would use it."""
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
