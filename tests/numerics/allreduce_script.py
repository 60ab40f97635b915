"""Time all-reduces with clocks that advance at each reading: by one second on rank 0, by two on rank 1."""

from itertools import count

import torch
from torch import Tensor

from paceline.lab.link_timing import time_all_reduces

SIZES = (1024, 4096)


def run(rank: int, world_size: int, folder: object) -> dict[str, Tensor]:
    ticks = count(0, rank + 1)
    timed = time_all_reduces(torch.device("cpu"), lambda: float(next(ticks)), sizes=SIZES, each_s=14.0)
    brief = time_all_reduces(torch.device("cpu"), lambda: float(next(ticks)), sizes=(8, 16, 32), each_s=1.5)
    rows = [[each.bytes, each.median_s, each.p10_s, each.p90_s, each.n] for each in timed]
    sizes = [each.bytes for each in brief]
    return {"rows": torch.tensor(rows, dtype=torch.float64), "brief": torch.tensor(sizes)}
