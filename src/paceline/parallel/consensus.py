"""Agree across ranks on a few integers per step, and check that all replicas have the same weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import WatchError
from paceline.core.world import World
from paceline.recipe.schema.train import Parallel

_CHUNK: Final = 1 << 22  # numbers hashed at a time: 32 MB per int64 temporary
_WORD_DTYPES: Final = {1: torch.uint8, 2: torch.int16}


class Consensus:
    """Sum integers over the ranks. Every rank must make the same calls in the same order.

    `group` has all ranks, reduces host tensors, and is used by nothing else; None for one rank, whose votes count at
    once.
    """

    def __init__(self, num_votes: int, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sent = torch.zeros(num_votes, dtype=torch.int64)
        self._numbers = self._sent.numpy()  # shares memory: filling it creates no tensor per step
        self._work: dist.Work | None = None
        self._sums = (0,) * num_votes

    def all_reduce_flags(self, *votes: int) -> tuple[int, ...]:
        """Send this step's `votes`; return sums over the ranks, the same on each.

        With several ranks these are the sums of the previous call, 0 in the first: the all-reduce is asynchronous.
        Raise `RuntimeError` if a rank was lost.
        """
        assert len(votes) == len(self._sums), f"{len(votes)} votes of {len(self._sums)}"
        if self._group is None:
            self._sums = tuple(int(vote) for vote in votes)
            return self._sums
        before = self.flush()
        self._numbers[:] = votes
        self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)
        return before

    def flush(self) -> tuple[int, ...]:
        """Wait for the votes sent last; return their sums."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._sums = tuple(self._numbers.tolist())
        return self._sums

    def union(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the distinct int64 `numbers` of all ranks, sorted. Waits for all ranks."""
        if self._group is None:
            return tuple(sorted(set(numbers)))
        # gloo gathers equal shapes only: first the counts, then the numbers padded to the longest list.
        counts = self._gather(torch.tensor([len(numbers)]))
        longest = int(counts.max())
        if not longest:
            return ()
        padded = torch.zeros(longest, dtype=torch.int64)
        padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        lists = zip(self._gather(padded).tolist(), counts.flatten().tolist(), strict=True)
        return tuple(sorted({number for row, count in lists for number in row[:count]}))

    def close(self) -> None:
        """Drop votes in flight, without waiting: after a failure a rank may be gone."""
        self._work = None

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return int64 [world_size, N] of the ranks' `row` [N]."""
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, row, group=self._group)
        return torch.stack(rows)


def build_consensus(world: World, num_votes: int, timeout: timedelta | None = None) -> Consensus:
    """Return the consensus of the ranks of `world` on `num_votes` integers per step. Collective.

    `timeout` is that of its process group; None is torch's default.
    """
    if world.world_size == 1:
        return Consensus(num_votes, None)
    # A group of its own: its collectives overlap those of training, which must keep their order. gloo, since a vote
    # must not wait for the kernels queued on a GPU.
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "a rank of the world is outside the process group"
    return Consensus(num_votes, group)


class ReplicaCheck:
    """Compare hashes of `parameters` every `every` steps: one pass over the weights, 8 bytes sent per rank."""

    def __init__(self, parameters: Mapping[str, Tensor], every: int, world: World) -> None:
        self._parameters = dict(parameters)
        self._every = every
        self._world = world

    def check(self, step: int) -> None:
        """Compare the replicas if it is due after `step` steps, which synchronizes the device. Collective.

        Raise `WatchError` on all ranks if some differ, naming them and the first differing parameter.
        """
        if step % self._every:
            return
        hashes = torch.stack([hash_tensor(each) for each in self._parameters.values()])
        totals = self._all_gather(hash_tensor(hashes).view(1)).flatten().tolist()
        if len(set(totals)) > 1:
            raise WatchError(self._difference(step, totals, self._all_gather(hashes)))

    def _all_gather(self, mine: Tensor) -> Tensor:
        """Return the ranks' `mine` [N] as [world_size, N] on the host."""
        parts = [torch.empty_like(mine) for _ in range(self._world.world_size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu()

    def _difference(self, step: int, totals: list[int], hashes: Tensor) -> str:
        """Return the message; it names the ranks in the minority, or all if there is no majority."""
        usual, num_usual = Counter(totals).most_common(1)[0]
        is_majority = num_usual * 2 > len(totals)
        others = [rank for rank, total in enumerate(totals) if not (is_majority and total == usual)]
        differs = (hashes != hashes[totals.index(usual)]).any(dim=0)
        names = [name for name, is_other in zip(self._parameters, differs.tolist(), strict=True) if is_other]
        ranks = ", ".join(str(rank) for rank in others[:4]) + (", ..." if len(others) > 4 else "")
        who = f"rank {ranks} of {len(totals)} has other weights than the rest"
        if len(others) > 1:
            who = f"ranks {ranks} of {len(totals)} have other weights than the rest"
        if not is_majority:
            who = f"ranks {ranks} of {len(totals)} have different weights"
        where = f"first in {names[0]}, and in {len(names) - 1} more of {len(self._parameters)} parameters"
        fix = "resume from a checkpoint before it; if it comes back, check that machine's memory and GPU"
        return f"parallel.check_replicas: {who} at step {step}, {where} ({fix})"


def hash_tensor(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of the bits of `tensor`, of any dtype, as int64 [] on its device.

    Multilinear: the sum of x_i w_i modulo 2^64 (Lemire and Kaser 2014, arXiv 1202.4961, section 2), with w_i from
    SplitMix64 (Steele et al. 2014, doi 10.1145/2660193.2660195).
    """
    integers = tensor.detach().contiguous().reshape(-1)
    # Words are as wide as the dtype but at most 32 bits: the low bits of a wide word are often all 0, and so would be
    # as many bits of its product.
    integers = integers.view(_WORD_DTYPES.get(integers.element_size(), torch.int32))
    total = torch.full((), integers.numel(), dtype=torch.int64, device=integers.device)
    for start in range(0, integers.numel(), _CHUNK):
        chunk = integers[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(chunk), dtype=torch.int64, device=integers.device)
        # Odd weights, so that a single changed word always changes the sum. Integers wrap, so the order does not
        # matter.
        total = total + (chunk * (_splitmix64(places) | 1)).sum()
    return total


def _splitmix64(places: Tensor) -> Tensor:
    """Return SplitMix64's outputs number `places` (int64, from 0) for seed 0."""
    # torch has no uint64 arithmetic; int64 wraps the same way.
    z = (places + 1) * _to_int64(0x9E3779B97F4A7C15)
    z = (z ^ _logical_shift_right(z, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    z = (z ^ _logical_shift_right(z, 27)) * _to_int64(0x94D049BB133111EB)
    return z ^ _logical_shift_right(z, 31)


def _logical_shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right without extending the sign, as torch's shift of int64 would."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def build_replica_check(section: Parallel, world: World, model: nn.Module, every: int) -> ReplicaCheck | None:
    """Return the check of `parallel.check_replicas` for the replicas of `model`, or None if it is off."""
    if section.check_replicas == "off" or world.world_size == 1:
        return None
    return ReplicaCheck(dict(model.named_parameters()), every, world)
