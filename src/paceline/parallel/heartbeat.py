"""Heartbeats: a thread of each rank publishes its step and stage in the store and reads the others'.

Each rank reads rank 0's heartbeat, rank 0 reads all. `blame` decides who is at fault, `watchdog` ends a
rank that hangs.
"""

import json
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, final

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.interrupts import Interrupts
from paceline.core.world import World
from paceline.parallel.blame import Condition, RankStatus, State
from paceline.parallel.rendezvous import missing_keys

T = TypeVar("T")
ReadProgress = Callable[[], tuple[int, str]]
"""Returns the number of finished steps and the name of the stage."""
FindStackFile = Callable[[int], str]
"""Returns the file with a rank's stacks, or ""."""
INTERVAL_S: Final = 0.5
_RANKS_PER_INTERVAL: Final = 128  # rank 0 reads this many in milliseconds; with more ranks the interval grows
_SILENT_INTERVALS: Final = 2.4  # a rank that misses two heartbeats is silent
_MISSED_INTERVALS: Final = 4  # shortest silence that counts, for timeouts shorter than a round of all ranks
_POLL_S: Final = 0.5  # longest pause between two calls of `has_silent_rank`
_STORE_TIMEOUT_S: Final = 1.0
_FIRST_INTERVAL_S: Final = 0.1  # interval until the first heartbeat of every rank has been read
_FAILURES, _REPORTED, _STOP = "failures", "reported", "stop"


@dataclass(frozen=True)
class HeartbeatRecord:
    """A heartbeat as published in the store; the first five fields are those of `RankStatus`.

    `machine` and `pid` identify the process, `wall_s` is `time.time()`, and `max_silence_s` is the longest silence in
    seconds of the ranks that this one reads.
    """

    step: int
    stage: str
    state: State
    stalled_s: float
    at: str
    count: int
    wall_s: float
    pid: int
    machine: str
    max_silence_s: float = 0.0

    def to_status(self, rank: int, condition: Condition) -> RankStatus:
        """Return the status of `rank` now."""
        silent_s = max(0.0, time.time() - self.wall_s)  # its clock may be ahead of this machine's
        stalled_s = self.stalled_s if self.state == "stuck" else self.stalled_s + silent_s
        return RankStatus(rank, self.step, self.stage, self.state, stalled_s, self.at, silent_s, condition)


def progress_at_start() -> tuple[int, str]:
    """Return step 0 in stage `start`."""
    return 0, "start"


def no_stack_file(rank: int) -> str:
    """Return "": no rank has written its stacks."""
    return ""


