"""The store that the ranks of a run meet at, and the wait until all have come. What fails here is named by variable."""

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import WorldError
from paceline.core.world import World

NOTICE_S: Final = 8.0
"""A wait that lasts longer is said on stderr, for it may be a mistake, and may be a node that is slow to start."""
_MISSING = "paceline/missing"

Say = Callable[[str], None]


def on_stderr(message: str) -> None:
    """Print one line to stderr."""
    print(message, file=sys.stderr, flush=True)


def open_store(world: World, timeout: timedelta) -> TCPStore:
    """Return the key-value store of the run, hosted by rank 0, or by torchrun's agent where it says so.

    Raise `WorldError` for a host that cannot be resolved or reached, and for a port that is taken.
    """
    is_master = world.is_main and not world.agent_hosts_store
    if not is_master:
        _wait_for_host(world, timeout.total_seconds(), on_stderr)
    try:
        return TCPStore(
            world.master_addr,
            world.master_port,
            world.world_size,
            is_master,
            timeout,
            wait_for_workers=False,
            master_listen_fd=world.store_fd if is_master and world.store_fd >= 0 else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise WorldError(_explained(world, str(error))) from None


def attempt_of(world: World, store: Store) -> Store:
    """Return `store` with keys of its own for each time the ranks are started."""
    return PrefixStore(f"attempt{world.attempt}", store)


def assemble(world: World, store: Store, timeout: timedelta, say: Say = on_stderr) -> None:
    """Wait until all ranks have come to `store`. Raise `WorldError` on all that have, naming those that have not."""
    store.set(_here(world.rank), "")
    if not world.is_main:
        missing = _answer(world, store, timeout)
    else:
        with contextlib.suppress(dist.DistStoreError):  # time ran out; who is missing is looked up below
            _wait_for_all(world, store, timeout, say)
        missing = _missing(world, store)
        store.set(_MISSING, missing)
    if missing:
        seconds = f"{timeout.total_seconds():g}s"
        raise WorldError(f"WORLD_SIZE: {world.world_size}, but {missing} did not come within {seconds} ({_fix(world)})")


def _answer(world: World, store: Store, timeout: timedelta) -> str:
    """Return what rank 0 says is missing. Raise `WorldError` when it does not say."""
    try:
        store.wait([_MISSING], timeout + timedelta(seconds=5))
        return store.get(_MISSING).decode()
    except RuntimeError:
        place = f"rank {world.rank} of {world.world_size}"
        raise _claimed(
            f"MASTER_ADDR: {place} met no rank 0 at {world.master_addr}, or lost it ({_fix(world)})"
        ) from None


def _wait_for_all(world: World, store: Store, timeout: timedelta, say: Say) -> None:
    ranks = [_here(rank) for rank in range(world.world_size)]
    notice = timedelta(seconds=NOTICE_S)
    try:
        store.wait(ranks, min(timeout, notice))
    except dist.DistStoreError:
        if timeout <= notice:
            raise
        say(f"waiting for {_missing(world, store)} of {world.world_size} ({_fix(world)})")
        store.wait(ranks, timeout - notice)


def _missing(world: World, store: Store) -> str:
    """Return the ranks that have not come, in words, or nothing."""
    missing = [str(rank) for rank in range(world.world_size) if not store.check([_here(rank)])]
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    return f"{'rank' if len(missing) == 1 else 'ranks'} {shown}" if missing else ""


def _here(rank: int) -> str:
    return f"paceline/here/{rank}"


def _fix(world: World) -> str:
    return f"start it with MASTER_ADDR={world.master_addr} and MASTER_PORT={world.master_port}, as the others were"


def _wait_for_host(world: World, timeout_s: float, say: Say) -> None:
    """Wait until something listens where rank 0 should, which may start later than this rank."""
    host, port = world.master_addr, world.master_port
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = f"cannot be resolved on {socket.gethostname()}: {error.strerror or error}"
        fix = "set it to the name or address of rank 0's machine"
        raise _claimed(f"MASTER_ADDR: {host!r} {reason} ({fix})") from None
    deadline, notice = time.monotonic() + timeout_s, time.monotonic() + NOTICE_S
    while True:
        reason = _refusal(host, port)
        if not reason:
            return
        if time.monotonic() > deadline:
            raise _claimed(_explained(world, reason))
        if time.monotonic() > notice:
            notice = float("inf")
            say(f"waiting for rank 0: {_explained(world, reason)}")
        time.sleep(0.1)


def _claimed(message: str) -> WorldError:
    """Return an error that this rank alone can tell of."""
    error = WorldError(message)
    error.is_claimed = True
    return error


def _refusal(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _explained(world: World, error: str) -> str:
    if "EADDRINUSE" in error or "in use" in error:
        return f"MASTER_PORT: {world.master_port} is in use on {socket.gethostname()} (set MASTER_PORT to a free port)"
    place = f"{world.master_addr}:{world.master_port}"
    return f"MASTER_ADDR: rank {world.rank} cannot reach rank 0 at {place} (check MASTER_ADDR and MASTER_PORT)"
