"""Heartbeats: a thread of each rank publishes its step and stage in the store and reads the others'.

Traffic per rank does not grow with the number of ranks: each rank reads rank 0's heartbeat, rank 0 reads all. If the
store does not answer, only this thread waits. `blame` decides who is at fault, `watchdog` ends a rank that hangs.
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
from typing import Final, Protocol, TypeVar, final

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.world import World
from paceline.parallel.blame import Condition, RankStatus, State
from paceline.parallel.rendezvous import missing_keys

T = TypeVar("T")
ReadProgress = Callable[[], tuple[int, str]]
"""Returns the steps done and the name of the stage."""
FindStackFile = Callable[[int], str]
"""Returns the file with a rank's stacks, or ""."""
INTERVAL_S: Final = 0.5
_RANKS_PER_INTERVAL: Final = 128  # rank 0 reads this many in milliseconds; with more ranks the interval grows
_SILENT_INTERVALS: Final = 2.4
_MISSED_INTERVALS: Final = 4  # shortest silence that counts, for timeouts shorter than a round of all ranks
_POLL_S: Final = 0.5  # longest pause between two calls of `has_silent_rank`
_ANSWER_S: Final = 1.0
_SETTLING_S: Final = 0.1  # interval until the first heartbeat of every rank that is read
_FAILURES, _REPORTED, _STOP = "failures", "explained", "stop"


class StopRequests(Protocol):
    """A request to stop this process, from a signal or from another rank."""

    @property
    def requested(self) -> str:
        """The name of the signal, or ""."""
        ...

    def request(self, name: str) -> None:
        """Record a request that another rank received."""
        ...


class NoStopRequests:
    """Never requested to stop."""

    requested = ""

    def request(self, name: str) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class HeartbeatRecord:
    """A heartbeat as published in the store.

    `machine` and `pid` identify the process, `wall_s` is `time.time()`, and `unheard_s` is the longest silence in
    seconds of any rank that this one reads.
    """

    step: int
    stage: str
    state: State
    still_s: float
    at: str
    count: int
    wall_s: float
    pid: int
    machine: str
    unheard_s: float = 0.0

    def to_status(self, rank: int, condition: Condition) -> RankStatus:
        """Return the heartbeat as another rank's status; clocks of two machines may differ a little."""
        silent_s = max(0.0, time.time() - self.wall_s)
        still_s = self.still_s if self.state == "stuck" else self.still_s + silent_s
        return RankStatus(rank, self.step, self.stage, self.state, still_s, self.at, silent_s, condition)


def progress_at_start() -> tuple[int, str]:
    """Return the progress of a rank before training."""
    return 0, "start"


def no_stack_file(rank: int) -> str:
    """Return "": no rank has written its stacks."""
    return ""


