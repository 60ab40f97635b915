"""Watch the main thread of a rank; if it makes no progress, name the rank to blame and end the process."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO, final

from paceline.core.files import open_text_to_write
from paceline.core.interrupts import Interrupts
from paceline.core.stages import FINISH
from paceline.parallel.blame import RankStatus, blame_rank
from paceline.parallel.heartbeat import INTERVAL_S, ReadProgress
from paceline.parallel.process_group import RankStore
from paceline.recipe.schema.train import Parallel

_MARGIN_S: Final = 1.0  # faulthandler's timer is later by this: it is for ranks whose watchdog cannot run
# For a rank to end by itself after another one has failed; in a collective it may wait forever.
_EXIT_GRACE_S: Final = 3.0
# Stages without a known duration, in which use of CPU time counts as progress. A thread that polls once per second uses
# less than this share.
_LONG_STAGES: Final = frozenset({"start", "checkpoint", FINISH})
_MIN_CPU_SHARE: Final = 1e-3

End = Callable[[str], None]


def end_process(message: str) -> None:
    """Print `message`, if any, as an error, and exit at once with code 1."""
    # `os._exit`: the main thread may hold a lock, or block in a collective that an ordinary exit would wait for.
    if message:
        print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


@final
class Watchdog:
    """Watch the thread that creates it, whose steps and stage `read_progress` returns.

    After `timeout_s` seconds in one stage of one step the process exits with code 1, and writes its threads' stacks to
    `stacks` (`stacks.rank0.txt`). The first rank to do so names the rank to blame. Stop `requests` are forwarded
    between ranks.
    """

    def __init__(
        self,
        store: RankStore,
        read_progress: ReadProgress,
        timeout_s: float,
        stacks: Path,
        requests: Interrupts,
        *,
        end: End = end_process,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._store, self._read_progress = store, read_progress
        self._timeout_s, self._stacks, self._end = timeout_s, stacks, end
        self._interval_s = min(interval_s, timeout_s / 4)
        self._watched = threading.current_thread()
        self._cpu_clock = _cpu_clock(self._watched)
        self._is_closing = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends this rank
        self._file: TextIO | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-heartbeat", daemon=True)
        if store.heartbeats:
            store.heartbeats.watch(read_progress, requests, self._stacks_of)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching. If the watchdog is already ending the process, wait for that."""
        if not self._ending.acquire(blocking=False):
            self._thread.join()
        self._is_closing.set()
        self._thread.join()
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            with contextlib.suppress(OSError):  # the run directory may have been removed
                if not self._stacks.stat().st_size:
                    self._stacks.unlink()

    def _run(self) -> None:
        progress, first_step = self._read_progress(), -1
        stalled_s = failed_s = cpu_s = 0.0
        polled_s = time.monotonic()
        while not self._is_closing.wait(self._interval_s):
            # A suspended process makes no progress either, so no poll counts for more than two intervals.
            passed_s = min(time.monotonic() - polled_s, 2 * self._interval_s)
            polled_s = time.monotonic()
            before, progress, cpu_before_s, cpu_s = progress, self._read_progress(), cpu_s, self._cpu_s()
            if first_step < 0 and progress[1] != "start":
                first_step = progress[0]
            is_long = progress[1] in _LONG_STAGES or progress[0] == first_step  # a model is compiled in the first step
            has_moved = progress != before or (is_long and cpu_s - cpu_before_s > _MIN_CPU_SHARE * passed_s)
            stalled_s = 0.0 if has_moved else stalled_s + passed_s
            self._arm_faulthandler(progress[1])
            if self._store.heartbeats:
                self._store.heartbeats.publish("running", stalled_s)
                failed_s += passed_s if self._store.heartbeats.has_failed else 0.0
            if failed_s > _EXIT_GRACE_S and self._ending.acquire(blocking=False):
                return self._end("")
            if stalled_s >= self._timeout_s and self._ending.acquire(blocking=False):
                return self._give_up(stalled_s)
        return None

    def _give_up(self, stalled_s: float) -> None:
        """Report the rank to blame, unless another rank does, and end the process."""
        heartbeats, line, at = self._store.heartbeats, "", self._watched_line()
        if heartbeats is None:
            self._dump()
            alone = RankStatus(0, *self._read_progress(), "stuck", stalled_s, at)
            return self._end(blame_rank([alone], 0, timed_out=True, stacks=self._stacks_of))
        heartbeats.publish("stuck", stalled_s, at)
        self._dump()
        if heartbeats.claim_report(is_own=False):
            line = blame_rank(
                heartbeats.statuses(timed_out=True), self._store.world.rank, timed_out=True, stacks=self._stacks_of
            )
        heartbeats.linger()
        return self._end(line)

    def _watched_line(self) -> str:
        frame = sys._current_frames().get(self._watched.ident or 0)
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""

    def _dump(self) -> None:
        with contextlib.suppress(OSError):  # there may be no run directory yet
            if self._file is None:
                self._file = open_text_to_write(self._stacks, "w")
            faulthandler.dump_traceback(self._file, all_threads=True)

    def _arm_faulthandler(self, stage: str) -> None:
        # The watchdog cannot run while another thread holds the GIL. faulthandler's timer is C and can: it writes the
        # stacks then, and other ranks end the run. Before training there is no run directory to write to.
        if stage == "start":
            return
        if self._file is None:
            try:
                self._file = open_text_to_write(self._stacks, "w")
            except OSError:
                return
        faulthandler.dump_traceback_later(self._timeout_s + _MARGIN_S, file=self._file)

    def _stacks_of(self, rank: int) -> str:
        """Return the file with the stacks of `rank`, or "" if there is none on this machine's disk."""
        path = self._stacks.with_name(self._stacks.name.replace(f"rank{self._store.world.rank}", f"rank{rank}"))
        with contextlib.suppress(OSError):
            return str(path) if path.stat().st_size else ""
        return ""

    def _cpu_s(self) -> float:
        return time.clock_gettime(self._cpu_clock) if self._cpu_clock is not None else 0.0


def _cpu_clock(thread: threading.Thread) -> int | None:
    """Return the CPU-time clock of `thread`; None without Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return time.pthread_getcpuclockid(thread.ident or 0)


@contextlib.contextmanager
def watchdog(
    store: RankStore, section: Parallel, read_progress: ReadProgress, requests: Interrupts, stacks: Path
) -> Iterator[None]:
    """Watch the calling thread with `parallel.timeout`; do nothing under a debugger."""
    if sys.gettrace() is not None:
        yield
        return
    watching = Watchdog(store, read_progress, section.timeout.seconds, stacks, requests)
    watching.start()
    try:
        yield
    finally:
        watching.close()
