"""Reach consensus once per step with different votes, gather numbers, lose a rank; run by `rank.py` on N ranks.

`votes` [STEPS, 2] is the result of each call, and `settled` that of the last flush.
"""

from datetime import timedelta
from pathlib import Path
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.world import World
from paceline.parallel.consensus import Consensus, build_consensus

STEPS = 20
LARGE = 2**62
LATE_S = 0.5


def vote(step: int, rank: int) -> tuple[int, int]:
    """Return the vote of `rank` in `step`: a flag only of rank 1 in step 7, and a number that needs 64 bits."""
    return int(step == 7 and rank == 1), LARGE // 4 + step * (rank + 1)


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Return the results that this rank received."""
    world = World(rank, world_size, rank, world_size)
    agreement = build_consensus(world, 2, timedelta(seconds=60))
    votes = [agreement.all_reduce_flags(*vote(step, rank)) for step in range(STEPS)]
    tensors = {"votes": torch.tensor(votes), "settled": torch.tensor([agreement.flush(), agreement.flush()])}
    for number, numbers in enumerate(([], [rank], [LARGE, 5 - rank, 5], [] if rank else [7, 7, -1])):
        tensors[f"union{number}"] = torch.tensor(agreement.union(numbers), dtype=torch.int64)
    is_last = rank == world_size - 1
    tensors |= timed(agreement, is_late=is_last and world_size > 1)
    agreement.close()
    return tensors | {
        "lost": torch.tensor(detects_a_lost_rank(build_consensus(world, 1, timedelta(seconds=5)), exits=is_last))
    }


def timed(agreement: Consensus, *, is_late: bool) -> dict[str, Tensor]:
    """Return the time to send a vote, and to read the result."""
    dist.barrier()
    sleep(LATE_S * is_late)
    begun = perf_counter()
    agreement.all_reduce_flags(0, 0)
    sent = perf_counter()
    agreement.flush()
    return {"sent_s": torch.tensor(sent - begun), "read_s": torch.tensor(perf_counter() - sent)}


def detects_a_lost_rank(agreement: Consensus, *, exits: bool) -> bool:
    """Return whether a vote reports a lost rank: the one that `exits` closes all its connections."""
    agreement.all_reduce_flags(1)
    agreement.flush()
    if exits:
        for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
        del agreement
        return False
    try:
        for _ in range(3):
            agreement.all_reduce_flags(1)
    except RuntimeError:
        return True
    return False
