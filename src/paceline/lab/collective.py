"""Time all-reduces between joined ranks, and fit the link between them."""

import torch
import torch.distributed as dist

from paceline.core.world import World
from paceline.lab.predict.measured import Measured, TimedReduce, fit
from paceline.measure.collective import time_all_reduces
from paceline.measure.timing import now_s


def measure_joined(world: World, device: torch.device, *, each_s: float = 1.0) -> Measured:
    """Return the timed all-reduces of the ranks of `world`, `each_s` seconds per size (collective)."""
    timed = time_all_reduces(device, now_s, each_s=each_s)
    times = [
        TimedReduce(bytes=each.num_bytes, median_s=each.median_s, p10_s=each.p10_s, p90_s=each.p90_s, n=each.n)
        for each in timed
    ]
    return fit(dist.get_backend(), world.world_size, world.num_nodes, times)
