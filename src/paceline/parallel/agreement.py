"""Let the ranks agree, once a step, on what none of them can decide alone: that it is time to save, or to leave.

Votes travel beside the step, on a gloo group of their own: they are sent in one step and read in the next, so no step
waits for them and no GPU is synchronised. What a vote means is its caller's to say.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.core.world import World


class Consensus(Protocol):
    """Add up the ranks' votes. Every rank must make the same calls, in the same order."""

    def all_reduce_flags(self, *votes: int) -> tuple[int, ...]:
        """Send this step's `votes`; return the newest sums over the ranks, the same on each.

        Where there are several ranks they are those of the call before, and 0 in the first; a rank alone has its
        own votes back. Raise `RuntimeError` when a rank was lost in between.
        """
        ...

    def flush(self) -> tuple[int, ...]:
        """Wait for the votes that were sent last, and return their sums over the ranks."""
        ...

    def union(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the distinct numbers of all ranks, sorted; each fits into 64 bits. Waits for all ranks."""
        ...

    def close(self) -> None:
        """Let go of votes on their way. Never waits, for after a failure it might be for a rank that is gone."""
        ...


def build_consensus(world: World, num_votes: int, timeout: timedelta | None = None) -> Consensus:
    """Return where the ranks of `world` agree on `num_votes` numbers a step; a rank alone asks nobody.

    Every rank must call it, and of several each be in the process group. `timeout` is how long a rank waits for
    another's votes; None is torch's own.
    """
    if world.world_size == 1:
        return SingleRankConsensus(num_votes)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "a rank of the world is outside the process group"
    return AllGatherConsensus(num_votes, group)


class SingleRankConsensus:
    """One rank, whose votes decide at once."""

    def __init__(self, num_votes: int) -> None:
        self._votes = (0,) * num_votes

    def all_reduce_flags(self, *votes: int) -> tuple[int, ...]:
        """Return `votes`."""
        assert len(votes) == len(self._votes), f"{len(votes)} votes of {len(self._votes)}"
        self._votes = tuple(int(vote) for vote in votes)
        return self._votes

    def flush(self) -> tuple[int, ...]:
        """Return the last votes."""
        return self._votes

    def union(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the distinct numbers, sorted."""
        return tuple(sorted(set(numbers)))

    def close(self) -> None:
        """Do nothing."""


class AllGatherConsensus:
    """Several ranks: an asynchronous all-reduce of int64 [num_votes] a call, waited for in the next.

    `group` holds all ranks, is used by nothing else, and reduces tensors on the host.
    """

    def __init__(self, num_votes: int, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent = torch.zeros(num_votes, dtype=torch.int64)
        self._numbers = self._sent.numpy()  # the same memory: filled without a tensor of its own
        self._work: dist.Work | None = None
        self._sums = (0,) * num_votes

    def all_reduce_flags(self, *votes: int) -> tuple[int, ...]:
        """Send `votes`; return the sums of the votes before."""
        before = self.flush()
        assert len(votes) == len(before), f"{len(votes)} votes of {len(before)}"
        self._numbers[:] = votes
        self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)
        return before

    def flush(self) -> tuple[int, ...]:
        """Wait for the votes that were sent last; return their sums."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._sums = tuple(self._numbers.tolist())
        return self._sums

    def union(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Gather how many numbers each rank has, then the numbers, padded to the longest list."""
        counts = self._gather(torch.tensor([len(numbers)]))
        longest = int(counts.max())
        if not longest:
            return ()
        padded = torch.zeros(longest, dtype=torch.int64)
        padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        lists = zip(self._gather(padded).tolist(), counts.flatten().tolist(), strict=True)
        return tuple(sorted({number for row, count in lists for number in row[:count]}))

    def close(self) -> None:
        """Drop the votes on their way; the group goes with the others at the end of the process group."""
        self._work = None

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return int64 [world_size, N] of the ranks' `row` [N]."""
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, row, group=self._group)
        return torch.stack(rows)