@final
class NoHeartbeats:
    """Heartbeats of a single rank, which no other reads."""

    has_failed = False

    def __init__(self) -> None:
        self.stacks_of: FindStackFile = no_stack_file
        self._status = RankStatus(0)
        self._read_progress: ReadProgress = progress_at_start

    def watch(self, where: ReadProgress, requests: StopRequests, stacks_of: FindStackFile) -> None:
        """Set the sources of progress and stack files."""
        self._read_progress, self.stacks_of = where, stacks_of

    def publish(self, state: State, still_s: float | None = None, at: str = "") -> None:
        """Record the status."""
        self._status = RankStatus(0, *self._read_progress(), state, still_s or 0.0, at)

    def statuses(self, *, waited: bool) -> list[RankStatus]:
        """Return this rank's last status."""
        return [self._status]

    def has_silent_rank(self, timeout_s: float) -> bool:
        """Return False."""
        return False

    def claim_report(self, *, is_own: bool) -> bool:
        """Return True: no other rank can report a failure."""
        return True

    def linger(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class StoreHeartbeats:
    """Heartbeats of several ranks; `store` must be a handle of its own, as one thread at a time can use it."""

    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = store
        self._read_progress: ReadProgress = progress_at_start
        self._requests: StopRequests = NoStopRequests()
        self.stacks_of: FindStackFile = no_stack_file
        self._mine = HeartbeatRecord(*progress_at_start(), "runs", 0.0, "", 0, time.time(), os.getpid(), machine_id())
        self._seen: dict[int, HeartbeatRecord] = {}
        self._interval_s = INTERVAL_S * max(1.0, world.world_size / _RANKS_PER_INTERVAL)
        self._silences = defaultdict[int, StallTimer](partial(StallTimer, self._interval_s))
        # Rounds of the thread, polled by the main thread: the thread itself may block in a call of the store.
        self._unanswered = StallTimer(_POLL_S)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._ends = False
        self._reads_all = world.is_main
        self._lock = threading.Lock()  # guards `_mine`, which two threads change
        self._rounds = 0
        self._absent: set[int] = set()
        self._is_gone = False
        self._call_start_s = 0.0  # start of the round in progress, 0.0 between rounds
        self.has_failed = False
        """Whether another rank failed first and reports the failure."""
        self._speaks = False
        self._stop_forwarded = False
        self._thread = threading.Thread(target=self._run, name="paceline-beats", daemon=True)
        self._thread.start()

    def watch(self, where: ReadProgress, requests: StopRequests, stacks_of: FindStackFile) -> None:
        """Read progress from `where` from now on, and forward stop requests to and from all ranks."""
        self._read_progress, self._requests, self.stacks_of = where, requests, stacks_of

    def publish(self, state: State, still_s: float | None = None, at: str = "") -> None:
        """Publish `state`, at once if it has changed; `still_s` is the seconds without progress, None keeps the last
        value."""
        step, stage = self._read_progress()
        with self._lock:
            is_news = state != self._mine.state
            if is_news and step == self._mine.step:
                stage = self._mine.stage  # an error has already left the stage
            still_s = self._mine.still_s if still_s is None else still_s
            self._mine = replace(self._mine, step=step, stage=stage, state=state, still_s=still_s, at=at)
        if is_news:
            self._wake.set()

    def statuses(self, *, waited: bool) -> list[RankStatus]:
        """Return the current status of all ranks, this one included. Takes about 2.4 intervals, less if a process is
        dead."""
        self._reads_all = True
        self._refresh()
        before = {rank: beat.count for rank, beat in self._seen.items()}
        deadline = time.monotonic() + _SILENT_INTERVALS * self._interval_s
        while time.monotonic() < deadline:
            if not waited and any(self._is_lost(rank) for rank in range(self._world.world_size)):
                break
            self._refresh()
        else:
            return self._read_all(before)
        return self._read_all({})

    def has_silent_rank(self, timeout_s: float) -> bool:
        """Return whether any rank has sent no heartbeat for `timeout_s` seconds, from what this rank has read. Poll it
        while waiting for other ranks."""
        main = self._seen.get(0)
        unanswered_s = self._unanswered.update(self._rounds, time.monotonic())
        # Rank 0 publishes its longest silence of any rank; each rank sees whether rank 0 and the store answer. A rank
        # whose main thread hangs still sends heartbeats, unless that thread keeps the GIL.
        unheard_s = max(unanswered_s, self._mine.unheard_s, main.unheard_s if main else 0.0)
        return unheard_s >= max(timeout_s, _MISSED_INTERVALS * self._interval_s)

    def _read_all(self, before: Mapping[int, int]) -> list[RankStatus]:
        sights = [self._status_of(rank, before) for rank in range(self._world.world_size)]
        self._absent = {sight.rank for sight in sights if sight.condition != "here"}
        return sights

    def claim_report(self, *, is_own: bool) -> bool:
        """Return whether this rank reports the failure: the first that failed does; `is_own` says that the error is not
        a lost peer."""

        def claim() -> bool:
            self._speaks = self._store.add(_FAILURES, 1) == 1
            self._store.set(f"heard/{self._world.rank}", "")
            self.has_failed = not self._speaks
            return self._speaks

        answer = self._run_with_timeout(claim)
        # The store is gone with rank 0, or cut off. A rank still reports an error of its own. The loss of rank 0 is
        # reported by rank 1, and by the first rank of each node under torchrun, where each agent has a terminal of its
        # own.
        if answer is None:
            is_first = self._world.launcher == "torchrun" and self._world.is_node_main
            self._speaks = not self.has_failed and (is_own or self._world.rank <= 1 or is_first)
        return self._speaks

    def linger(self) -> None:
        """Wait briefly, if this rank hosts the store, until the other ranks have read from it what they need."""
        if self._speaks:
            self._run_with_timeout(lambda: self._store.set(_REPORTED, ""))
        if not self._world.is_main or self._world.agent_hosts_store:
            return
        alive = [rank for rank, beat in self._seen.items() if self._process(beat) == "here"]
        awaited = [f"heard/{rank}" for rank in alive if rank not in self._absent and rank != self._world.rank]
        deadline = time.monotonic() + 3 * self._interval_s
        while (
            time.monotonic() < deadline
            and self._run_with_timeout(lambda: self._store.check([_REPORTED, *awaited])) is False
        ):
            time.sleep(0.02)

    def close(self) -> None:
        """Publish a last heartbeat, and stop the thread."""
        self._ends = True
        self._wake.set()
        self._thread.join(self._silence_limit_s())

    def _run(self) -> None:
        try:
            while True:
                self._call_start_s = time.monotonic()
                ends = self._ends
                self._write_heartbeat()
                while not self._jobs.empty():
                    self._jobs.get()()
                self._call_start_s = 0.0
                self._rounds += 1
                if ends:
                    return
                self._wake.wait(self._interval_s if self._has_heard_all else min(_SETTLING_S, self._interval_s))
                self._wake.clear()
        except RuntimeError:
            self._is_gone = True  # the store, and with it every heartbeat

    def _write_heartbeat(self) -> None:
        rank = self._world.rank
        step, stage = self._read_progress()
        with self._lock:
            mine = replace(self._mine, count=self._mine.count + 1, wall_s=time.time())
            if mine.state == "runs":
                mine = replace(mine, step=step, stage=stage)
            self._mine = mine
        self._store.set(f"beat/{rank}", json.dumps(asdict(mine)))
        self._read(self._ranks_to_read)
        unheard_s = self._longest_silence_s()
        with self._lock:
            self._mine = replace(self._mine, unheard_s=unheard_s)
        self._pass_requests_on()
        if not self._speaks and not self.has_failed and self._store.check([_FAILURES]):
            self._store.set(f"heard/{rank}", "")
            self.has_failed = True

    @property
    def _ranks_to_read(self) -> "range | tuple[int, ...]":
        return range(self._world.world_size) if self._reads_all else (0,)

    @property
    def _has_heard_all(self) -> bool:
        """Whether the process of each rank is known; a rank that freezes earlier cannot be recognised as stopped."""
        return all(rank in self._seen for rank in self._ranks_to_read)

    def _read(self, ranks: "range | tuple[int, ...]") -> None:
        keys = {rank: f"beat/{rank}" for rank in ranks}
        silent = set(missing_keys(self._store, [key for rank, key in keys.items() if rank not in self._seen]))
        known = [rank for rank, key in keys.items() if key not in silent]
        texts = self._store.multi_get([keys[rank] for rank in known]) if known else []
        for rank, text in zip(known, texts, strict=True):
            self._seen[rank] = HeartbeatRecord(**json.loads(text))

    def _longest_silence_s(self) -> float:
        """Return the longest silence in seconds of the ranks that are read, apart from those that reported their
        end."""
        now_s, longest_s = time.monotonic(), 0.0
        for rank in set(self._ranks_to_read) - {self._world.rank}:
            beat = self._seen.get(rank)
            if beat is None or beat.state == "runs":
                longest_s = max(longest_s, self._silences[rank].update(beat.count if beat else 0, now_s))
        return longest_s

    def _pass_requests_on(self) -> None:
        if self._stop_forwarded:
            return
        if self._requests.requested:
            self._store.set(_STOP, self._requests.requested)
        elif self._store.check([_STOP]):
            self._requests.request(self._store.get(_STOP).decode())
        else:
            return
        self._stop_forwarded = True

    def _run_with_timeout(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns in the thread that owns the store, or None if the store does not answer."""
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._jobs.put(lambda: answers.put(work()))
        self._wake.set()
        deadline = time.monotonic() + self._silence_limit_s()
        while answers.empty() and not self._is_gone and time.monotonic() < deadline:
            time.sleep(0.01)
        return None if answers.empty() else answers.get()

    def _refresh(self) -> None:
        """Wait for a round of heartbeats that begins after this call."""
        rounds, deadline = self._rounds, time.monotonic() + self._silence_limit_s()
        self._wake.set()
        while self._rounds < rounds + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            self._wake.set()
        time.sleep(0.02)

    def _silence_limit_s(self) -> float:
        """Return how many seconds to wait for the store: 0 if its answer is overdue already."""
        start_s = self._call_start_s
        if self._is_gone:
            return 0.0
        return max(0.0, _ANSWER_S - (time.monotonic() - start_s)) if start_s else _ANSWER_S

    def _is_lost(self, rank: int) -> bool:
        beat = self._seen.get(rank)
        return rank != self._world.rank and beat is not None and (beat.state == "left" or self._process(beat) == "dead")

    def _process(self, beat: HeartbeatRecord) -> Condition:
        if beat.state != "runs":  # it reported its end, so the process may be gone
            return "here"
        return process_condition(beat.pid) if beat.machine and beat.machine == self._mine.machine else "here"

    def _status_of(self, rank: int, before: Mapping[int, int]) -> RankStatus:
        """Return the status of `rank`, which is silent if its count is still the one in `before`."""
        if rank == self._world.rank:
            return self._mine.to_status(rank, "here")
        is_hosting = rank == 0 and (not self._world.agent_hosts_store or self._world.num_nodes > 1)
        is_cut_off = self._silence_limit_s() == 0.0
        beat = self._seen.get(rank)
        if beat is None:
            is_silent = is_hosting if is_cut_off else bool(before)
            return RankStatus(rank, silent_s=None, condition="silent" if is_silent else "here")
        condition = self._process(beat)
        is_silent = is_hosting if is_cut_off else before.get(rank) == beat.count
        if condition == "here" and is_silent and beat.state == "runs":
            condition = "silent"
        return replace(beat.to_status(rank, condition), is_elsewhere=beat.machine != self._mine.machine)


Heartbeats = NoHeartbeats | StoreHeartbeats


@final
@dataclass
class StallTimer:
    """Measure for how many seconds a counter polled about every `interval_s` seconds has not changed."""

    interval_s: float
    lasted_s: float = 0.0
    _count: int = -1
    _looked_s: float = 0.0

    def update(self, count: int, now_s: float) -> float:
        """Record `count` at `now_s`; return for how many seconds it has not changed."""
        # No poll counts for more than two intervals: a late poll means that this process was suspended, and what it
        # watches may have been suspended with it.
        passed_s = min(now_s - self._looked_s, 2 * self.interval_s)
        self.lasted_s = self.lasted_s + passed_s if count == self._count else 0.0
        self._count, self._looked_s = count, now_s
        return self.lasted_s


def process_condition(pid: int) -> Condition:
    """Return the condition of process `pid` on this machine, from Linux's `/proc`."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "here")  # type: ignore[return-value]


def machine_id() -> str:
    """Return an identifier shared by processes that see one another in `/proc`; "" without Linux."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
