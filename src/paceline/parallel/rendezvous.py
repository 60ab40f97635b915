"""The store that the ranks of a run meet at, and the wait until all have come. What fails here is named by variable."""

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
"""A wait that lasts longer is said on stderr, for it may be a mistake, and may be a node that is slow to start."""
_POLL_S: Final = 0.5
"""How often a rank that waits for rank 0 looks whether another meeting has been called."""
_EXTRA_WAIT_S: Final = 5.0
"""How much longer than rank 0 the others wait for its word."""
_ACKNOWLEDGE_S: Final = 2.0
"""How long a rank 0 that gives up waits until the others have its word, as the store that has it may go with it."""
_FILES: Final = 64
_FILES_PER_RANK: Final = 4
"""Connections: of gloo to each rank, and of each rank to the store where rank 0 hosts it, with some to spare."""
_ROUNDS, _MISSING = "paceline/meetings", "missing"

Print = Callable[[str], None]


def on_stderr(message: str) -> None:
    """Print one line to stderr."""
    print(message, file=sys.stderr, flush=True)


def open_store(world: World, timeout: timedelta) -> TCPStore:
    """Return the key-value store of the run, hosted by rank 0, or by torchrun's agent where it says so.

    Raise `WorldError` for a host that cannot be resolved or reached, and for a port that is taken.
    """
    _allow_connections(world.world_size)
    is_master = world.is_main and not world.agent_hosts_store
    _resolve_host(world.master_addr)  # rank 0 too, which would try to reach itself for as long as it may
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
        raise WorldError(_describe_store_error(world, str(error))) from None


def _allow_connections(world_size: int) -> None:
    """Raise the soft limit of open files to what connections between all ranks take, where the hard limit has room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_RANK * world_size
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def wait_for_all_ranks(world: World, store: Store, timeout: timedelta, print_line: Print = on_stderr) -> str:
    """Wait until all ranks have come to `store`; return what the keys of this meeting are to begin with.

    The store of torchrun's agent outlives the ranks, and has what those left in it that were started before. There is
    no number of starts that all ranks know, for the agent of each host counts for itself
    (https://github.com/pytorch/pytorch/issues/108158); so rank 0 calls a meeting, and the others come to the newest.
    Raise `WorldError` on all that have come, naming those that have not.
    """
    if world.is_main:
        meeting = _round_name(store.add(_ROUNDS, 1))
        missing = _host_round(world, PrefixStore(meeting, store), timeout, print_line)
    else:
        meeting, missing = _join_round(world, store, timeout.total_seconds() + _EXTRA_WAIT_S)
    if missing:
        seconds = f"{timeout.total_seconds():g}s"
        raise WorldError(
            f"WORLD_SIZE: {world.world_size}, but {missing} did not come within {seconds} ({_how_to_start(world)})"
        )
    return meeting


def _host_round(world: World, store: Store, timeout: timedelta, print_line: Print) -> str:
    """Wait until all have come to the meeting that keeps its keys in `store`; return, and tell them, who is missing."""
    store.set(_arrived_key(world.rank), "")
    with contextlib.suppress(dist.DistStoreError):  # time ran out; who is missing is looked up below
        _wait_for_all(world, store, timeout, print_line)
    missing = _describe_missing(world, store)
    store.set(_MISSING, missing)
    if missing:
        gone = {*missing_keys(store, [_arrived_key(rank) for rank in range(world.world_size)])}
        told = [_acknowledged_key(rank) for rank in range(1, world.world_size) if _arrived_key(rank) not in gone]
        with contextlib.suppress(dist.DistStoreError):  # one that came has ended meanwhile
            if told:
                store.wait(told, timedelta(seconds=_ACKNOWLEDGE_S))
    return missing


def _join_round(world: World, store: Store, timeout_s: float) -> tuple[str, str]:
    """Come to the newest meeting; return its name, and who rank 0 says is missing from it.

    One that is over, or that a rank of this number has come to before, was a meeting of ranks that are no more. Raise
    `WorldError` when rank 0 does not say.
    """
    number, is_first = 0, False
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(RuntimeError):  # the store went with rank 0
        while time.monotonic() < deadline:
            newest = store.add(_ROUNDS, 0)
            meeting = PrefixStore(_round_name(newest), store)
            if newest > number:
                number, is_first = (
                    newest,
                    not meeting.check([_MISSING]) and meeting.add(_arrived_key(world.rank), 1) == 1,
                )
            if not is_first:
                time.sleep(_POLL_S / 10)
                continue
            with contextlib.suppress(dist.DistStoreError):
                meeting.wait([_MISSING], timedelta(seconds=_POLL_S))
                missing = meeting.get(_MISSING).decode()
                if missing:
                    meeting.set(_acknowledged_key(world.rank), "")
                return _round_name(number), missing
    place = f"rank {world.rank} of {world.world_size}"
    raise _reported_error(
        f"MASTER_ADDR: {place} met no rank 0 at {world.master_addr}, or lost it ({_how_to_start(world)})"
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
    """Return the ranks that have not come, in words, or nothing."""
    keys = [_arrived_key(rank) for rank in range(world.world_size)]
    missing = [key.rpartition("/")[2] for key in islice(missing_keys(store, keys), 9)]
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    return f"{'rank' if len(missing) == 1 else 'ranks'} {shown}" if missing else ""


def missing_keys(store: Store, keys: Sequence[str]) -> Iterator[str]:
    """Yield those of `keys` that `store` does not have, in order. One question is for many: k of n take k log2(n)."""
    if not keys or store.check([*keys]):
        return
    if len(keys) == 1:
        yield keys[0]
        return
    half = len(keys) // 2
    yield from missing_keys(store, keys[:half])
    yield from missing_keys(store, keys[half:])


def _round_name(meeting: int) -> str:
    return f"meeting{meeting}"


def _arrived_key(rank: int) -> str:
    return f"here/{rank}"


def _acknowledged_key(rank: int) -> str:
    return f"told/{rank}"


def _how_to_start(world: World) -> str:
    return f"start it with MASTER_ADDR={world.master_addr} and MASTER_PORT={world.master_port}, as the others were"


def _resolve_host(host: str) -> None:
    """Raise `WorldError` for a host that has no address here."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = f"cannot be resolved on {socket.gethostname()}: {error.strerror or error}"
        fix = "set it to the name or address of rank 0's machine"
        raise _reported_error(f"MASTER_ADDR: {host!r} {reason} ({fix})") from None


def _wait_for_host(world: World, timeout_s: float, print_line: Print) -> None:
    """Wait until something listens where rank 0 should, which may start later than this rank."""
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
    """Return an error that this rank alone can tell of."""
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
    place = f"{world.master_addr}:{world.master_port}"
    return f"MASTER_ADDR: rank {world.rank} cannot reach rank 0 at {place} (check MASTER_ADDR and MASTER_PORT)"
