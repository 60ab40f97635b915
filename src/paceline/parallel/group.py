"""The process group: joining it, leaving it, and agreeing on who speaks when something fails."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.world import World
from paceline.recipe.schema.parallel import Parallel

T = TypeVar("T")
_LEFT = "paceline/left"
_LEAVE_TIMEOUT = timedelta(seconds=30)
_FAILURES = "paceline/failures"


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a run find one another, before and beside any collective. A world of one has no store."""

    world: World
    timeout: timedelta
    store: Store | None = None

    def share(self, name: str, value: str) -> str:
        """Return rank 0's `value` on every rank. Every rank must call it, with the same `name`."""
        if self.store is None:
            return value
        if self.world.is_main:
            self.store.set(f"paceline/{name}", value)
        return self.store.get(f"paceline/{name}").decode()

    def leave(self) -> None:
        """Leave the store; rank 0, which hosts it, waits until all have, so that no one is left asking."""
        if self.store is None:
            return
        self.store.set(f"{_LEFT}/{self.world.rank}", "")
        if self.world.is_main:
            with contextlib.suppress(RuntimeError):  # a rank that was lost is not waited for longer
                self.store.wait([f"{_LEFT}/{rank}" for rank in range(self.world.world_size)], _LEAVE_TIMEOUT)

    def is_first_to_fail(self) -> bool:
        """Claim the right to explain a failure; True for one rank of the run, the first that failed.

        The others fail because they lost it. A rank that cannot ask, because the store went with rank 0, is one
        of the others.
        """
        if self.store is None:
            return True
        try:
            return self.store.add(_FAILURES, 1) == 1
        except RuntimeError:
            return self.world.is_main


@contextlib.contextmanager
def meeting(world: World, section: Parallel) -> Iterator[Meeting]:
    """Let the ranks of `world` find one another. What fails inside is raised on one rank only.

    On the ranks that fail because of it, and on one that lost a peer without a word, it becomes a `PeerLostError`.
    """
    timeout = timedelta(seconds=section.timeout.seconds)
    met = Meeting(world, timeout, _store(world, timeout) if world.world_size > 1 else None)
    try:
        yield met
        met.leave()
    except Exception as error:
        if not met.is_first_to_fail():
            raise PeerLostError("another rank failed", is_explained=True) from error
        if isinstance(error, PacelineError):
            error.is_claimed = True
        if _is_lost_peer(error):
            place = f"rank {world.rank} of {world.world_size}"
            reason = " ".join(str(error).split())[:160]
            lost = PeerLostError(f"{place}: another rank went away: {reason}", is_explained=False)
            lost.is_claimed = True
            raise lost from error
        raise


@contextlib.contextmanager
def joined(met: Meeting, section: Parallel, device: torch.device) -> Iterator[None]:
    """Join the ranks for collectives, and part at the end. A world of one joins nothing.

    After a failure the group is not taken down in order, which could wait for ranks that are gone: the process ends.
    """
    if met.store is None:
        yield
        return
    backend = ("nccl" if device.type == "cuda" else "gloo") if section.backend == "auto" else section.backend
    dist.init_process_group(
        backend,
        store=PrefixStore("group", met.store),
        rank=met.world.rank,
        world_size=met.world.world_size,
        timeout=met.timeout,
        device_id=device if backend == "nccl" else None,
    )
    yield
    dist.destroy_process_group()


def once_a_node(world: World, work: Callable[[bool], T]) -> T:
    """Return `work(True)` on the first rank of each node, and on the others, once those are done, `work(False)`."""
    if world.is_node_main:
        result = work(True)
    if world.world_size > 1:
        dist.barrier()
    return result if world.is_node_main else work(False)


def _is_lost_peer(error: Exception) -> bool:
    text = str(error)
    said = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")
    return isinstance(error, RuntimeError) and any(words in text for words in said)


def _store(world: World, timeout: timedelta) -> Store:
    """Return the key-value store of the run, hosted by rank 0, or by torchrun's agent where it says so."""
    is_master = world.is_main and not world.agent_hosts_store
    try:
        if is_master and world.store_fd >= 0:
            store = TCPStore(
                world.master_addr,
                world.master_port,
                world.world_size,
                is_master,
                timeout,
                wait_for_workers=False,
                master_listen_fd=world.store_fd,
            )
        else:
            store = TCPStore(
                world.master_addr, world.master_port, world.world_size, is_master, timeout, wait_for_workers=False
            )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise WorldError(_explained(world, str(error))) from None
    return PrefixStore(f"attempt{world.attempt}", store)


def _explained(world: World, error: str) -> str:
    if "EADDRINUSE" in error or "in use" in error:
        return f"MASTER_PORT: {world.master_port} is in use on {socket.gethostname()} (set MASTER_PORT to a free port)"
    place = f"{world.master_addr}:{world.master_port}"
    return f"MASTER_ADDR: rank {world.rank} cannot reach rank 0 at {place} (check MASTER_ADDR and MASTER_PORT)"
