"""Connect the ranks of a run: rendezvous, process group, and the choice of the rank that reports a failure."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.world import World
from paceline.parallel.blame import blame_rank
from paceline.parallel.heartbeat import Heartbeats
from paceline.parallel.rendezvous import open_store, wait_for_all_ranks
from paceline.recipe.schema.train import Parallel

T = TypeVar("T")
_DONE: Final = "done"
_EXITED: Final = "exited"
_MIN_POLL_S, _MAX_POLL_S = 0.01, 0.5
_DISCONNECTED = "paceline/disconnected"
_NUM_FIRST = "paceline/num_node_mains"
_DISCONNECT_TIMEOUT_S = 30
# Texts of torch, gloo and NCCL in the errors of a collective that lost a rank: they have no exception type.
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
    """The ranks' key-value store and heartbeats; a world of one has neither."""

    world: World
    timeout: timedelta
    store: Store | None = None
    heartbeats: Heartbeats | None = None

    def broadcast(self, name: str, value: str) -> str:
        """Return rank 0's `value` on every rank. Collective; `name` identifies the call."""
        if self.store is None:
            return value
        if self.world.is_main:
            self.store.set(f"paceline/{name}", value)
        return self.store.get(f"paceline/{name}").decode()

    def disconnect(self) -> None:
        """Disconnect; rank 0, which may host the store, waits for the others. Raise `PeerLostError` if one failed."""
        if self.store is None or self.heartbeats is None:
            return
        self.heartbeats.publish("exited")
        self.store.set(f"{_DISCONNECTED}/{self.world.rank}", "")
        keys = [f"{_DISCONNECTED}/{rank}" for rank in range(self.world.world_size)]
        for _ in range(_DISCONNECT_TIMEOUT_S * 2 if self.world.is_main else 0):
            with contextlib.suppress(RuntimeError):  # timeout: look whether a rank has failed, then wait on
                self.store.wait(keys, timedelta(seconds=0.5))
                return
            if self.heartbeats.has_failed:
                raise PeerLostError("another rank failed", is_explained=True)


@contextlib.contextmanager
def rendezvous(world: World, section: Parallel) -> Iterator[RankStore]:
    """Connect the ranks of `world`. Inside, the first rank to fail raises its error, the others `PeerLostError`.

    That names the rank if one was lost without an error. Raise `WorldError` if not all ranks arrive.
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
        if store.heartbeats:
            store.heartbeats.close()


@contextlib.contextmanager
def process_group(store: RankStore, section: Parallel, device: torch.device) -> Iterator[None]:
    """Initialize torch's process group, and destroy it at the end; do nothing for a world of one.

    Raise `WorldError` for an unknown network interface.
    """
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
    yield
    # Not in a `finally`: after a failure this could wait for ranks that are gone, and the process ends anyway.
    dist.destroy_process_group()


def local_rank_zero_first(
    store: RankStore, work: Callable[[bool], T], on_wait: Callable[[], None], name: str = "data"
) -> T:
    """Return `work(True)` on the first rank of each node, then `work(False)` on the others; all ranks return together.

    Each kind of work has its own `name`, and is done once per run.
    `on_wait` is called repeatedly while waiting. A slow rank is no error; a rank that failed, or sent no heartbeat for
    the timeout, is one that `rendezvous` explains.
    """
    world, heartbeats = store.world, store.heartbeats
    if store.store is None or heartbeats is None:
        return work(True)
    # Count the first ranks in the store: no rank knows the number of nodes. The barrier is between writing and reading.
    turns, everyone = PrefixStore(f"turns/{name}", store.store), PrefixStore(f"all/{name}", store.store)
    turns.add(_NUM_FIRST, int(world.is_node_main))
    dist.barrier()
    num_first = turns.add(_NUM_FIRST, 0)

    def check_ranks() -> None:
        if heartbeats.has_failed:
            raise PeerLostError("another rank failed", is_explained=True)
        if heartbeats.has_silent_rank(store.timeout.total_seconds()):
            raise dist.DistStoreError("Timed out waiting for a rank's heartbeat")
        on_wait()

    result = run_in_order(turns, num_first, work, check_ranks, is_first=world.is_node_main)
    # The next collective has the timeout of the process group, and reading a dataset may take longer: wait here.
    run_in_order(everyone, world.world_size, lambda _: None, check_ranks, is_first=True)
    return result


def _connect(world: World, timeout: timedelta) -> RankStore:
    store = open_store(world, timeout)
    prefix = wait_for_all_ranks(world, store, timeout)
    # A clone: a handle serves one call at a time, and the main thread may block in one.
    beats = Heartbeats(world, PrefixStore("beats", PrefixStore(prefix, store.clone())))
    return RankStore(world, timeout, PrefixStore(prefix, store), beats)


def _error_to_raise(store: RankStore, error: Exception) -> Exception:
    """Publish that this rank failed; return the error that it raises in place of `error`."""
    heartbeats, raised = store.heartbeats, error
    if heartbeats:
        heartbeats.publish("failed")
        is_own = not _is_collective_error(error)
        is_reporter = heartbeats.claim_report(is_own=is_own)
        if not is_reporter:
            raised = PeerLostError("another rank failed", is_explained=True)
        elif not is_own:
            raised = _peer_lost_error(heartbeats, store.world.rank, error)
        heartbeats.linger()  # the store ends with this process if it hosts it
        if not is_reporter:
            return raised
    if isinstance(raised, PacelineError):
        raised.is_claimed = True
    return raised


def _peer_lost_error(heartbeats: Heartbeats, own_rank: int, error: Exception) -> PeerLostError:
    timed_out = "Timed out waiting" in str(error) or "timeout" in str(error).lower()
    statuses = heartbeats.statuses(timed_out=timed_out)
    line = blame_rank(statuses, own_rank, timed_out=timed_out, stacks=heartbeats.stacks_of)
    return PeerLostError(line, is_explained=False)


def _is_collective_error(error: Exception) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):  # the store went with the rank that hosts it
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _COLLECTIVE_ERRORS)


def _interface_error(error: RuntimeError) -> WorldError | None:
    """Return gloo's error about GLOO_SOCKET_IFNAME as a `WorldError`; None for another error."""
    _, separator, name = str(error).partition("Unable to find address for:")
    if not separator:
        return None
    names = ", ".join(each for _, each in socket.if_nameindex())
    reason = f"is not a network interface of {socket.gethostname()} with an address"
    return WorldError(f"GLOO_SOCKET_IFNAME: {name.split()[0]!r} {reason} (set it to one of {names}, or unset it)")


