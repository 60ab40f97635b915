"""Connect the ranks of a run: rendezvous, process group, and which rank reports a failure."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.world import World
from paceline.parallel.blame import blame_rank
from paceline.parallel.heartbeat import Heartbeats, NoHeartbeats, StoreHeartbeats
from paceline.parallel.rendezvous import open_store, wait_for_all_ranks
from paceline.recipe.schema.train import Parallel

T = TypeVar("T")
_DONE: Final = "done"
_EXITED: Final = "left"
_SHORT_S, _LONG_S = 0.01, 0.5
_DISCONNECTED = "paceline/left"
_NUM_FIRST = "paceline/firsts"
_DISCONNECT_TIMEOUT_S = 30
_COLLECTIVE_ERRORS = (
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
class RankStore:
    """The store in which the ranks of a run find one another; a world of one has none."""

    world: World
    timeout: timedelta
    store: Store | None = None
    heartbeats: Heartbeats = field(default_factory=NoHeartbeats)

    def broadcast(self, name: str, value: str) -> str:
        """Return rank 0's `value` on every rank. Every rank must call it with the same `name`."""
        if self.store is None:
            return value
        if self.world.is_main:
            self.store.set(f"paceline/{name}", value)
        return self.store.get(f"paceline/{name}").decode()

    def disconnect(self) -> None:
        """Disconnect; rank 0 hosts the store and waits for the others. Raise `PeerLostError` if one has failed
        meanwhile."""
        if self.store is None:
            return
        self.heartbeats.publish("left")
        self.store.set(f"{_DISCONNECTED}/{self.world.rank}", "")
        if self.world.is_main:
            self._wait_for_the_others(self.store)

    def _wait_for_the_others(self, store: Store) -> None:
        for _ in range(_DISCONNECT_TIMEOUT_S * 2):
            with contextlib.suppress(RuntimeError):  # do not wait for a lost rank
                store.wait([f"{_DISCONNECTED}/{rank}" for rank in range(self.world.world_size)], timedelta(seconds=0.5))
                return
            if self.heartbeats.has_failed:
                raise PeerLostError("another rank failed", is_explained=True)


@contextlib.contextmanager
def rendezvous(world: World, section: Parallel) -> Iterator[RankStore]:
    """Connect the ranks of `world`; an error inside is raised on one rank only.

    The others raise `PeerLostError`, which names the rank if it was lost without an error. Raise `WorldError` if not
    all ranks arrive.
    """
    timeout = timedelta(seconds=section.timeout.seconds)
    store = _connect(world, timeout) if world.world_size > 1 else RankStore(world, timeout)
    try:
        yield store
        store.disconnect()
    except Exception as error:
        raised = _error_to_raise(store, error)
        if raised is error:
            raise
        raise raised from error
    finally:
        store.heartbeats.close()


@contextlib.contextmanager
def process_group(store: RankStore, section: Parallel, device: torch.device) -> Iterator[None]:
    """Initialise torch's process group, and destroy it at the end; do nothing for a world of one. Raise `WorldError`
    for an unknown network interface."""
    if store.store is None:
        yield
        return
    backend = ("nccl" if device.type == "cuda" else "gloo") if section.backend == "auto" else section.backend
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store.store),
            rank=store.world.rank,
            world_size=store.world.world_size,
            timeout=store.timeout,
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise _interface_error(error) or error from None
    # Not in a `finally`: after a failure this could wait for ranks that are gone, and the process ends anyway.
    yield
    dist.destroy_process_group()


def local_rank_zero_first(store: RankStore, work: Callable[[bool], T], on_wait: Callable[[], None]) -> T:
    """Return `work(True)` on the first rank of each node, then `work(False)` on the others; all ranks return together.

    `on_wait` is called repeatedly while waiting. Inside a `rendezvous`, raise an error that names a rank that failed,
    or that sent no heartbeat for the timeout; a slow rank is no error.
    """
    world = store.world
    if store.store is None:
        return work(True)
    store.store.add(_NUM_FIRST, int(world.is_node_main))
    dist.barrier()
    firsts = store.store.add(_NUM_FIRST, 0)

    def check_ranks() -> None:
        if store.heartbeats.has_failed:
            raise PeerLostError("another rank failed", is_explained=True)
        if store.heartbeats.has_silent_rank(store.timeout.total_seconds()):
            raise dist.DistStoreError("Timed out waiting for a rank's heartbeat")
        on_wait()

    result = run_in_order(PrefixStore("turns", store.store), firsts, work, check_ranks, is_first=world.is_node_main)
    # A collective follows, in which no rank may wait while others still work.
    run_in_order(PrefixStore("all", store.store), world.world_size, lambda _: None, check_ranks, is_first=True)
    return result


