"""Check shared memory and the open-file limit before worker processes start. Torch-free."""

import resource
import shutil
from pathlib import Path

from paceline.core.errors import WorldError
from paceline.core.units import count

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps it
_OPEN_FILES_FOLDER = Path("/proc/self/fd")
# Tensors of a batch; each one in flight is an open file of the main process.
_TENSORS_PER_BATCH = 3
# Files per worker: ends of its queue, its sentinel, and the sockets that hand over a batch.
_FILES_PER_WORKER = 6
# Files that a rank opens later: checkpoints, logs, and images that it reads.
_SPARE_FILES = 64
_PAGE_BYTES = 4096


def estimate_batch_bytes(num_images: int, channels: int, size: int) -> int:
    """Return the shared memory in bytes of a batch of uint8 images, `size` pixels squared, with labels and draws."""
    # 64 bytes per image: its label and up to seven draws. Each tensor is a file of whole pages.
    return num_images * channels * size * size + num_images * 64 + _TENSORS_PER_BATCH * _PAGE_BYTES


def check_worker_limits(workers: int, prefetch: int, batch_bytes: int, local_ranks: int) -> None:
    """Raise `WorldError` if `workers` workers in each of `local_ranks` ranks exceed shared memory or open files.

    Each worker prefetches `prefetch` batches, and the rank holds one more. `batch_bytes` is a training and an
    evaluation batch together. The soft open-file limit is raised if necessary.
    """
    # Workers for training and for evaluation run at the same time, so both need room.
    if workers:
        _check_shared_memory(workers, prefetch, batch_bytes, local_ranks)
        _check_open_files(workers, prefetch)


def _check_shared_memory(workers: int, prefetch: int, batch_bytes: int, local_ranks: int) -> None:
    if not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = local_ranks * (workers * prefetch + 1) * batch_bytes
    if needed > free:
        max_workers = max(0, (free // (local_ranks * batch_bytes) - 1) // prefetch)
        ranks = f" of each of {local_ranks} ranks" if local_ranks > 1 else ""
        raise WorldError(
            f"data.workers: the batches of {count(workers, 'worker')}{ranks} need {_format_bytes(needed)} "
            f"of shared memory, and {SHARED_MEMORY} has {_format_bytes(free)} free "
            f"(set data.workers={max_workers}, or start the container with --shm-size={-(-needed // 2**20) + 1}m)"
        )


def _check_open_files(workers: int, prefetch: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    per_worker = 2 * (_FILES_PER_WORKER + _TENSORS_PER_BATCH * prefetch)  # twice: training and evaluation
    others = _count_open_files() + _SPARE_FILES
    needed = others + workers * per_worker
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard == resource.RLIM_INFINITY or needed <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
        return
    max_workers = max(0, (hard - others) // per_worker)
    raise WorldError(
        f"data.workers: a rank with {count(workers, 'worker')} opens up to {needed} files, and the limit is {hard} "
        f"(set data.workers={max_workers}, or raise it: ulimit -n {needed})"
    )


def _count_open_files() -> int:
    return sum(1 for _ in _OPEN_FILES_FOLDER.iterdir()) if _OPEN_FILES_FOLDER.is_dir() else 0


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
