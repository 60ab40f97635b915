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


@final
@dataclass
class StallTimer:
    """A count that is looked at every `interval_s` seconds or so.

    No look adds more than twice that: who looks late has been suspended, and what counts may have been with it.
    """

    interval_s: float
    lasted_s: float = 0.0
    _count: int = -1
    _looked_s: float = 0.0

    def update(self, count: int, now_s: float) -> float:
        """Return for how long it has stood at `count`, which it does at `now_s`."""
        passed_s = min(now_s - self._looked_s, 2 * self.interval_s)
        self.lasted_s = self.lasted_s + passed_s if count == self._count else 0.0
        self._count, self._looked_s = count, now_s
        return self.lasted_s


def process_condition(pid: int) -> Condition:
    """Return how process `pid` of this machine is, by Linux's table of processes."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "here")  # type: ignore[return-value]


def machine_id() -> str:
    """Return what two processes share that see one another in `/proc`, or nothing where there is no such thing."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


T = TypeVar("T")
ReadProgress = Callable[[], tuple[int, str]]
"""Returns the steps done, and the stage in words."""
FindStackFile = Callable[[int], str]
"""Returns the file in which a rank has written its stacks, or nothing."""
INTERVAL_S: Final = 0.5
_RANKS_PER_INTERVAL: Final = 128  # rank 0 reads as many in a few milliseconds; more make every beat slower
_SILENT_INTERVALS: Final = 2.4
_MISSED_INTERVALS: Final = 4  # where a timeout is shorter than it takes to hear of all ranks
_POLL_S: Final = 0.5  # how often who waits without end looks whether one is missed, or oftener
_ANSWER_S: Final = 1.0
_SETTLING_S: Final = 0.1  # until all that are listened to have spoken
_FAILURES, _REPORTED, _STOP = "failures", "explained", "stop"


class StopRequests(Protocol):
    """A request to stop, of this process or of another one."""

    @property
    def requested(self) -> str:
        """The signal's name, or nothing."""
        ...

    def request(self, name: str) -> None:
        """Note a request that another process met."""
        ...


class NoStopRequests:
    """For ranks that are never asked to stop."""

    requested = ""

    def request(self, name: str) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class HeartbeatRecord:
    """What a rank says of itself. `machine` and `pid` say where a process is looked for, `wall_s` is `time.time`.

    `unheard_s` is for how long it has not heard of the one that it hears of least, by its own clock.
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
        """Return this as another rank's sight; the clocks of two machines may differ a little."""
        silent_s = max(0.0, time.time() - self.wall_s)
        still_s = self.still_s if self.state == "stuck" else self.still_s + silent_s
        return RankStatus(rank, self.step, self.stage, self.state, still_s, self.at, silent_s, condition)


def progress_at_start() -> tuple[int, str]:
    """Return where a rank is before it trains."""
    return 0, "start"


def no_stack_file(rank: int) -> str:
    """Return nothing: no rank has written any."""
    return ""


