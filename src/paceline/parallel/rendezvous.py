"""Open the store of a run and wait until all ranks have arrived. Errors name the environment variable at fault."""

import contextlib
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import WorldError
from paceline.core.world import World

NOTICE_S: Final = 8.0
"""Seconds after which a wait is reported on stderr."""
_POLL_S: Final = 0.5  # between two checks for a newer round
_EXTRA_WAIT_S: Final = 5.0  # the others wait this much longer than rank 0, for its answer
_ACKNOWLEDGE_S: Final = 2.0  # rank 0, which may host the store, waits until the others have read its answer
_FILES: Final = 64
_FILES_PER_RANK: Final = 4  # gloo's connections to each rank, each rank's to the store, and some to spare
_ROUNDS, _MISSING = "paceline/rounds", "missing"

Print = Callable[[str], None]


def on_stderr(message: str) -> None:
    """Print one line to stderr."""
    print(message, file=sys.stderr, flush=True)


def open_store(world: World, timeout: timedelta) -> TCPStore:
    """Return the run's key-value store, hosted by rank 0 or torchrun's agent.

    Raise `WorldError` for a host that cannot be resolved or reached, and for a port that is taken.
    """
    _allow_connections(world.world_size)
    is_master = world.is_main and not world.agent_hosts_store
    _resolve_host(world.master_addr)  # on rank 0 too, which would otherwise try to reach itself until the timeout
    if not is_master:  # TCPStore itself would retry without a message
        _wait_for_host(world, timeout.total_seconds(), on_stderr)
    try:
        return TCPStore(
            world.master_addr,
            world.master_port,
            world.world_size,
            is_master,
            timeout,
            wait_for_workers=False,  # it could not tell which ranks are missing
            master_listen_fd=world.store_fd if is_master and world.store_fd >= 0 else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise WorldError(_describe_store_error(world, str(error))) from None


def _allow_connections(world_size: int) -> None:
    """Raise the soft limit of open files to the number of connections, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_RANK * world_size
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def wait_for_all_ranks(world: World, store: Store, timeout: timedelta, print_line: Print = on_stderr) -> str:
    """Wait until all ranks have arrived in `store`; return the key prefix of this round.

    Raise `WorldError` on the ranks that arrived, naming the others.
    """
    # The store of torchrun's agent outlives the ranks and has the keys of earlier starts. No number of starts is the
    # same on all ranks, since each node's agent counts its own (https://github.com/pytorch/pytorch/issues/108158). So
    # rank 0 opens a round, and the others join the newest.
    if world.is_main:
        prefix = _round_name(store.add(_ROUNDS, 1))
        missing = _host_round(world, PrefixStore(prefix, store), timeout, print_line)
    else:
        prefix, missing = _join_round(world, store, timeout.total_seconds() + _EXTRA_WAIT_S)
    if missing:
        seconds = f"{timeout.total_seconds():g}s"
        raise WorldError(
            f"WORLD_SIZE: {world.world_size}, but {missing} did not come within {seconds} ({_how_to_start(world)})"
        )
    return prefix


def _host_round(world: World, store: Store, timeout: timedelta, print_line: Print) -> str:
    """Wait on rank 0 until all ranks have arrived; publish and return the missing ones."""
    store.set(_arrived_key(world.rank), "")
    with contextlib.suppress(dist.DistStoreError):  # timeout; the missing ranks are looked up below
        _wait_for_all(world, store, timeout, print_line)
    missing = _describe_missing(world, store)
    store.set(_MISSING, missing)
    if missing:
        absent = {*missing_keys(store, [_arrived_key(rank) for rank in range(world.world_size)])}
        acks = [_acknowledged_key(rank) for rank in range(1, world.world_size) if _arrived_key(rank) not in absent]
        with contextlib.suppress(dist.DistStoreError):  # a rank that arrived has ended meanwhile
            if acks:
                store.wait(acks, timedelta(seconds=_ACKNOWLEDGE_S))
    return missing


def _join_round(world: World, store: Store, timeout_s: float) -> tuple[str, str]:
    """Join the newest round; return its key prefix and the missing ranks. Raise `WorldError` without rank 0."""
    number, is_first = 0, False
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(RuntimeError):  # the store went with rank 0
        while time.monotonic() < deadline:
            newest = store.add(_ROUNDS, 0)
            round_store = PrefixStore(_round_name(newest), store)
            # A round that has ended, or that this rank number joined before, is of an earlier start.
            if newest > number:
                number = newest
                is_first = not round_store.check([_MISSING]) and round_store.add(_arrived_key(world.rank), 1) == 1
            if not is_first:
                time.sleep(_POLL_S / 10)
                continue
            with contextlib.suppress(dist.DistStoreError):  # timeout: look for a newer round
                round_store.wait([_MISSING], timedelta(seconds=_POLL_S))
                missing = round_store.get(_MISSING).decode()
                if missing:
                    round_store.set(_acknowledged_key(world.rank), "")
                return _round_name(number), missing
    who = f"rank {world.rank} of {world.world_size}"
    raise _reported_error(
        f"MASTER_ADDR: {who} found no rank 0 at {world.master_addr}, or lost it ({_how_to_start(world)})"
    )


def _wait_for_all(world: World, store: Store, timeout: timedelta, print_line: Print) -> None:
    ranks = [_arrived_key(rank) for rank in range(world.world_size)]
    notice = timedelta(seconds=NOTICE_S)
    try:
        store.wait(ranks, min(timeout, notice))
    except dist.DistStoreError:
        if timeout <= notice:
            raise
        print_line(f"waiting for {_describe_missing(world, store)} of {world.world_size} ({_how_to_start(world)})")
        store.wait(ranks, timeout - notice)


def _describe_missing(world: World, store: Store) -> str:
    """Return the missing ranks as text, or ""."""
    keys = [_arrived_key(rank) for rank in range(world.world_size)]
    missing = [key.rpartition("/")[2] for key in islice(missing_keys(store, keys), 9)]
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    return f"{'rank' if len(missing) == 1 else 'ranks'} {shown}" if missing else ""


def missing_keys(store: Store, keys: Sequence[str]) -> Iterator[str]:
    """Yield the `keys` that `store` lacks, in order, by bisection: k log2(n) queries for k of n."""
    if not keys or store.check([*keys]):
        return
    if len(keys) == 1:
        yield keys[0]
        return
    half = len(keys) // 2
    yield from missing_keys(store, keys[:half])
    yield from missing_keys(store, keys[half:])


def _round_name(number: int) -> str:
    return f"round{number}"


def _arrived_key(rank: int) -> str:
    return f"arrived/{rank}"


def _acknowledged_key(rank: int) -> str:
    return f"acknowledged/{rank}"


def _how_to_start(world: World) -> str:
    return f"start it with MASTER_ADDR={world.master_addr} and MASTER_PORT={world.master_port}, as the others were"


def _resolve_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = f"cannot be resolved on {socket.gethostname()}: {error.strerror or error}"
        fix = "set it to the name or address of rank 0's machine"
        raise _reported_error(f"MASTER_ADDR: {host!r} {reason} ({fix})") from None


def _wait_for_host(world: World, timeout_s: float, print_line: Print) -> None:
    """Wait until the store accepts connections: rank 0 may start later than this rank."""
    host, port = world.master_addr, world.master_port
    deadline, notice = time.monotonic() + timeout_s, time.monotonic() + NOTICE_S
    while True:
        reason = _connection_error(host, port)
        if not reason:
            return
        if time.monotonic() > deadline:
            raise _reported_error(_describe_store_error(world, reason))
        if time.monotonic() > notice:
            notice = float("inf")
            print_line(f"waiting for rank 0: {_describe_store_error(world, reason)}")
        time.sleep(0.1)


def _reported_error(message: str) -> WorldError:
    """Return an error that every rank reports: without a store they cannot agree on one."""
    error = WorldError(message)
    error.is_claimed = True
    return error


def _connection_error(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _describe_store_error(world: World, error: str) -> str:
    if "EADDRINUSE" in error or "in use" in error:
        return f"MASTER_PORT: {world.master_port} is in use on {socket.gethostname()} (set MASTER_PORT to a free port)"
    address = f"{world.master_addr}:{world.master_port}"
    return f"MASTER_ADDR: rank {world.rank} cannot reach rank 0 at {address} (check MASTER_ADDR and MASTER_PORT)"