def run_in_order(
    store: Store, num_first: int, work: Callable[[bool], T], on_wait: Callable[[], None], *, is_first: bool
) -> T:
    """Return `work(True)` on the `num_first` ranks that are first, then `work(False)` on the others.

    `on_wait` is called repeatedly while waiting; it raises to give up. Each call needs its own prefix of the store.
    """
    results = [work(True)] if is_first else []
    _wait_for_count(store, _DONE, int(is_first), num_first, on_wait)
    return results[0] if results else work(False)


def exit_last(store: Store, num_others: int, on_wait: Callable[[], None], *, is_last: bool) -> None:
    """Return at once, but on the rank that `is_last` only after all others have called this.

    The rank that hosts the store must be last. `on_wait` and `store` are as for `run_in_order`.
    """
    if is_last:
        _wait_for_count(store, _EXITED, 0, num_others, on_wait)
    else:  # one call only: the store may be gone as soon as it has answered
        store.add(_EXITED, 1)


def _wait_for_count(store: Store, name: str, more: int, number: int, on_wait: Callable[[], None]) -> None:
    """Add `more` to the counter `name`, and return when it has reached `number`."""
    # Call the store in a thread: it never answers if its host is frozen or cut off, and this thread must keep calling
    # `on_wait`, which needs its own handle if it uses the store.
    errors, finished, stopping = list[Exception](), threading.Event(), threading.Event()

    def count_up() -> None:
        try:
            intervals = _poll_intervals()
            total = store.add(name, more)
            while total < number and not stopping.wait(next(intervals)):
                total = store.add(name, 0)
        except Exception as error:
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=count_up, name="paceline-turns", daemon=True).start()
    try:
        intervals = _poll_intervals()
        while not finished.wait(next(intervals)):
            on_wait()
    finally:
        stopping.set()
    if errors:
        raise errors[0]


def _poll_intervals() -> Iterator[float]:
    """Yield seconds to wait before each poll, doubling."""
    interval_s = _MIN_POLL_S
    while True:
        yield interval_s
        interval_s = min(_MAX_POLL_S, 2 * interval_s)
