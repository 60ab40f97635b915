"""Start the ranks of one machine, and end them all when one fails. Torch-free, so it costs no rank's memory."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.environ import rank_environ

_POLL_S = 0.05
_GRACE_S = 5.0


def launch(command: Sequence[str], ranks: int, environ: Mapping[str, str], *, port: int = 0) -> tuple[int, str]:
    """Run `command` as `ranks` processes that find their place in the environment.

    The rendezvous socket is opened here and handed to rank 0 open, so no other program can take its port in between;
    port 0 lets the system choose. Returns the exit code of the run, and a sentence when a rank was killed by a
    signal and so could not explain itself. Raise `WorldError` when `port` is taken.
    """
    with _listen(port) as listener:
        processes = [_start(command, rank, ranks, listener, environ) for rank in range(ranks)]
    with _forwarding(processes):
        try:
            return _supervise(processes)
        finally:
            _end(processes)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise WorldError(f"--port: {port} cannot be used: {error.strerror} (choose another, or leave it out)") from None
    listener.listen(1024)
    return listener


def _start(
    command: Sequence[str], rank: int, ranks: int, listener: socket.socket, environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    is_main = rank == 0
    world = World(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        master_port=listener.getsockname()[1],
        launcher="local",
        launcher_pid=os.getpid(),
        store_fd=listener.fileno() if is_main else -1,
    )
    return subprocess.Popen(
        list(command),
        env=rank_environ(environ, world),
        pass_fds=(listener.fileno(),) if is_main else (),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C reaches the ranks once, through us
    )


def _supervise(processes: "list[subprocess.Popen[bytes]]") -> tuple[int, str]:
    """Wait until all ranks have ended, or until a grace time after the first failure."""
    deadline = None
    while any(process.poll() is None for process in processes):
        failed = [process for process in processes if process.poll()]
        if failed and deadline is None:
            deadline = time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return _verdict([process.poll() for process in processes])


def _verdict(codes: Sequence[int | None]) -> tuple[int, str]:
    """Return the run's exit code, and a sentence when a signal ended a rank.

    A rank that explained itself leaves a documented code; 1 is also what its peers leave when they lose it.
    """
    explained = [code for code in codes if code is not None and code > 1]
    if explained:
        return explained[0], ""
    killed = [(rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        rank, number = killed[0]
        name = signal.Signals(number).name
        return 128 + number, f"rank {rank} of {len(codes)} was killed by {name}, so all ranks were ended"
    return (1, "") if any(codes) else (0, "")


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def _forwarding(processes: "list[subprocess.Popen[bytes]]") -> Iterator[None]:
    """Pass the signals that a scheduler or a terminal sends on to the ranks, who decide what to do."""

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    forwarded = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.signal(number, forward) for number in forwarded]
    try:
        yield
    finally:
        for number, handler in zip(forwarded, before, strict=True):
            signal.signal(number, handler)
