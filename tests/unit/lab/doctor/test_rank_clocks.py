"""Clocks of hosts, compared through a store by two threads in place of two ranks."""

import threading
import time

import pytest
from torch.distributed import HashStore

from paceline.lab.doctor.compare_ranks import RankFacts
from paceline.lab.doctor.ranks import ClockOffset, compare_clocks, probe_clock, serve_clock

RANKS = {rank: RankFacts(rank, host=f"host{rank}") for rank in range(3)}


@pytest.mark.parametrize("ahead_s", [0.0, 5.25, -3600.0])
def test_a_clock_that_is_ahead_or_behind_is_measured(ahead_s: float) -> None:
    store = HashStore()
    found: dict[int, ClockOffset] = {}
    main = threading.Thread(target=lambda: found.update(serve_clock(store, [1, 2], time.time)))
    other = threading.Thread(target=lambda: probe_clock(store, 1, lambda: time.time() + ahead_s))
    threads = [main, other, threading.Thread(target=lambda: probe_clock(store, 2, time.time))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert found.keys() == {1, 2}
    # Messages within a process take microseconds; half of how long they took is as far off as it can be.
    assert abs(found[1].ahead_s - ahead_s) <= found[1].error_s + 1e-4
    assert abs(found[2].ahead_s) <= found[2].error_s + 1e-4


def test_a_clock_that_is_off_by_more_than_a_second_is_worth_a_look() -> None:
    (found,) = compare_clocks({1: ClockOffset(-5.0, 0.001), 2: ClockOffset(0.2, 0.001)}, RANKS)
    assert (found.name, found.state) == ("clocks", "look")
    assert found.found == "rank 1 (host1) is 5.00 s behind rank 0 (+/- 1 ms)"


def test_clocks_that_agree_or_may_agree_are_well() -> None:
    for offset in (ClockOffset(0.5, 0.01), ClockOffset(3.0, 2.5)):
        (found,) = compare_clocks({1: offset}, RANKS)
        assert (found.name, found.state) == ("clocks", "ok")


def test_the_clock_of_one_host_is_not_reported() -> None:
    assert compare_clocks({}, RANKS) == []
