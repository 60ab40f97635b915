"""Time all-reduces between joined ranks, and fit the link between them."""

import torch
import torch.distributed as dist

from paceline.core.world import World
from paceline.lab.predict.measured import AllReduceMeasurement, AllReduceTiming, fit_link
from paceline.measure.collective import time_all_reduces
from paceline.measure.timing import now_s


def measure_all_reduces(world: World, device: torch.device, *, seconds_per_size: float = 1.0) -> AllReduceMeasurement:
    """Return the timed all-reduces of the ranks of `world`, `seconds_per_size` seconds per size (collective)."""
    timed = time_all_reduces(device, now_s, each_s=seconds_per_size)
    times = [
        AllReduceTiming(bytes=each.num_bytes, median_s=each.median_s, p10_s=each.p10_s, p90_s=each.p90_s, n=each.n)
        for each in timed
    ]
    return fit_link(dist.get_backend(), world.world_size, world.num_nodes, times)