@final
class Heartbeats:
    """Heartbeats of several ranks; `store` is a handle that nothing else uses, since it serves one call at a time."""

    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = store
        self._read_progress: ReadProgress = progress_at_start
        self._requests = Interrupts()
        self.stacks_of: FindStackFile = no_stack_file
        self._own = HeartbeatRecord(*progress_at_start(), "running", 0.0, "", 0, time.time(), os.getpid(), machine_id())
        self._seen: dict[int, HeartbeatRecord] = {}
        self._interval_s = INTERVAL_S * max(1.0, world.world_size / _RANKS_PER_INTERVAL)
        self._silence_timers = defaultdict[int, StallTimer](partial(StallTimer, self._interval_s))
        # Counts the thread's rounds, polled by the main thread: the thread itself may block in a call of the store.
        self._round_timer = StallTimer(_POLL_S)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._is_closing = False
        self._reads_all = world.is_main
        self._lock = threading.Lock()  # guards `_own`, which two threads change
        self._rounds = 0
        self._absent: set[int] = set()
        self._is_store_lost = False
        self._call_start_s = 0.0  # start of the round in progress, 0.0 between rounds
        self.has_failed = False
        """Whether another rank failed first; it reports the failure."""
        self._is_reporter = False
        self._is_stop_forwarded = False
        self._thread = threading.Thread(target=self._run, name="paceline-beats", daemon=True)
        self._thread.start()

    def watch(self, read_progress: ReadProgress, requests: Interrupts, stacks_of: FindStackFile) -> None:
        """Read progress from `read_progress` from now on, and forward stop requests to and from all ranks."""
        self._read_progress, self._requests, self.stacks_of = read_progress, requests, stacks_of

    def publish(self, state: State, stalled_s: float | None = None, at: str = "") -> None:
        """Publish `state`, at once if it has changed; `stalled_s`, seconds without progress, is kept if None."""
        step, stage = self._read_progress()
        with self._lock:
            is_change = state != self._own.state
            if is_change and step == self._own.step:
                stage = self._own.stage  # the context of the stage has already exited with the error
            stalled_s = self._own.stalled_s if stalled_s is None else stalled_s
            self._own = replace(self._own, step=step, stage=stage, state=state, stalled_s=stalled_s, at=at)
        if is_change:
            self._wake.set()

    def statuses(self, *, timed_out: bool) -> list[RankStatus]:
        """Return the current status of all ranks, this one included.

        Takes about 2.4 intervals; less if the connection broke (`timed_out` is False) and a process is dead.
        """
        self._reads_all = True
        self._refresh()  # what was read before may be an interval old
        before = {rank: beat.count for rank, beat in self._seen.items()}
        deadline = time.monotonic() + _SILENT_INTERVALS * self._interval_s
        while time.monotonic() < deadline:
            if not timed_out and any(self._is_lost(rank) for rank in range(self._world.world_size)):
                break
            self._refresh()
        else:
            return self._read_all(before)
        return self._read_all({})

    def has_silent_rank(self, timeout_s: float) -> bool:
        """Return whether any rank has sent no heartbeat for `timeout_s` seconds. Poll it while waiting for others."""
        main = self._seen.get(0)
        store_silence_s = self._round_timer.update(self._rounds, time.monotonic())
        # Rank 0, which reads all, publishes the longest silence; each rank sees whether rank 0 and the store answer. A
        # rank whose main thread hangs still sends heartbeats, unless that thread holds the GIL.
        max_silence_s = max(store_silence_s, self._own.max_silence_s, main.max_silence_s if main else 0.0)
        return max_silence_s >= max(timeout_s, _MISSED_INTERVALS * self._interval_s)

    def _read_all(self, before: Mapping[int, int]) -> list[RankStatus]:
        statuses = [self._status_of(rank, before) for rank in range(self._world.world_size)]
        self._absent = {status.rank for status in statuses if status.condition != "alive"}
        return statuses

    def claim_report(self, *, is_own: bool) -> bool:
        """Return whether this rank reports the failure: the first to call this does.

        `is_own` is False for the loss of another rank.
        """

        def claim() -> bool:
            # An atomic add, so that exactly one rank gets 1.
            self._is_reporter = self._store.add(_FAILURES, 1) == 1
            self._store.set(f"notified/{self._world.rank}", "")
            self.has_failed = not self._is_reporter
            return self._is_reporter

        answer = self._run_with_timeout(claim)
        # The store died with rank 0, or is cut off. A rank still reports an error of its own. The loss of rank 0 is
        # reported by rank 1 and, under torchrun, by the first rank of each node, since each agent has its own terminal.
        if answer is None:
            is_first = self._world.launcher == "torchrun" and self._world.is_node_main
            self._is_reporter = not self.has_failed and (is_own or self._world.rank <= 1 or is_first)
        return self._is_reporter

    def linger(self) -> None:
        """Wait up to three intervals on the rank that hosts the store, until the others know of the failure."""
        if self._is_reporter:
            self._run_with_timeout(lambda: self._store.set(_REPORTED, ""))
        if not self._world.is_main or self._world.agent_hosts_store:
            return
        alive = [rank for rank, beat in self._seen.items() if self._process(beat) == "alive"]
        awaited = [f"notified/{rank}" for rank in alive if rank not in self._absent and rank != self._world.rank]
        deadline = time.monotonic() + 3 * self._interval_s
        while (
            time.monotonic() < deadline
            and self._run_with_timeout(lambda: self._store.check([_REPORTED, *awaited])) is False
        ):
            time.sleep(0.02)

    def close(self) -> None:
        """Publish a last heartbeat, and stop the thread, unless it is stuck in the store."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(self._store_timeout_left_s())

    def _run(self) -> None:
        try:
            while True:
                self._call_start_s = time.monotonic()
                is_closing = self._is_closing  # before the heartbeat: the last one has the state at `close`
                self._write_heartbeat()
                while not self._jobs.empty():
                    self._jobs.get()()
                self._call_start_s = 0.0
                self._rounds += 1
                if is_closing:
                    return
                self._wake.wait(self._interval_s if self._has_read_all else min(_FIRST_INTERVAL_S, self._interval_s))
                self._wake.clear()
        except RuntimeError:
            self._is_store_lost = True  # the store, and with it every heartbeat

    def _write_heartbeat(self) -> None:
        rank = self._world.rank
        step, stage = self._read_progress()
        with self._lock:
            own = replace(self._own, count=self._own.count + 1, wall_s=time.time())
            if own.state == "running":
                own = replace(own, step=step, stage=stage)
            self._own = own
        self._store.set(f"beat/{rank}", json.dumps(asdict(own)))
        self._read(self._ranks_to_read)
        max_silence_s = self._longest_silence_s()
        with self._lock:
            self._own = replace(self._own, max_silence_s=max_silence_s)
        self._forward_stop_request()
        if not self._is_reporter and not self.has_failed and self._store.check([_FAILURES]):
            self._store.set(f"notified/{rank}", "")
            self.has_failed = True

    @property
    def _ranks_to_read(self) -> "range | tuple[int, ...]":
        return range(self._world.world_size) if self._reads_all else (0,)

    @property
    def _has_read_all(self) -> bool:
        """Whether the process of each rank is known: without it a stopped rank is only silent."""
        return all(rank in self._seen for rank in self._ranks_to_read)

    def _read(self, ranks: "range | tuple[int, ...]") -> None:
        keys = {rank: f"beat/{rank}" for rank in ranks}
        silent = set(missing_keys(self._store, [key for rank, key in keys.items() if rank not in self._seen]))
        known = [rank for rank, key in keys.items() if key not in silent]
        texts = self._store.multi_get([keys[rank] for rank in known]) if known else []
        for rank, text in zip(known, texts, strict=True):
            self._seen[rank] = HeartbeatRecord(**json.loads(text))

    def _longest_silence_s(self) -> float:
        """Return the longest silence in seconds of the ranks that are read and have not reported their end."""
        now_s, longest_s = time.monotonic(), 0.0
        for rank in set(self._ranks_to_read) - {self._world.rank}:
            beat = self._seen.get(rank)
            if beat is None or beat.state == "running":
                longest_s = max(longest_s, self._silence_timers[rank].update(beat.count if beat else 0, now_s))
        return longest_s

    def _forward_stop_request(self) -> None:
        if self._is_stop_forwarded:
            return
        if self._requests.requested:
            self._store.set(_STOP, self._requests.requested)
        elif self._store.check([_STOP]):
            self._requests.request(self._store.get(_STOP).decode())
        else:
            return
        self._is_stop_forwarded = True

    def _run_with_timeout(self, work: Callable[[], T]) -> T | None:
        """Run `work` in the thread that owns the store; return its result, or None if the store does not answer."""
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._jobs.put(lambda: answers.put(work()))
        self._wake.set()
        deadline = time.monotonic() + self._store_timeout_left_s()
        while answers.empty() and not self._is_store_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        return None if answers.empty() else answers.get()

    def _refresh(self) -> None:
        """Wait for a round of heartbeats that begins after this call."""
        # Two rounds: the one in progress may have read its heartbeats already.
        rounds, deadline = self._rounds, time.monotonic() + self._store_timeout_left_s()
        self._wake.set()
        while self._rounds < rounds + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            self._wake.set()
        time.sleep(0.02)  # at least this far between two rounds, in which another rank can send a heartbeat

    def _store_timeout_left_s(self) -> float:
        """Return for how many more seconds to wait for the store; 0 if its answer is overdue."""
        start_s = self._call_start_s
        if self._is_store_lost:
            return 0.0
        return max(0.0, _STORE_TIMEOUT_S - (time.monotonic() - start_s)) if start_s else _STORE_TIMEOUT_S

    def _is_lost(self, rank: int) -> bool:
        beat = self._seen.get(rank)
        return (
            rank != self._world.rank and beat is not None and (beat.state == "exited" or self._process(beat) == "dead")
        )

    def _process(self, beat: HeartbeatRecord) -> Condition:
        if beat.state != "running":  # it reported its end, so the process may be gone
            return "alive"
        return process_condition(beat.pid) if beat.machine and beat.machine == self._own.machine else "alive"

    def _status_of(self, rank: int, before: Mapping[int, int]) -> RankStatus:
        """Return the status of `rank`, which is silent if its count is still the one in `before`."""
        # If the store does not answer, nothing is known of other ranks: its host, rank 0, is the silent one.
        if rank == self._world.rank:
            return self._own.to_status(rank, "alive")
        is_hosting = rank == 0 and (not self._world.agent_hosts_store or self._world.num_nodes > 1)
        is_cut_off = self._store_timeout_left_s() == 0.0
        beat = self._seen.get(rank)
        if beat is None:
            is_silent = is_hosting if is_cut_off else bool(before)
            return RankStatus(rank, silent_s=None, condition="silent" if is_silent else "alive")
        condition = self._process(beat)
        is_silent = is_hosting if is_cut_off else before.get(rank) == beat.count
        if condition == "alive" and is_silent and beat.state == "running":
            condition = "silent"
        return replace(beat.to_status(rank, condition), is_remote=beat.machine != self._own.machine)


@final
@dataclass
class StallTimer:
    """Measure for how many seconds a counter, polled every `interval_s` seconds, has not changed."""

    interval_s: float
    lasted_s: float = 0.0
    _count: int = -1
    _polled_s: float = 0.0

    def update(self, count: int, now_s: float) -> float:
        """Record `count` at `now_s`; return for how many seconds it has not changed."""
        # No poll counts for more than two intervals: after a late one this process was suspended, and what it watches
        # may have been too.
        passed_s = min(now_s - self._polled_s, 2 * self.interval_s)
        self.lasted_s = self.lasted_s + passed_s if count == self._count else 0.0
        self._count, self._polled_s = count, now_s
        return self.lasted_s


def process_condition(pid: int) -> Condition:
    """Return the condition of process `pid` on this machine, from `/proc`."""
    try:
        # The state follows the last ")": the name before it may hold parentheses.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "alive")  # type: ignore[return-value]


def machine_id() -> str:
    """Return an identifier of the processes that see one another in `/proc`; "" if there is no `/proc`."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
