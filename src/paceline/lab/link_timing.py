"""Time all-reduces of several sizes between the ranks of the default process group."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from paceline.core.world import World
from paceline.lab.predict.network import AllReduceMeasurement, AllReduceTiming, fit_link
from paceline.measure.timer import now_s

SIZES: Final = tuple(64 << (10 + power) for power in range(0, 11, 2))
"""Bytes, from 64 KiB to 64 MiB: the latency of a small bucket, and the bandwidth of a large one."""
_WARMUP: Final = 3
_MAX_REPEATS: Final = 50
_MIN_REPEATS: Final = 5
_LAST_SIZE_DIVISOR: Final = 4
"""A size that takes more than this fraction of its time is the last: larger ones have the same bandwidth."""


def measure_all_reduces(world: World, device: torch.device, *, seconds_per_size: float = 1.0) -> AllReduceMeasurement:
    """Time all-reduces of the ranks of `world`, `seconds_per_size` seconds per size (collective)."""
    timed = time_all_reduces(device, now_s, each_s=seconds_per_size)
    return fit_link(dist.get_backend(), world.world_size, world.num_nodes, timed)


def time_all_reduces(
    device: torch.device, now: Callable[[], float], *, sizes: Sequence[int] = SIZES, each_s: float = 1.0
) -> tuple[AllReduceTiming, ...]:
    """Time float32 sums for about `each_s` seconds per size, 5 to 50 times after 3 to warm up (collective).

    A size whose median exceeds a quarter of `each_s` is the last; at least two are timed. Each time is of the slowest
    rank, from a barrier, by the clock `now` (seconds); on a GPU it includes queued work.
    """
    found: list[AllReduceTiming] = []
    for size in sizes:
        found.append(_time_all_reduce(size, device, now, each_s))
        if len(found) > 1 and found[-1].median_s > each_s / _LAST_SIZE_DIVISOR:  # equal on all ranks, so all stop here
            break
    return tuple(found)


def _time_all_reduce(num_bytes: int, device: torch.device, now: Callable[[], float], each_s: float) -> AllReduceTiming:
    numbers = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    first_s = float(_time_repeats(numbers, _WARMUP, device, now).median())
    repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, int(each_s / max(first_s, 1e-6))))
    found = _time_repeats(numbers, repeats, device, now).numpy()
    low, median, high = np.percentile(found, [10, 50, 90])
    return AllReduceTiming(bytes=num_bytes, median_s=float(median), p10_s=float(low), p90_s=float(high), n=repeats)


def _time_repeats(numbers: torch.Tensor, repeats: int, device: torch.device, now: Callable[[], float]) -> torch.Tensor:
    """Return float64 [repeats] on the host, equal on all ranks: the time of each all-reduce on the slowest rank."""
    found = torch.zeros(repeats, dtype=torch.float64, device=device)
    for number in range(repeats):
        # All ranks start together, and queued work is not part of the time.
        dist.barrier()
        _synchronize(device)
        began_s = now()
        dist.all_reduce(numbers)
        _synchronize(device)
        found[number] = now() - began_s
    # A collective is over when its slowest rank is, and all ranks must agree on the number of repeats.
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.cpu()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
