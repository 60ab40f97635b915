"""Which rank of somebody else's program this is, which device it has, and whose turn it is to read.

The program has started the ranks and joined them, or not; here nothing is started or joined.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import uname
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.environ import world_here
from paceline.parallel.turns import in_turn, leave_last

T = TypeVar("T")
_FAILED: Final = "failed"


@dataclass(frozen=True)
class Place:
    """A rank of `world`, and the `store` by which its ranks can wait for one another, on `num_nodes` nodes.

    A `store` of None says that they cannot.
    """

    world: World
    store: Store | None = None
    num_nodes: int = 1

    def in_turn(self, work: Callable[[bool], T]) -> T:
        """Return `work(True)` on the first rank of each node and then, on the others, `work(False)`.

        Every rank must call it, once. However long the first take, the others wait, in no collective; where one fails,
        those that wait raise `WorldError`. Rank 0, which may have the store in its process, returns after all others
        have theirs. Ranks that cannot wait for one another are all the first.
        """
        if self.store is None:
            return work(True)
        told = partial(_telling, work, self.store, self.world.rank)
        waits = partial(_check, self.store)
        try:
            result = in_turn(self.store, self.num_nodes, told, waits, is_first=self.world.is_node_main)
            leave_last(self.store, self.world.world_size - 1, waits, is_last=self.world.is_main)
            return result
        except dist.DistError as error:
            raise WorldError(f"torch.distributed: the ranks' store is gone while they wait: {error}") from None


def find_place(rank: int | None, world_size: int | None, gpu: str = "") -> Place:
    """Return the place that is told, or that torch.distributed knows where it is initialised, or that of one process.

    `gpu` names the GPU that this rank has where it could have had another, and nobody has said which. Where
    torch.distributed knows the place, every rank must call this. Raise `WorldError` for a rank that is none, for a GPU
    that several ranks have by chance, and where a launcher has started several ranks that are not joined: each would
    silently have all images.
    """
    if rank is not None or world_size is not None:
        return Place(_told(rank, world_size))
    if dist.is_initialized():
        return _joined(gpu) if dist.get_world_size() > 1 else Place(World.single())
    started = world_here().world_size
    if started > 1:
        raise WorldError(
            f"torch.distributed: is not initialised, and {started} ranks were started (do that first, or give rank and "
            f"world_size: rank=0, world_size=1 for all images on each)"
        )
    return Place(World.single())


def gpu_by_chance(device: str | torch.device, found: torch.device) -> str:
    """Return a name for the GPU that was `found` where `device` asks for none and there are several, else nothing."""
    if device != "auto" or found.type != "cuda" or torch.cuda.device_count() < 2:
        return ""
    return str(torch.cuda.get_device_properties(found).uuid)


def find_device(device: str | torch.device) -> torch.device:
    """Return the device that batches are brought to; `auto` is torch's current GPU, or the CPU where there is none.

    Raise `WorldError` for what is neither.
    """
    has_gpu = torch.cuda.is_available()
    try:
        found = torch.device(("cuda" if has_gpu else "cpu") if device == "auto" else device)
    except (RuntimeError, TypeError):
        raise WorldError(f"device: {device!r} is no device (give cpu, cuda, cuda:0 or auto)") from None
    if found.type not in ("cpu", "cuda"):
        raise WorldError(f"device: {found}: batches are brought to cpu or cuda (give cpu, and move them on)")
    if found.type == "cuda" and not has_gpu:
        raise WorldError(f"device: {found}: no GPU can be used here (give cpu)")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _told(rank: int | None, world_size: int | None) -> World:
    """Return a place among ranks that share this node as its launcher says, or are all on it where there is none."""
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise WorldError(f"rank: rank {rank} of {world_size} is no place in a world (give both, rank from 0 on)")
    here = world_here()
    if here.world_size > 1:  # who shares the cores is not changed by whose images a rank has
        return replace(here, rank=rank, world_size=world_size)
    return World(rank, world_size, rank, world_size)


def _joined(gpu: str) -> Place:
    """Return this rank's place in the default group; who shares its node is found out by the hosts' names.

    Ranks tell one another by the group's store: a collective would need a device, which is not known to be this one's.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = PrefixStore("paceline.interop", dist.distributed_c10d._get_default_store())
    store = PrefixStore(str(shared.add(f"calls/{rank}", 1)), shared)  # as many calls, so the same name, on every rank
    store.set(f"rank/{rank}", json.dumps([uname().nodename, gpu]))
    told = [json.loads(store.get(f"rank/{other}")) for other in range(world_size)]
    check_apart([(host, used) for host, used in told])
    hosts = [host for host, _ in told]
    here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    # Whoever has started the ranks: as under torchrun, a rank's share of cores is of what its parent may run on.
    world = World(rank, world_size, here.index(rank), len(here), launcher="torchrun")
    return Place(world, store, len(set(hosts)))


def check_apart(told: Sequence[tuple[str, str]]) -> None:
    """Raise `WorldError` where ranks have a GPU in common; `told` is each rank's (host, name of its GPU or nothing)."""
    for (host, gpu), times in Counter(told).items():
        if gpu and times > 1:
            ranks = ", ".join(str(rank) for rank, other in enumerate(told) if other == (host, gpu))
            raise WorldError(
                f"device: ranks {ranks} have one GPU of {host} between them, and there are more (call "
                f"torch.cuda.set_device(local_rank) first, or give device)"
            )


def _telling(work: Callable[[bool], T], store: Store, rank: int, is_first: bool) -> T:
    """Return `work(is_first)`; where it fails, tell those that wait."""
    try:
        return work(is_first)
    except BaseException:
        store.set(_FAILED, str(rank))
        raise


def _check(store: Store) -> None:
    """Raise `WorldError` where a rank that is waited for has failed."""
    if store.check([_FAILED]):
        raise WorldError(f"data: rank {store.get(_FAILED).decode()} could not read it (see what that rank says)")
