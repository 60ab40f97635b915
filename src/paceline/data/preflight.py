"""Whether there is room for the batches that workers make: shared memory and open files, before the first step."""

import resource
import shutil
from pathlib import Path

from paceline.core.errors import WorldError
from paceline.core.units import count

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps it
_OPEN_FILES = Path("/proc/self/fd")
_TENSORS = 3
"""Tensors of a batch; each in flight is an open file of the rank."""
_FILES_A_WORKER = 6
"""Ends of its queue, its sentinel, and the sockets that hand over a batch."""
_SPARE_FILES = 64
"""For what a rank opens later: checkpoints, logs, images it reads itself."""
_PAGE = 4096


def batch_bytes(num_images: int, channels: int, size: int) -> int:
    """Return the shared memory of a batch: uint8 images of `size` pixels squared, and a little for what goes along."""
    return num_images * channels * size * size + num_images * 64 + _TENSORS * _PAGE


def check_room(workers: int, prefetch: int, batch_bytes: int, local_ranks: int) -> None:
    """Raise `WorldError` where `workers` workers of each of `local_ranks` ranks would run out of room.

    Workers for training and for evaluation stand side by side. Each makes `prefetch` batches ahead, and the rank
    holds one more; `batch_bytes` are those of a training and an evaluation batch together. The soft limit of open
    files is raised where the hard limit has room for them.
    """
    if workers:
        _check_shared_memory(workers, prefetch, batch_bytes, local_ranks)
        _check_open_files(workers, prefetch)


def _check_shared_memory(workers: int, prefetch: int, batch_bytes: int, local_ranks: int) -> None:
    if not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = local_ranks * (workers * prefetch + 1) * batch_bytes
    if needed > free:
        most = max(0, (free // (local_ranks * batch_bytes) - 1) // prefetch)
        ranks = f" of each of {local_ranks} ranks" if local_ranks > 1 else ""
        raise WorldError(
            f"data.workers: the batches of {count(workers, 'worker')}{ranks} need {_size(needed)} of shared memory, "
            f"and {SHARED_MEMORY} has {_size(free)} free (set data.workers={most}, or start the container with "
            f"--shm-size={-(-needed // 2**20) + 1}m)"
        )


def _check_open_files(workers: int, prefetch: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = 2 * (_FILES_A_WORKER + _TENSORS * prefetch)
    taken = _num_open() + _SPARE_FILES
    needed = taken + workers * each
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard == resource.RLIM_INFINITY or needed <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
        return
    most = max(0, (hard - taken) // each)
    raise WorldError(
        f"data.workers: a rank with {count(workers, 'worker')} opens up to {needed} files, and the limit is {hard} "
        f"(set data.workers={most}, or raise it: ulimit -n {needed})"
    )


def _num_open() -> int:
    return sum(1 for _ in _OPEN_FILES.iterdir()) if _OPEN_FILES.is_dir() else 0


def _size(num_bytes: int) -> str:
    """Return `64 MB` or `3.2 GB`."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