def _connect(world: World, timeout: timedelta) -> RankStore:
    store = open_store(world, timeout)
    prefix = wait_for_all_ranks(world, store, timeout)
    # A handle serves one call at a time, and the main thread may block in one.
    beats = StoreHeartbeats(world, PrefixStore("beats", PrefixStore(prefix, store.clone())))
    return RankStore(world, timeout, PrefixStore(prefix, store), beats)


def _error_to_raise(store: RankStore, error: Exception) -> Exception:
    """Return the error that this rank raises in place of `error`, after publishing that it failed."""
    store.heartbeats.publish("failed")
    is_own = not _is_collective_error(error)
    speaks = store.heartbeats.claim_report(is_own=is_own)
    raised: Exception = PeerLostError("another rank failed", is_explained=True)
    if speaks:
        raised = error if is_own or store.store is None else _peer_lost_error(store, error)
    store.heartbeats.linger()
    if not speaks:
        return raised
    if isinstance(raised, PacelineError):
        raised.is_claimed = True
    return raised


def _peer_lost_error(store: RankStore, error: Exception) -> PeerLostError:
    """Return the error that names the rank by which a collective failed."""
    waited = "Timed out waiting" in str(error) or "timeout" in str(error).lower()
    sights = store.heartbeats.statuses(waited=waited)
    return PeerLostError(
        blame_rank(sights, store.world.rank, waited=waited, stacks=store.heartbeats.stacks_of), is_explained=False
    )


def _is_collective_error(error: Exception) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):  # the store went with the rank that hosts it
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _COLLECTIVE_ERRORS)


def _interface_error(error: RuntimeError) -> WorldError | None:
    """Return gloo's error about GLOO_SOCKET_IFNAME as a `WorldError`, or None for another error."""
    _, separator, name = str(error).partition("Unable to find address for:")
    if not separator:
        return None
    names = ", ".join(each for _, each in socket.if_nameindex())
    reason = f"is not a network interface of {socket.gethostname()} with an address"
    return WorldError(f"GLOO_SOCKET_IFNAME: {name.split()[0]!r} {reason} (set it to one of {names}, or unset it)")


def run_in_order(
    store: Store, num_firsts: int, work: Callable[[bool], T], on_wait: Callable[[], None], *, is_first: bool
) -> T:
    """Return `work(True)` on the `num_firsts` first ranks, then `work(False)` on the others.

    `on_wait` is called repeatedly while waiting, and raises to give up. Use a new `store` prefix for each call.
    """
    results = [work(True)] if is_first else []
    _wait_for_count(store, _DONE, int(is_first), num_firsts, on_wait)
    return results[0] if results else work(False)


def exit_last(store: Store, num_others: int, on_wait: Callable[[], None], *, is_last: bool) -> None:
    """Return at once on all ranks but one; on that with `is_last`, return after all others have called this.

    The rank that hosts the store must be last: no other can use the store after it exits. `on_wait` and `store` are as
    for `run_in_order`.
    """
    if is_last:
        _wait_for_count(store, _EXITED, 0, num_others, on_wait)
    else:  # the store may be gone as soon as it has answered, so ask it nothing else
        store.add(_EXITED, 1)


def _wait_for_count(store: Store, name: str, more: int, number: int, on_wait: Callable[[], None]) -> None:
    """Add `more` to the counter `name`, and return when it has reached `number`."""
    # A thread calls the store, which never answers if its host is frozen or cut off; the caller must keep calling
    # `on_wait`. If `on_wait` uses the store too, it needs a handle of its own: one serves one call at a time.
    errors, is_over, ends = list[Exception](), threading.Event(), threading.Event()

    def count_up() -> None:
        try:
            pauses = _pauses()
            total = store.add(name, more)
            while total < number and not ends.wait(next(pauses)):
                total = store.add(name, 0)
        except Exception as error:
            errors.append(error)
        finally:
            is_over.set()

    threading.Thread(target=count_up, name="paceline-turns", daemon=True).start()
    try:
        pauses = _pauses()
        while not is_over.wait(next(pauses)):
            on_wait()
    finally:
        ends.set()
    if errors:
        raise errors[0]


def _pauses() -> Iterator[float]:
    """Yield the seconds to wait before each poll, short ones first."""
    pause_s = _SHORT_S
    while True:
        yield pause_s
        pause_s = min(_LONG_S, 2 * pause_s)
