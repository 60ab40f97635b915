"""Start the ranks of this machine as processes, forward signals to them, and report how they ended. Torch-free."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from paceline.core.errors import WorldError
from paceline.core.process import STOP_SIGNALS, die_with_parent_command
from paceline.core.world import World
from paceline.parallel.environ import rank_environ

PREEMPTED = 75
"""Exit code of a rank that was preempted and saved a checkpoint: EX_TEMPFAIL of sysexits.h, restart it."""
INTERRUPTED = 128 + signal.SIGINT

_POLL_S = 0.05
_GRACE_S = 5.0  # for the other ranks to end by themselves after one has failed
_BUFFER_SIZE = "2000"  # collectives per rank: some hundred steps, in less than a megabyte
_HINTS: Final[Mapping[int, str]] = {
    signal.SIGSEGV: " (a crash of native code; on a CPU, try model.memory_format=contiguous)",
    signal.SIGABRT: " (a crash of native code; on a CPU, try model.memory_format=contiguous)",
    signal.SIGBUS: " (a mapped file was cut short, or shared memory is full: see df /dev/shm)",
}
"""Fixes for signals that a rank has raised itself."""

Processes = list["subprocess.Popen[bytes]"]
Streams = tuple[int | None, int | None]
"""Descriptors for stdout and stderr; None is this process's own."""
RankStreams = Callable[[int], Streams]


def inherit_streams(rank: int) -> Streams:
    """Let `rank` print where this process does."""
    return None, None


@dataclass(frozen=True)
class LaunchResult:
    """The run's exit code, and a sentence if a rank was killed and could not report why.

    `was_lost`: a rank died or failed, neither by a request to stop nor because of its settings; a restart may help.
    """

    code: int
    sentence: str = ""
    was_lost: bool = False


def launch(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    *,
    port: int = 0,
    grace_s: float = 60.0,
    attempt: int = 0,
    streams: RankStreams = inherit_streams,
) -> LaunchResult:
    """Run `command` as `ranks` processes that read their rank from the environment; return how they ended.

    Port 0 lets the system choose. Stop signals are forwarded; `grace_s` seconds later, or at a second SIGINT, remaining
    ranks are killed. `attempt` counts earlier starts, `streams` are stdout and stderr by rank. Raise `WorldError` if
    `port` is taken.
    """
    processes: Processes = []
    with _listen(port) as listener, _recording_signals() as signals:
        try:
            for rank in range(ranks):
                # No rank can have trained yet, so a signal now ends all that were started.
                if signals.pending:
                    return _stopped_before_start(signals.first, rank, ranks)
                processes.append(_start(command, rank, ranks, listener, environ, attempt, streams(rank)))
            # Rank 0 inherited the open socket, so that no other program takes the port meanwhile. Closed in this
            # process: once rank 0 is gone, connections must be refused.
            listener.close()
            return _supervise(processes, signals, grace_s)
        finally:
            _kill_all(processes)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Connections of killed ranks stay in TIME_WAIT on a port that the user has chosen.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise WorldError(f"--port: {port} cannot be used: {error.strerror} (choose another, or leave it out)") from None
    listener.listen(1024)
    return listener


def _start(
    command: Sequence[str],
    rank: int,
    ranks: int,
    listener: socket.socket,
    environ: Mapping[str, str],
    attempt: int,
    streams: Streams,
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
        attempt=attempt,
    )
    return subprocess.Popen(
        die_with_parent_command(command),
        env=rank_environ(environ, world),
        pass_fds=(listener.fileno(),) if is_main else (),
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        start_new_session=True,  # a Ctrl-C reaches the ranks once, through us
    )


@dataclass
class _Signals:
    """The first stop signal, the number of SIGINTs, and the signals not yet forwarded."""

    first: int = 0
    interrupts: int = 0
    pending: list[int] = field(default_factory=list)

    def record(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.interrupts += number == signal.SIGINT
        self.pending.append(number)

    def forward(self, processes: Processes) -> None:
        # SIGINT is forwarded as SIGTERM: a rank exits at once at its second SIGINT, and one that is sent to all
        # processes reaches it both directly and through this launcher.
        while self.pending:
            number = self.pending.pop(0)
            for process in processes:
                process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)


