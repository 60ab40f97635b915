"""Heartbeats and watchdog at a hundred times the speed; `wait` is a limit, not a delay."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store

from paceline.core.interrupts import Interrupts
from paceline.core.world import World
from paceline.parallel.heartbeat import Heartbeats, StallTimer, process_condition
from paceline.parallel.process_group import RankStore
from paceline.parallel.watchdog import Watchdog

WAIT_S = 20.0


class RecordedEnd:
    """The message of the end of the process."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.message = ""

    def __call__(self, message: str) -> None:
        self.message = message
        self.came.set()


@pytest.fixture
def ending() -> RecordedEnd:
    return RecordedEnd()


def heartbeat(where, stacks: Path, ending: RecordedEnd, timeout_s: float = 0.2) -> Watchdog:
    met = RankStore(World.single(), timedelta(seconds=timeout_s))
    return Watchdog(met, where, timeout_s, stacks, Interrupts(), end=ending, interval_s=0.01)


def test_a_stalled_thread_ends_the_process_with_its_line_and_stacks(tmp_path, ending) -> None:
    stacks = tmp_path / "stacks.rank0.txt"
    watch = heartbeat(lambda: (7, "data_wait"), stacks, ending)
    watch.start()
    assert ending.came.wait(WAIT_S)
    watch.close()
    assert ending.message.startswith("rank 0 of 1: no progress: at step 7 in data_wait (")
    assert ending.message.endswith(f"(stacks in {stacks})")
    assert "test_a_stalled_thread" in stacks.read_text()


def test_a_thread_that_makes_progress_is_not_ended_and_writes_no_file(tmp_path, ending) -> None:
    started = time.monotonic()
    watch = heartbeat(
        lambda: (int((time.monotonic() - started) * 50), "forward"), tmp_path / "stacks.rank0.txt", ending
    )
    watch.start()
    assert not ending.came.wait(0.8)  # four times the time it may stand still
    watch.close()
    assert not list(tmp_path.iterdir())


def test_a_thread_that_computes_in_the_first_step_is_not_stalled(tmp_path, ending) -> None:
    watch = heartbeat(lambda: (0, "forward"), tmp_path / "stacks.rank0.txt", ending)
    watch.start()
    until = time.thread_time() + 0.5
    while time.thread_time() < until:  # twice the time it may stand still
        pass
    assert not ending.came.is_set()
    assert ending.came.wait(WAIT_S)  # now it waits
    watch.close()


def test_a_removed_run_directory_does_not_hide_the_error(tmp_path, ending) -> None:
    watch = heartbeat(lambda: (7, "h2d"), tmp_path / "gone" / "stacks.rank0.txt", ending)
    watch.start()
    assert ending.came.wait(WAIT_S)
    watch.close()
    assert "at step 7 in h2d" in ending.message and "stacks in" not in ending.message


def test_a_process_is_alive_stopped_or_dead() -> None:
    import os
    import signal
    import subprocess
    import sys

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert process_condition(process.pid) == "alive"
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: process_condition(process.pid) == "stopped")
    finally:
        process.kill()
    wait_for(lambda: process_condition(process.pid) == "dead")  # a zombie, which nobody has asked after
    process.wait(timeout=WAIT_S)
    assert process_condition(process.pid) == "dead"


def wait_for(is_so) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class RecordedStopRequests:
    requested = ""

    def request(self, name: str) -> None:
        self.requested = name


