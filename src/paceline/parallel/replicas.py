"""Look whether the ranks' replicas still have the same weights, to the bit.

Replicas drift apart without a word: memory that flips a bit, a kernel that is not deterministic, a parameter that
was left out of the average. Each rank hashes what it has, on its device, and the ranks compare their hashes. Buffers
are left out: those of batch norm differ until the next forward pass gives all ranks rank 0's.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import WatchError
from paceline.core.world import World
from paceline.recipe.schema.parallel import Parallel

_CHUNK: Final = 1 << 22  # numbers hashed at a time: 32 MB for each of the few tensors of int64 that it takes
_WORD_DTYPES: Final = {1: torch.uint8, 2: torch.int16}


class ReplicaCheck(Protocol):
    """Compare the replicas."""

    def check(self, step: int) -> None:
        """Compare them if it is time to after `step` steps. Every rank must call it.

        Raise `WatchError` on all ranks where one has other weights than most, naming it and the first parameter.
        """
        ...


class NoReplicaCheck:
    """For replicas that are not to be compared, or that there is one of."""

    def check(self, step: int) -> None:
        """Do nothing."""


class HashReplicaCheck:
    """Compare hashes of `parameters` every `every` steps: one pass over the weights, and 8 bytes a rank to send."""

    def __init__(self, parameters: Mapping[str, Tensor], every: int, world: World) -> None:
        self._parameters = dict(parameters)
        self._every = every
        self._world = world

    def check(self, step: int) -> None:
        """Compare them if it is time to. The host waits for the device then."""
        if step % self._every:
            return
        hashes = torch.stack([hash_tensor(each) for each in self._parameters.values()])
        totals = self._all_gather(hash_tensor(hashes).view(1)).flatten().tolist()
        if len(set(totals)) > 1:
            raise WatchError(self._difference(step, totals, self._all_gather(hashes)))

    def _all_gather(self, mine: Tensor) -> Tensor:
        """Return the ranks' `mine` [N] as [world_size, N], on the host."""
        parts = [torch.empty_like(mine) for _ in range(self._world.world_size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu()

    def _difference(self, step: int, totals: list[int], hashes: Tensor) -> str:
        """Say which ranks are in the minority, or that all are when there is none."""
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
        fix = "resume from a checkpoint before it; if it comes back, look at that machine's memory and GPU"
        return f"parallel.check_replicas: {who} at step {step}, {where} ({fix})"


def hash_tensor(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of the bits and places of `tensor`'s numbers, of any dtype, as int64 [] on its device.

    It is multilinear, sum of x_i w_i modulo 2^64 (Lemire and Kaser 2014, arXiv 1202.4961, section 2), over words
    x_i as wide as the dtype, but no wider than 32 bits: the low bits of a wide word are often all 0, and so would be
    as many of its product's. The w_i are odd, so that one word that changed always shows, and come from SplitMix64
    (Steele et al. 2014, doi 10.1145/2660193.2660195) at i. Integers wrap, so the order of summation does not matter.
    """
    words = tensor.detach().contiguous().reshape(-1)
    words = words.view(_WORD_DTYPES.get(words.element_size(), torch.int32))
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(chunk), dtype=torch.int64, device=words.device)
        total = total + (chunk * (_splitmix64(places) | 1)).sum()
    return total


def _splitmix64(places: Tensor) -> Tensor:
    """Return SplitMix64's output number `places` (int64, from 0), from seed 0; int64 wraps as uint64 does."""
    z = (places + 1) * _to_int64(0x9E3779B97F4A7C15)
    z = (z ^ _logical_shift_right(z, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    z = (z ^ _logical_shift_right(z, 27)) * _to_int64(0x94D049BB133111EB)
    return z ^ _logical_shift_right(z, 31)


def _logical_shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign, which torch's shift of int64 would carry along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def build_replica_check(section: Parallel, world: World, model: nn.Module, every: int) -> ReplicaCheck:
    """Return what compares the replicas of `model`, by `parallel.check_replicas`; one rank has nothing to compare."""
    if section.check_replicas == "off" or world.world_size == 1:
        return NoReplicaCheck()
    return HashReplicaCheck(dict(model.named_parameters()), every, world)