@final
class NoHeartbeats:
    """For a run of one rank, which nobody listens to."""

    has_failed = False

    def __init__(self) -> None:
        self.stacks_of: FindStackFile = no_stack_file
        self._status = RankStatus(0)
        self._read_progress: ReadProgress = progress_at_start

    def watch(self, where: ReadProgress, requests: StopRequests, stacks_of: FindStackFile) -> None:
        """Note where to look for the rank, and for its stacks."""
        self._read_progress, self.stacks_of = where, stacks_of

    def publish(self, state: State, still_s: float | None = None, at: str = "") -> None:
        """Note it."""
        self._status = RankStatus(0, *self._read_progress(), state, still_s or 0.0, at)

    def statuses(self, *, waited: bool) -> list[RankStatus]:
        """Return this rank as it was last noted."""
        return [self._status]

    def has_silent_rank(self, timeout_s: float) -> bool:
        """Return False: there is nobody to miss."""
        return False

    def claim_report(self, *, is_own: bool) -> bool:
        """Return True: there is nobody else to explain a failure."""
        return True

    def linger(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class StoreHeartbeats:
    """The beats of a run of several ranks. `store` is a handle of its own, for one thread at a time can use it."""

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
        self._unanswered = StallTimer(
            _POLL_S
        )  # of the store; looked at by who waits, as the thread may stand in a call
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._ends = False
        self._reads_all = world.is_main
        self._lock = threading.Lock()  # for `_mine`, which two threads change
        self._rounds = 0
        self._absent: set[int] = set()
        self._is_gone = False
        self._asked_s = 0.0  # when the store was asked what it has not answered yet
        self.has_failed = False
        """Whether another rank is known to have failed first, and to speak for it."""
        self._speaks = False
        self._told_stop = False
        self._thread = threading.Thread(target=self._run, name="paceline-beats", daemon=True)
        self._thread.start()

    def watch(self, where: ReadProgress, requests: StopRequests, stacks_of: FindStackFile) -> None:
        """Say from now on where the rank is by `where`, and pass requests to stop on to and from all ranks."""
        self._read_progress, self._requests, self.stacks_of = where, requests, stacks_of

    def publish(self, state: State, still_s: float | None = None, at: str = "") -> None:
        """Say `state` of this rank from now on; at once where it is news. It then stays where it is.

        It has stood still for `still_s` seconds, or as long as was said last.
        """
        step, stage = self._read_progress()
        with self._lock:
            is_news = state != self._mine.state
            if is_news and step == self._mine.step:
                stage = self._mine.stage  # an error has left it already
            still_s = self._mine.still_s if still_s is None else still_s
            self._mine = replace(self._mine, step=step, stage=stage, state=state, still_s=still_s, at=at)
        if is_news:
            self._wake.set()

    def statuses(self, *, waited: bool) -> list[RankStatus]:
        """Return all ranks as they are now, this one too.

        It takes a little more than two beats to find out that a rank is silent; a process that is dead, or ended in
        order, is seen at once.
        """
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
        """Return whether a rank has been silent for `timeout_s`, as far as this one knows; it asks nobody.

        To be called again and again, by who waits for others without end. Rank 0 says for how long it has not heard of
        some rank, and each rank sees whether it hears of rank 0, and whether the store answers. A rank that beats is
        not missed, whatever its main thread does, unless that keeps the GIL.
        """
        main = self._seen.get(0)
        unanswered_s = self._unanswered.update(self._rounds, time.monotonic())
        unheard_s = max(unanswered_s, self._mine.unheard_s, main.unheard_s if main else 0.0)
        return unheard_s >= max(timeout_s, _MISSED_INTERVALS * self._interval_s)

    def _read_all(self, before: Mapping[int, int]) -> list[RankStatus]:
        sights = [self._status_of(rank, before) for rank in range(self._world.world_size)]
        self._absent = {sight.rank for sight in sights if sight.condition != "here"}
        return sights

    def claim_report(self, *, is_own: bool) -> bool:
        """Return whether this rank is the one to explain a failure: the first that failed.

        The others fail because they lost it. Where the store is out of reach, gone with rank 0 or cut off with its
        machine, an error of a rank's `own` is still explained by it, and the loss of rank 0 by rank 1; and by the first
        rank of each machine, where each has an agent of torchrun's and a terminal of its own.
        """

        def claim() -> bool:
            self._speaks = self._store.add(_FAILURES, 1) == 1
            self._store.set(f"heard/{self._world.rank}", "")
            self.has_failed = not self._speaks
            return self._speaks

        answer = self._run_with_timeout(claim)
        if answer is None:
            is_first = self._world.launcher == "torchrun" and self._world.is_node_main
            self._speaks = not self.has_failed and (is_own or self._world.rank <= 1 or is_first)
        return self._speaks

    def linger(self) -> None:
        """Wait a moment until no other rank has anything left to ask, where the store ends with this one.

        The one that speaks has then looked round, and all have heard that it does.
        """
        if self._speaks:
            self._run_with_timeout(lambda: self._store.set(_REPORTED, ""))
        if not self._world.is_main or self._world.agent_hosts_store:
            return
        here = [rank for rank, beat in self._seen.items() if self._process(beat) == "here"]
        awaited = [f"heard/{rank}" for rank in here if rank not in self._absent and rank != self._world.rank]
        deadline = time.monotonic() + 3 * self._interval_s
        while (
            time.monotonic() < deadline
            and self._run_with_timeout(lambda: self._store.check([_REPORTED, *awaited])) is False
        ):
            time.sleep(0.02)

    def close(self) -> None:
        """Beat once more, and end."""
        self._ends = True
        self._wake.set()
        self._thread.join(self._silence_limit_s())

    def _run(self) -> None:
        try:
            while True:
                self._asked_s = time.monotonic()
                ends = self._ends
                self._write_heartbeat()
                while not self._jobs.empty():
                    self._jobs.get()()
                self._asked_s = 0.0
                self._rounds += 1
                if ends:
                    return
                self._wake.wait(self._interval_s if self._has_heard_all else min(_SETTLING_S, self._interval_s))
                self._wake.clear()
        except RuntimeError:
            self._is_gone = True  # and with the store all that could be heard

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
        """Whether it is known which process each rank is; a rank that freezes before could not be told as stopped."""
        return all(rank in self._seen for rank in self._ranks_to_read)

    def _read(self, ranks: "range | tuple[int, ...]") -> None:
        keys = {rank: f"beat/{rank}" for rank in ranks}
        silent = set(missing_keys(self._store, [key for rank, key in keys.items() if rank not in self._seen]))
        known = [rank for rank, key in keys.items() if key not in silent]
        texts = self._store.multi_get([keys[rank] for rank in known]) if known else []
        for rank, text in zip(known, texts, strict=True):
            self._seen[rank] = HeartbeatRecord(**json.loads(text))

    def _longest_silence_s(self) -> float:
        """Return the longest silence of those that it listens to, but for those that have said that they end."""
        now_s, longest_s = time.monotonic(), 0.0
        for rank in set(self._ranks_to_read) - {self._world.rank}:
            beat = self._seen.get(rank)
            if beat is None or beat.state == "runs":
                longest_s = max(longest_s, self._silences[rank].update(beat.count if beat else 0, now_s))
        return longest_s

    def _pass_requests_on(self) -> None:
        if self._told_stop:
            return
        if self._requests.requested:
            self._store.set(_STOP, self._requests.requested)
        elif self._store.check([_STOP]):
            self._requests.request(self._store.get(_STOP).decode())
        else:
            return
        self._told_stop = True

    def _run_with_timeout(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns in the thread that owns the store, or None where the store does not answer."""
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._jobs.put(lambda: answers.put(work()))
        self._wake.set()
        deadline = time.monotonic() + self._silence_limit_s()
        while answers.empty() and not self._is_gone and time.monotonic() < deadline:
            time.sleep(0.01)
        return None if answers.empty() else answers.get()

    def _refresh(self) -> None:
        """Wait for a beat that begins from now on."""
        rounds, deadline = self._rounds, time.monotonic() + self._silence_limit_s()
        self._wake.set()
        while self._rounds < rounds + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            self._wake.set()
        time.sleep(0.02)

    def _silence_limit_s(self) -> float:
        """Return how long to wait for the store: not at all where it has owed an answer for so long already."""
        asked_s = self._asked_s
        if self._is_gone:
            return 0.0
        return max(0.0, _ANSWER_S - (time.monotonic() - asked_s)) if asked_s else _ANSWER_S

    def _is_lost(self, rank: int) -> bool:
        beat = self._seen.get(rank)
        return rank != self._world.rank and beat is not None and (beat.state == "left" or self._process(beat) == "dead")

    def _process(self, beat: HeartbeatRecord) -> Condition:
        if beat.state != "runs":  # it has said why it ends, and may have
            return "here"
        return process_condition(beat.pid) if beat.machine and beat.machine == self._mine.machine else "here"

    def _status_of(self, rank: int, before: Mapping[int, int]) -> RankStatus:
        """Return `rank` as it is; it is silent when it has not spoken since it counted as `before`."""
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
