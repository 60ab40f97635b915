"""Time a loader over a window in steady state: images, seconds, and CPU seconds of the process and its children.

The standard library alone, as peers run in an environment that has no paceline. Ours are timed by it too.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def measure(sizes: Iterator[int], seconds: float, warmup_batches: int) -> dict[str, Any]:
    """Return what a window of `seconds` came to, of a loader whose batches have `sizes` images.

    The window begins behind `warmup_batches`, so that what a loader makes ahead is made before it, and made anew by
    its end. A loader that stops earlier ends it.
    """
    for _ in range(warmup_batches):
        next(sizes)
    images, batches = 0, 0
    cpu_s, began_s = tree_cpu_s(), time.perf_counter()
    for size in sizes:
        images, batches = images + size, batches + 1
        if time.perf_counter() - began_s >= seconds:
            break
    wall_s, cpu_s = time.perf_counter() - began_s, tree_cpu_s() - cpu_s
    return {"images": images, "batches": batches, "wall_s": wall_s, "cpu_s": cpu_s, "images_per_s": images / wall_s}


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process, and of its children and theirs as long as they run."""
    own = os.times()
    return own.user + own.system + sum(_cpu_s(pid) for pid in descendants(os.getpid()))


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, by proc(5)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S  # utime and stime; proc(5) counts them from 1, as 14 and 15