@contextlib.contextmanager
def _recording_signals() -> Iterator[_Signals]:
    """Record stop signals, except those ignored from the start, such as SIGHUP under `nohup`.

    Only the main thread may record any.
    """
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    recorded = [(number, handler) for number, handler in before if handler not in (signal.SIG_IGN, None)]
    for number, _ in recorded:
        signal.signal(number, signals.record)
    try:
        yield signals
    finally:
        for number, handler in recorded:
            signal.signal(number, handler)


def _supervise(processes: Processes, signals: _Signals, grace_s: float) -> LaunchResult:
    """Wait until all ranks have ended, or a time limit has passed."""
    limits: dict[str, float] = {}
    while None in (codes := [process.poll() for process in processes]):
        if signals.pending:
            limits.setdefault("signal", time.monotonic() + grace_s)
            signals.forward(processes)
        if signals.interrupts > 1:
            return LaunchResult(INTERRUPTED)
        if PREEMPTED in codes:  # rank 0 may still be writing the checkpoint
            limits.setdefault("preempted", time.monotonic() + grace_s)
        if set(codes) - {None, 0, PREEMPTED}:
            limits.setdefault("failed", time.monotonic() + _GRACE_S)
        if time.monotonic() > min(limits.values(), default=math.inf):
            break
        time.sleep(_POLL_S)
    return _launch_result(codes, signals.first, grace_s)


def _stopped_before_start(first_signal: int, num_started: int, ranks: int) -> LaunchResult:
    if first_signal == signal.SIGINT:
        return LaunchResult(INTERRUPTED)
    name = signal.Signals(first_signal).name
    return LaunchResult(
        128 + first_signal, f"{name} came when {num_started} of {ranks} ranks had been started, so all were ended"
    )


def _launch_result(codes: Sequence[int | None], first_signal: int, grace_s: float) -> LaunchResult:
    """Return the result for the exit codes, None for a rank that still runs; `first_signal` is 0 without any."""
    # A rank that reported its error has a documented code above 1; 1 is also the code of its peers, which lost it. If
    # rank 0 has ended well, the result is written and nothing is lost.
    was_lost = not first_signal and codes[0] != 0
    explained = [code for code in codes if code is not None and code > 1 and code != PREEMPTED]
    if explained:
        return LaunchResult(explained[0])
    killed = [(rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        rank, number = killed[0]
        if first_signal == signal.SIGINT:
            return LaunchResult(INTERRUPTED)
        name = signal.Signals(number).name
        sentence = f"rank {rank} of {len(codes)} was killed by {name}, so all ranks were ended{_HINTS.get(number, '')}"
        return LaunchResult(128 + number, sentence, was_lost)
    if 1 in codes:
        return LaunchResult(1, "", was_lost)
    if None in codes:
        rank = codes.index(None)
        after = signal.Signals(first_signal).name if first_signal else "its peers had stopped"
        sentence = f"rank {rank} of {len(codes)} had not stopped {grace_s:g} s after {after} and was killed"
        return LaunchResult(128 + signal.SIGKILL, f"{sentence} (raise checkpoint.grace)")
    return LaunchResult(PREEMPTED if PREEMPTED in codes else 0)


def _kill_all(processes: Processes) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def flight_recorder_environ(run: Path) -> dict[str, str]:
    """Return variables that make NCCL write `run`/nccl.rankN when a collective times out."""
    # NCCL reads them when the process group is created. Both torch 2.11 and 2.15 know these names; the older names
    # with NCCL in them make the latter warn.
    return {"TORCH_FR_BUFFER_SIZE": _BUFFER_SIZE, "TORCH_FR_DUMP_TEMP_FILE": str(run / "nccl.rank")}
