"""Check memory, shared memory for worker processes, open files, and locked memory.

Judged for typical images; `needs` checks a recipe.
"""

import contextlib
import resource
import shutil
from collections.abc import Iterator
from typing import Final

from paceline.core.limits import INFINITY, Limits, find_limits, rank_cores
from paceline.core.units import count, size
from paceline.data.preflight import batch_bytes
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.here import Here
from paceline.parallel.environ import count_gpus

_LITTLE_MEMORY: Final = 2 * 2**30
_LITTLE_SHM: Final = 2**29
"""Containers have 64 MiB by default: enough for one worker as below, but not for NCCL or larger images."""
_USUAL_BYTES: Final = 2 * batch_bytes(64, 3, 224)
"""A rank's training and evaluation batch of 64 images of 224 px each."""
_AHEAD: Final = 2
"""Batches that a worker prefetches (`data.processes.PREFETCH`, whose module imports torch)."""
_MOST_WORKERS: Final = 16
_FILES: Final = 64
"""Files of a rank besides those below: the program's own, checkpoints, logs, images."""
_FILES_A_WORKER: Final = 24
"""As in `data.preflight`: a training and an evaluation worker, and their batches."""
_FILES_TO_MEET: Final = 21
_FILES_A_RANK: Final = 2
"""Files of gloo: 21 + 2n for n ranks, measured with torch 2.15 by counting /proc/self/fd."""
_LITTLE_LOCKED: Final = 2**30


def room_findings(host: Here) -> Iterator[Finding]:
    """Yield findings on memory and limits."""
    yield _memory(host)
    yield _shared_memory(host)
    yield _open_files(host)
    yield from _locked_memory(host)


def _memory(host: Here) -> Finding:
    lines = host.text("proc/meminfo").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if not {"MemAvailable", "MemTotal"} <= values.keys():
        return Finding.ok("memory", "not reported by the kernel")
    available, total = (int(values[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limits, scope = find_limits(host.root / "proc", host.root / "sys/fs/cgroup"), ""
    if limits.memory_bytes < total:
        total, scope = int(limits.memory_bytes), " that this container or job may use"
        available = min(available, _left(limits))
    found = f"{size(available)} free of {size(total)}{scope}"
    if available < _LITTLE_MEMORY:
        return Finding.look("memory", found, "stop other programs, request more, or lower data.workers")
    return Finding.ok("memory", found)


def _left(limits: Limits) -> int:
    """Return the unused bytes of a limit; all of them if usage is unknown."""
    used = 0
    with contextlib.suppress(OSError, ValueError):
        used = limits.used_memory_bytes()
    return max(0, int(limits.memory_bytes) - used)


def _shared_memory(host: Here) -> Finding:
    folder = host.root / "dev" / "shm"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return Finding.wrong("shared memory", f"no {folder}", "mount a tmpfs there, or set data.workers=0")
    ranks = host.world.local_world_size
    workers = min(_MOST_WORKERS, max(1, _cores(host) - 1))
    usual, least = (ranks * (_AHEAD * num + 1) * _USUAL_BYTES for num in (workers, 1))
    found = f"{size(free)} free in {folder}"
    advice = "start the container with --shm-size=8g (Kubernetes: mount an emptyDir of medium Memory there)"
    if free < least:
        of = f" of each of {ranks} ranks" if ranks > 1 else ""
        needed = f"one worker{of} with batches of 64 images needs {size(least)}"
        return Finding.wrong("shared memory", f"{found}; {needed}", f"{advice}, or set data.workers=0")
    if free < max(usual, _LITTLE_SHM):
        needed = f"{count(workers, 'worker')} per rank with batches of 64 images need {size(usual)}"
        return Finding.look("shared memory", f"{found}; {needed}", f"{advice}, or set data.workers lower")
    return Finding.ok("shared memory", found)


def _open_files(host: Here) -> Finding:
    soft, hard = (INFINITY if limit == resource.RLIM_INFINITY else limit for limit in _limits(resource.RLIMIT_NOFILE))
    ranks, workers = host.world.world_size, min(_MOST_WORKERS, _cores(host))
    rendezvous_files = _FILES_TO_MEET + _FILES_A_RANK * ranks if ranks > 1 else 0
    needed = _FILES + rendezvous_files + _FILES_A_WORKER * workers
    found = f"{_number(soft)} (at most {_number(hard)})"
    if hard < needed:
        advice = f"raise it (ulimit -n {needed}; docker --ulimit nofile={needed}), or set data.workers=0"
        return Finding.wrong("open files", f"{found}; a rank may need {needed:,}", advice)
    if soft < needed:
        return Finding.look("open files", f"{found}; a rank may need {needed:,}", f"ulimit -n {needed}")
    return Finding.ok("open files", found)


def _locked_memory(host: Here) -> Iterator[Finding]:
    """Yield the limit of locked memory, which InfiniBand needs, if GPUs of several nodes would use it."""
    is_used = host.spans_nodes and count_gpus(host.environ, host.root / "dev")
    if not is_used or not any((host.root / "sys/class/infiniband").glob("*")):
        return
    soft, _ = _limits(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= _LITTLE_LOCKED:
        yield Finding.ok("locked memory", "any amount" if soft == resource.RLIM_INFINITY else size(soft))
        return
    advice = "ulimit -l unlimited, on every node (docker --ulimit memlock=-1), or NCCL_IB_DISABLE=1, which is slower"
    yield Finding.look("locked memory", f"{size(soft)}, but InfiniBand needs more", advice)


def _cores(host: Here) -> int:
    return rank_cores(host.world, host.root / "proc", host.root / "sys/fs/cgroup")


def _limits(kind: int) -> tuple[int, int]:
    return resource.getrlimit(kind)


def _number(limit: float) -> str:
    return "any number" if limit == INFINITY else f"{limit:,.0f}"
