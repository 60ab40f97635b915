"""Find rank and device in a program whose ranks something else started."""

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
from paceline.parallel.environ import current_world
from paceline.parallel.process_group import exit_last, run_in_order

ResultT = TypeVar("ResultT")
_FAILED: Final = "failed"


@dataclass(frozen=True)
class ExternalRank:
    """Rank in `world`, and the `store` through which ranks on `num_nodes` nodes wait for each other (None: they
    cannot).
    """

    world: World
    store: Store | None = None
    num_nodes: int = 1

    def run_node_main_first(self, function: Callable[[bool], ResultT]) -> ResultT:
        """Return `function(True)` on the first rank of each node, then `function(False)` on the others (collective).

        If a first rank fails, the others raise `WorldError`. Without a store, every rank counts as a first one.
        """
        if self.store is None:
            return function(True)
        # Waiting through the store needs no collective, so the first ranks may take longer than a collective timeout.
        run = partial(_run_and_signal, function, self.store, self.world.rank)
        waits = partial(_raise_if_failed, self.store)
        try:
            result = run_in_order(self.store, self.num_nodes, run, waits, is_first=self.world.is_node_main)
            # Rank 0 may host the store, so it leaves last.
            exit_last(self.store, self.world.world_size - 1, waits, is_last=self.world.is_main)
            return result
        except dist.DistError as error:
            raise WorldError(f"torch.distributed: the ranks' store closed while they waited: {error}") from None


def find_rank(rank: int | None, world_size: int | None, gpu: str = "") -> ExternalRank:
    """Return the given rank, else that of torch.distributed if initialized, else a single process.

    `gpu` identifies this rank's GPU if it was not chosen explicitly among several. If torch.distributed is initialized,
    every rank must call this function. Raise `WorldError` for an invalid rank, for ranks that share a GPU by accident,
    and if a launcher started several ranks that are not joined.
    """
    if rank is not None or world_size is not None:
        return ExternalRank(_explicit_world(rank, world_size))
    if dist.is_initialized():
        return _distributed_rank(gpu) if dist.get_world_size() > 1 else ExternalRank(World.single())
    _require_single_process()
    return ExternalRank(World.single())


def find_rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size as `find_rank` finds them, without exchanging anything between ranks."""
    if rank is not None or world_size is not None:
        world = _explicit_world(rank, world_size)
        return world.rank, world.world_size
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    _require_single_process()
    return 0, 1


def unchosen_gpu(device: str | torch.device, chosen: torch.device) -> str:
    """Return the UUID of the GPU `chosen` if `device` is auto and there are several GPUs, else ""."""
    if device != "auto" or chosen.type != "cuda" or torch.cuda.device_count() < 2:
        return ""
    return str(torch.cuda.get_device_properties(chosen).uuid)


def find_device(device: str | torch.device) -> torch.device:
    """Return the device for batches; `auto` is torch's current GPU, or the CPU without one.

    Raise `WorldError` for an invalid or unsupported device.
    """
    has_gpu = torch.cuda.is_available()
    try:
        chosen = torch.device(("cuda" if has_gpu else "cpu") if device == "auto" else device)
    except (RuntimeError, TypeError):
        raise WorldError(f"device: {device!r} is not a device (give cpu, cuda, cuda:0 or auto)") from None
    if chosen.type not in ("cpu", "cuda"):
        raise WorldError(
            f"device: {chosen}: batches can be moved to cpu or cuda only (give cpu, and move them yourself)"
        )
    if chosen.type == "cuda" and not has_gpu:
        raise WorldError(f"device: {chosen}: no GPU is usable (give cpu)")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _require_single_process() -> None:
    started = current_world().world_size
    if started > 1:  # each would silently get all images
        raise WorldError(
            f"torch.distributed: is not initialized, but {started} ranks were started (initialize it first, or give "
            f"rank and world_size: rank=0, world_size=1 for all images on each)"
        )


def _explicit_world(rank: int | None, world_size: int | None) -> World:
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise WorldError(f"rank: rank {rank} of {world_size} is not a valid rank (give both, rank from 0 on)")
    # Ranks share this node as the launcher states; without one, all of them do.
    launched = current_world()
    if launched.world_size > 1:  # an explicit rank does not change which ranks share a node
        return replace(launched, rank=rank, world_size=world_size)
    return World(rank, world_size, rank, world_size)


def _distributed_rank(gpu: str) -> ExternalRank:
    # Host names decide which ranks share a node.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Exchange through the group's store: a collective would need a device, which need not be that of the batches.
    shared = PrefixStore("paceline.interop", dist.distributed_c10d._get_default_store())
    # The same name on every rank, as all call this function equally often.
    store = PrefixStore(str(shared.add(f"calls/{rank}", 1)), shared)
    store.set(f"rank/{rank}", json.dumps([uname().nodename, gpu]))
    infos = [json.loads(store.get(f"rank/{other}")) for other in range(world_size)]
    check_gpus_differ([(host, used) for host, used in infos])
    hosts = [host for host, _ in infos]
    local_ranks = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    # As under torchrun, a rank gets a share of the cores that its parent may use.
    world = World(rank, world_size, local_ranks.index(rank), len(local_ranks), launcher="torchrun")
    return ExternalRank(world, store, len(set(hosts)))


def check_gpus_differ(infos: Sequence[tuple[str, str]]) -> None:
    """Raise `WorldError` if ranks share a GPU; `infos` is (host, GPU or "") per rank."""
    for (host, gpu), times in Counter(infos).items():
        if gpu and times > 1:
            ranks = ", ".join(str(rank) for rank, other in enumerate(infos) if other == (host, gpu))
            raise WorldError(
                f"device: ranks {ranks} share one GPU of {host}, although there are more (call "
                f"torch.cuda.set_device(local_rank) first, or give device)"
            )


def _run_and_signal(work: Callable[[bool], ResultT], store: Store, rank: int, is_first: bool) -> ResultT:
    try:
        return work(is_first)
    except BaseException:  # also Ctrl-C: the other ranks would wait until the timeout
        store.set(_FAILED, str(rank))
        raise


def _raise_if_failed(store: Store) -> None:
    if store.check([_FAILED]):
        raise WorldError(f"data: rank {store.get(_FAILED).decode()} could not read it (see the error of that rank)")
