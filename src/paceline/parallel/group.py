"""The process group: joining it, leaving it, and agreeing on who speaks when something fails."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.world import World
from paceline.parallel.beats import Beats, NoBeats, StoreBeats
from paceline.parallel.culprit import account
from paceline.parallel.rendezvous import assemble, open_store
from paceline.parallel.turns import in_turn
from paceline.recipe.schema.parallel import Parallel

T = TypeVar("T")
_LEFT = "paceline/left"
_FIRSTS = "paceline/firsts"
_LEAVE_TIMEOUT_S = 30
_OF_COLLECTIVES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "timeout caused pair closure",
    "gloo",
    "NCCL",
)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a run find one another, before and beside any collective. A world of one has no store."""

    world: World
    timeout: timedelta
    store: Store | None = None
    beats: Beats = field(default_factory=NoBeats)

    def share(self, name: str, value: str) -> str:
        """Return rank 0's `value` on every rank. Every rank must call it, with the same `name`."""
        if self.store is None:
            return value
        if self.world.is_main:
            self.store.set(f"paceline/{name}", value)
        return self.store.get(f"paceline/{name}").decode()

    def leave(self) -> None:
        """Leave the store; rank 0, which hosts it, waits until all have, so that no one is left asking.

        Raise `PeerLostError` where one has failed meanwhile.
        """
        if self.store is None:
            return
        self.beats.say("left")
        self.store.set(f"{_LEFT}/{self.world.rank}", "")
        if self.world.is_main:
            self._wait_for_the_others(self.store)

    def _wait_for_the_others(self, store: Store) -> None:
        for _ in range(_LEAVE_TIMEOUT_S * 2):
            with contextlib.suppress(RuntimeError):  # a rank that was lost is not waited for longer
                store.wait([f"{_LEFT}/{rank}" for rank in range(self.world.world_size)], timedelta(seconds=0.5))
                return
            if self.beats.has_failed:
                raise PeerLostError("another rank failed", is_explained=True)


@contextlib.contextmanager
def meeting(world: World, section: Parallel) -> Iterator[Meeting]:
    """Let the ranks of `world` find one another. What fails inside is raised on one rank only.

    On the ranks that fail because of it it becomes a `PeerLostError`, and on one that lost a peer without a word it
    becomes one that names the peer. Raise `WorldError` when not all ranks come.
    """
    timeout = timedelta(seconds=section.timeout.seconds)
    met = _met(world, timeout) if world.world_size > 1 else Meeting(world, timeout)
    try:
        yield met
        met.leave()
    except Exception as error:
        raised = _claimed(met, error)
        if raised is error:
            raise
        raise raised from error
    finally:
        met.beats.close()


@contextlib.contextmanager
def joined(met: Meeting, section: Parallel, device: torch.device) -> Iterator[None]:
    """Join the ranks for collectives, and part at the end. A world of one joins nothing.

    After a failure the group is not taken down in order, which could wait for ranks that are gone: the process ends.
    Raise `WorldError` for a network interface that is none.
    """
    if met.store is None:
        yield
        return
    backend = ("nccl" if device.type == "cuda" else "gloo") if section.backend == "auto" else section.backend
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", met.store),
            rank=met.world.rank,
            world_size=met.world.world_size,
            timeout=met.timeout,
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise _of_interface(error) or error from None
    yield
    dist.destroy_process_group()


def once_a_node(met: Meeting, work: Callable[[bool], T], waits: Callable[[], None]) -> T:
    """Return `work(True)` on the first rank of each node, and on the others, once all of those are done, `work(False)`.

    However long that takes, all ranks return together; `waits` is called now and then meanwhile. Raise `PeerLostError`
    where a rank fails, and torch's error of a timeout where one is silent for as long as a collective would wait for
    it: inside a `meeting` that names the rank. One that is slow is not silent.
    """
    world = met.world
    if met.store is None:
        return work(True)
    met.store.add(_FIRSTS, int(world.is_node_main))
    dist.barrier()
    firsts = met.store.add(_FIRSTS, 0)

    def waits_for_them() -> None:
        if met.beats.has_failed:
            raise PeerLostError("another rank failed", is_explained=True)
        if met.beats.misses_one(met.timeout.total_seconds()):
            raise dist.DistStoreError("Timed out waiting for a rank's heartbeat")
        waits()

    result = in_turn(PrefixStore("turns", met.store), firsts, work, waits_for_them, is_first=world.is_node_main)
    # The next thing is a collective, in which nobody may stand while others still work.
    in_turn(PrefixStore("all", met.store), world.world_size, lambda _: None, waits_for_them, is_first=True)
    return result


def _met(world: World, timeout: timedelta) -> Meeting:
    store = open_store(world, timeout)
    place = assemble(world, store, timeout)
    # A handle serves one call at a time, and the main thread may wait in one.
    beats = StoreBeats(world, PrefixStore("beats", PrefixStore(place, store.clone())))
    return Meeting(world, timeout, PrefixStore(place, store), beats)


def _claimed(met: Meeting, error: Exception) -> Exception:
    """Return what this rank raises in place of `error`, and tell the others that it failed."""
    met.beats.say("failed")
    is_own = not _is_of_collective(error)
    speaks = met.beats.claims(is_own=is_own)
    raised: Exception = PeerLostError("another rank failed", is_explained=True)
    if speaks:
        raised = error if is_own or met.store is None else _lost(met, error)
    met.beats.linger()
    if not speaks:
        return raised
    if isinstance(raised, PacelineError):
        raised.is_claimed = True
    return raised


def _lost(met: Meeting, error: Exception) -> PeerLostError:
    """Return the error that names the rank which a collective of this one failed by."""
    waited = "Timed out waiting" in str(error) or "timeout" in str(error).lower()
    sights = met.beats.sights(waited=waited)
    return PeerLostError(account(sights, met.world.rank, waited=waited, stacks=met.beats.stacks_of), is_explained=False)


def _is_of_collective(error: Exception) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):  # the store went with the rank that hosts it
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_COLLECTIVES)


def _of_interface(error: RuntimeError) -> WorldError | None:
    """Return what gloo says of GLOO_SOCKET_IFNAME in our words, or None for another error."""
    _, found, name = str(error).partition("Unable to find address for:")
    if not found:
        return None
    names = ", ".join(each for _, each in socket.if_nameindex())
    here = f"is no network interface of {socket.gethostname()} with an address"
    return WorldError(f"GLOO_SOCKET_IFNAME: {name.split()[0]!r} {here} (set it to one of {names}, or unset it)")
