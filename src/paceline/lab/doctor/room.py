"""What a machine has room for: memory, shared memory for the batches of worker processes, open files, locked memory.

Without a recipe it is judged by photographs, as most runs are of; `needs` judges by a recipe.
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
"""A container has 64 MiB unless told: enough for one worker of the kind below, and not for NCCL or larger images."""
_USUAL_BYTES: Final = 2 * batch_bytes(64, 3, 224)
"""A rank's batch to train on and one to evaluate on: 64 photographs of 224 px each."""
_AHEAD: Final = 2
"""Batches that a worker makes ahead (`data.processes.PREFETCH`, which loads torch)."""
_MOST_WORKERS: Final = 16
_FILES: Final = 64
"""That a rank opens besides those below: the program's own, checkpoints, logs, images."""
_FILES_A_WORKER: Final = 24
"""As `data.preflight` counts them: a training and an evaluation worker, and the batches that each has made."""
_FILES_TO_MEET: Final = 21
_FILES_A_RANK: Final = 2
"""gloo's, in a world of n ranks 21 + 2n: measured with torch 2.15 by counting /proc/self/fd."""
_LITTLE_LOCKED: Final = 2**30


def room_findings(here: Here) -> Iterator[Finding]:
    """Yield what there is room for."""
    yield _memory(here)
    yield _shared_memory(here)
    yield _open_files(here)
    yield from _locked_memory(here)


def _memory(here: Here) -> Finding:
    lines = here.text("proc/meminfo").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if not {"MemAvailable", "MemTotal"} <= values.keys():
        return Finding.ok("memory", "not told by the kernel")
    available, total = (int(values[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limits, of = find_limits(here.root / "proc", here.root / "sys/fs/cgroup"), ""
    if limits.memory_bytes < total:
        total, of = int(limits.memory_bytes), " that this container or job may use"
        available = min(available, _left(limits))
    found = f"{size(available)} free of {size(total)}{of}"
    if available < _LITTLE_MEMORY:
        return Finding.look("memory", found, "end other programs, ask for more, or lower data.workers")
    return Finding.ok("memory", found)


def _left(limits: Limits) -> int:
    """Return the bytes that are left of a limit, all of them where what is used is not told."""
    used = 0
    with contextlib.suppress(OSError, ValueError):
        used = limits.used_memory_bytes()
    return max(0, int(limits.memory_bytes) - used)


def _shared_memory(here: Here) -> Finding:
    folder = here.root / "dev" / "shm"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return Finding.wrong("shared memory", f"no {folder}", "mount a tmpfs there, or set data.workers=0")
    ranks = here.world.local_world_size
    workers = min(_MOST_WORKERS, max(1, _cores(here) - 1))
    usual, least = (ranks * (_AHEAD * num + 1) * _USUAL_BYTES for num in (workers, 1))
    found = f"{size(free)} free in {folder}"
    advice = "start the container with --shm-size=8g (Kubernetes: mount an emptyDir of medium Memory there)"
    if free < least:
        of = f" of each of {ranks} ranks" if ranks > 1 else ""
        needed = f"one worker{of} with batches of 64 photographs needs {size(least)}"
        return Finding.wrong("shared memory", f"{found}; {needed}", f"{advice}, or set data.workers=0")
    if free < max(usual, _LITTLE_SHM):
        needed = f"{count(workers, 'worker')} a rank with batches of 64 photographs take {size(usual)}"
        return Finding.look("shared memory", f"{found}; {needed}", f"{advice}, or set data.workers lower")
    return Finding.ok("shared memory", found)


def _open_files(here: Here) -> Finding:
    soft, hard = (INFINITY if limit == resource.RLIM_INFINITY else limit for limit in _limits(resource.RLIMIT_NOFILE))
    ranks, workers = here.world.world_size, min(_MOST_WORKERS, _cores(here))
    to_meet = _FILES_TO_MEET + _FILES_A_RANK * ranks if ranks > 1 else 0
    needed = _FILES + to_meet + _FILES_A_WORKER * workers
    found = f"{_number(soft)} (at most {_number(hard)})"
    if hard < needed:
        advice = f"raise it (ulimit -n {needed}; docker --ulimit nofile={needed}), or set data.workers=0"
        return Finding.wrong("open files", f"{found}; a rank may need {needed:,}", advice)
    if soft < needed:
        return Finding.look("open files", f"{found}; a rank may need {needed:,}", f"ulimit -n {needed}")
    return Finding.ok("open files", found)


def _locked_memory(here: Here) -> Iterator[Finding]:
    """Yield whether InfiniBand may have memory that stays where it is, where GPUs of several nodes would use it."""
    is_used = here.spans_nodes and count_gpus(here.environ, here.root / "dev")
    if not is_used or not any((here.root / "sys/class/infiniband").glob("*")):
        return
    soft, _ = _limits(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= _LITTLE_LOCKED:
        yield Finding.ok("locked memory", "any amount" if soft == resource.RLIM_INFINITY else size(soft))
        return
    advice = "ulimit -l unlimited, on every node (docker --ulimit memlock=-1), or NCCL_IB_DISABLE=1, which is slower"
    yield Finding.look("locked memory", f"{size(soft)}, of which InfiniBand needs more", advice)


def _cores(here: Here) -> int:
    """Return the cores of this rank, of which bound ranks have other ones each."""
    return rank_cores(here.world, here.root / "proc", here.root / "sys/fs/cgroup")


def _limits(kind: int) -> tuple[int, int]:
    return resource.getrlimit(kind)


def _number(limit: float) -> str:
    return "any number" if limit == INFINITY else f"{limit:,.0f}"
