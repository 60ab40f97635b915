"""Time all-reduces of several sizes over the default process group: what the network between the ranks can do.

It says what they took, in seconds; what that tells of a link is reckoned elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

SIZES: Final = tuple(64 << (10 + power) for power in range(0, 11, 2))
"""Bytes, from 64 KiB to 64 MiB: a small bucket's latency, and a large one's bandwidth."""
_WARMUP: Final = 3
_MAX_REPEATS: Final = 50
_MIN_REPEATS: Final = 5
_LARGE: Final = 4


@dataclass(frozen=True)
class AllReduceTime:
    """Seconds of `n` all-reduces of `num_bytes`: median, 10th and 90th percentile of the slowest rank's."""

    num_bytes: int
    median_s: float
    p10_s: float
    p90_s: float
    n: int


def time_all_reduces(
    device: torch.device, now: Callable[[], float], *, sizes: Sequence[int] = SIZES, each_s: float = 1.0
) -> tuple[AllReduceTime, ...]:
    """Time sums of float32, for about `each_s` seconds a size, at least 5 and at most 50 times after 3 to warm up.

    A size that takes more than a quarter of that is the last, as its bandwidth is that of larger ones; two are timed
    whatever they take. All ranks call it together. Each time is that of the rank which took the longest from a barrier
    on, by the clock `now` (seconds); of a GPU, with what was queued done.
    """
    found: list[AllReduceTime] = []
    for size in sizes:
        found.append(_time_all_reduce(size, device, now, each_s))
        if len(found) > 1 and found[-1].median_s > each_s / _LARGE:  # which all ranks know alike
            break
    return tuple(found)


def _time_all_reduce(num_bytes: int, device: torch.device, now: Callable[[], float], each_s: float) -> AllReduceTime:
    numbers = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    first_s = float(_seconds(numbers, _WARMUP, device, now).median())
    repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, int(each_s / max(first_s, 1e-6))))
    found = _seconds(numbers, repeats, device, now).numpy()
    low, median, high = np.percentile(found, [10, 50, 90])
    return AllReduceTime(num_bytes, float(median), float(low), float(high), repeats)


def _seconds(numbers: torch.Tensor, repeats: int, device: torch.device, now: Callable[[], float]) -> torch.Tensor:
    """Return float64 [repeats], on the host and alike on all ranks: what each all-reduce took the slowest of them."""
    found = torch.zeros(repeats, dtype=torch.float64, device=device)
    for number in range(repeats):
        dist.barrier()
        _synchronize(device)
        began_s = now()
        dist.all_reduce(numbers)
        _synchronize(device)
        found[number] = now() - began_s
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.cpu()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