@pytest.fixture
def pair():
    store = HashStore()
    ranks = [Heartbeats(World(rank=rank, world_size=2), store) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def test_a_stop_request_of_one_rank_reaches_the_other(pair) -> None:
    asked = [RecordedStopRequests(), RecordedStopRequests()]
    for rank, beats in enumerate(pair):
        beats.watch(lambda: (3, "forward"), asked[rank], str)
    asked[1].requested = "SIGTERM"
    wait_for(lambda: asked[0].requested == "SIGTERM")


def test_the_first_rank_that_fails_reports_and_the_other_is_notified(pair) -> None:
    assert pair[1].claim_report(is_own=True)
    assert not pair[0].claim_report(is_own=True)
    assert pair[0].has_failed and not pair[1].has_failed


def test_a_failure_is_noticed_without_polling(pair) -> None:
    assert pair[0].claim_report(is_own=True)
    wait_for(lambda: pair[1].has_failed)


def test_both_ranks_see_each_other(pair) -> None:
    for rank, beats in enumerate(pair):
        beats.watch(lambda rank=rank: (rank, "forward"), Interrupts(), str)
    pair[1].publish("stuck", 5.0, "file.py:3")
    seen = pair[0].statuses(timed_out=True)
    assert [(status.step, status.stage, status.state, status.condition) for status in seen] == [
        (0, "forward", "running", "alive"),
        (1, "forward", "stuck", "alive"),
    ]
    assert (seen[1].stalled_s, seen[1].at) == (5.0, "file.py:3")


def test_a_rank_without_new_heartbeats_is_silent(pair) -> None:
    pair[1].close()
    assert [status.condition for status in pair[0].statuses(timed_out=True)] == ["alive", "silent"]


QUICK_S = 0.01
MISSED_S = 0.3


@pytest.fixture
def quick(monkeypatch):
    """Return a function that creates one of three ranks, whose heartbeats and polls are fifty times as fast."""
    monkeypatch.setattr("paceline.parallel.heartbeat.INTERVAL_S", QUICK_S)
    monkeypatch.setattr("paceline.parallel.heartbeat._POLL_S", QUICK_S)
    made: list[Heartbeats] = []

    def make(rank: int, store: Store) -> Heartbeats:
        made.append(Heartbeats(World(rank=rank, world_size=3), store))
        return made[-1]

    yield make
    for beats in made:
        beats.close()


@pytest.mark.parametrize("gone", [0, 2])
def test_all_ranks_notice_a_silent_rank(quick, gone: int) -> None:
    """Rank 0 reads all heartbeats and publishes the silence; that of rank 0 itself is seen by all."""
    store = HashStore()
    ranks = [quick(rank, store) for rank in range(3)]
    ranks[gone].close()
    for rank in {0, 1, 2} - {gone}:
        wait_for(lambda beats=ranks[rank]: beats.has_silent_rank(MISSED_S))


def test_a_rank_without_any_heartbeat_is_silent(quick) -> None:
    store = HashStore()
    ranks = [quick(0, store), quick(1, store)]
    wait_for(lambda: ranks[0].has_silent_rank(MISSED_S))
    wait_for(lambda: ranks[1].has_silent_rank(MISSED_S))


def looks(ranks: list[Heartbeats]) -> set[bool]:
    """Return the results of polling the ranks in turn, for three times the timeout."""
    found, until = set(), time.monotonic() + 3 * MISSED_S
    while time.monotonic() < until:
        found |= {beats.has_silent_rank(MISSED_S) for beats in ranks}
        time.sleep(QUICK_S)
    return found


def test_stalled_ranks_with_heartbeats_are_not_silent(quick) -> None:
    store = HashStore()
    assert looks([quick(rank, store) for rank in range(3)]) == {False}


def test_a_rank_that_reported_its_end_is_not_silent(quick) -> None:
    """It exited normally, or reported its error."""
    store = HashStore()
    ranks = [quick(rank, store) for rank in range(3)]
    ranks[2].publish("exited")
    ranks[2].close()
    assert looks(ranks[:2]) == {False}


class FrozenStore(Store):
    """A store in a process that is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def set(self, key: str, value: str) -> None:
        assert self.goes_on.wait(WAIT_S)
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_frozen_store_counts_as_a_silent_rank(quick) -> None:
    store = FrozenStore()
    beats = quick(1, store)
    wait_for(lambda: beats.has_silent_rank(MISSED_S))
    store.goes_on.set()


def test_a_stall_timer_measures_how_long_a_count_has_not_changed() -> None:
    timer = StallTimer(0.5)
    assert [timer.update(7, now_s) for now_s in (100.0, 100.5, 101.0, 101.25)] == [0.0, 0.5, 1.0, 1.25]


def test_a_count_that_changes_resets_the_stall_timer() -> None:
    timer = StallTimer(0.5)
    assert [timer.update(count, 100 + count / 2) for count in range(9)] == [0.0] * 9
    assert [timer.update(8, 104.5), timer.update(9, 105.0), timer.update(9, 105.5)] == [0.5, 0.0, 0.5]


def test_an_hour_of_suspension_is_not_an_hour_of_silence() -> None:
    """All ranks may have been suspended, and the first to wake up polls one that sleeps."""
    timer = StallTimer(0.5)
    assert [timer.update(7, now_s) for now_s in (100.0, 100.5, 3700.0, 3700.5)] == [0.0, 0.5, 1.5, 2.0]
