"""Be the ranks of many runs, one run after another: a program that has imported torch, and forks.

Each rank of each run is a new process with the state of one that has just started, in a hundredth of the time. A line
of JSON on stdin asks for a run: `folder` to work in, `words` after the program's name, `ranks`, those of them that are
`absent`, `environ` on top, and `said`, a folder for what the ranks print. The answer is a line of JSON: the exit code
of each rank that was there.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from paceline.core.world import World
from paceline.parallel.environ import rank_environ

LIMIT_S = 120


def main() -> None:
    import paceline.train.run  # what takes seconds, and starts no thread that a fork would lose

    print(json.dumps({"ready": paceline.train.run.__name__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(folder: str, words: list[str], ranks: int, absent: list[int], environ: dict[str, str], said: str) -> list[int]:
    """Return the exit codes of the ranks, or -9 of those that had to be killed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        pids = [
            start(rank, ranks, listener, folder, words, environ, Path(said))
            for rank in range(ranks)
            if rank not in absent
        ]
    return [end(pid, time.monotonic() + LIMIT_S) for pid in pids]


def start(
    rank: int,
    ranks: int,
    listener: socket.socket,
    folder: str,
    words: list[str],
    environ: dict[str, str],
    said: Path,
) -> int:
    """Fork a rank as the local launcher starts it; return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        place = World(
            rank=rank,
            world_size=ranks,
            local_rank=rank,
            local_world_size=ranks,
            master_port=listener.getsockname()[1],
            launcher="local",
            launcher_pid=parent,
            store_fd=listener.fileno() if rank == 0 else -1,
        )
        if rank:
            listener.close()
        os.environ.update(rank_environ(environ, place) if ranks > 1 else environ)
        os.chdir(folder)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(said / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["paceline", *words]
        code = program()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def program() -> int:
    from paceline.cli import main as paceline

    try:
        paceline()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def end(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
