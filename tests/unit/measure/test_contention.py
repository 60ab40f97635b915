"""Whose the cores were, from recorded numbers: other processes', the run's own, a quota's; and from the real kernel."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.host import CgroupLimits
from paceline.core.results import CpuResult
from paceline.measure.clock import StageClock
from paceline.measure.cpu import (
    CpuSample,
    CpuTimer,
    CpuTimes,
    ProcSampler,
    RankCpu,
    build_cpu_timer,
    core_ticks,
    cpu_result,
)

TICK = os.sysconf("SC_CLK_TCK")


def times(wall_s: float = 10.0, *, run: float, waited: float, busy: float, own: float | None = None) -> CpuTimes:
    """Return the times of a rank whose processes ran for as long as its threads by default."""
    own_s = run if own is None else own
    return CpuTimes(wall_s=wall_s, run_s=run, waited_s=waited, own_s=own_s, busy_s=busy)


def of(*ranks: CpuTimes, cores: int = 2, threads: int = 2, places: tuple[int, ...] = ()) -> CpuResult:
    rows = [
        RankCpu(each, place, cores, threads) for each, place in zip(ranks, places or (0,) * len(ranks), strict=True)
    ]
    found = cpu_result(rows)
    assert found is not None
    return found


def test_time_that_others_used_is_lost_to_them() -> None:
    """Two threads on two cores beside eight `while 1: pass` processes get 2 of 10 turns, as recorded."""
    found = of(times(run=4.0, waited=16.0, busy=20.0))
    assert found.share == pytest.approx(0.8)
    assert found.others_cores == pytest.approx(1.6)
    assert found.own_share == 0


def test_threads_that_wait_for_the_runs_own_lose_nothing_to_others() -> None:
    """Two threads and two loader workers, alone on two cores, get half of what they want, and all of it is own."""
    found = of(times(run=20.0, waited=20.0, busy=20.2))
    assert found.share < 0.02
    assert found.own_share == pytest.approx(0.5, abs=0.01)


def test_others_are_charged_with_no_more_than_they_used() -> None:
    """Loader workers and one other process, which took a fifth of the cores: a fifth of the speed is lost to it."""
    found = of(times(run=16.0, waited=24.0, busy=20.0))
    assert found.lost_s == pytest.approx(4.0)
    assert found.share == pytest.approx(0.2)


def test_others_on_cores_without_waiting_threads_cost_nothing() -> None:
    assert of(times(run=10.0, waited=0.1, busy=30.0), cores=4).share < 0.02


def test_ranks_on_the_same_cores_are_no_others_to_one_another() -> None:
    """Four ranks on two cores: the other three are not other processes, and half of all time is waiting for them."""
    ranks = [times(run=5.0, waited=5.0, busy=20.0)] * 4
    found = of(*ranks, threads=1)
    assert (found.share, found.own_share, found.ranks) == (0, pytest.approx(0.5), 4)


def test_ranks_on_other_cores_are_not_counted_among_those_that_used_these() -> None:
    """Rank 1 has cores of its own, which others used; what rank 0 used elsewhere does not hide that."""
    found = of(times(run=10.0, waited=0.0, busy=10.0), times(run=2.0, waited=8.0, busy=10.0), places=(0, 1), threads=1)
    assert (found.rank, found.share) == (1, pytest.approx(0.8))


def test_what_a_hypervisor_took_is_lost_too() -> None:
    found = of(replace(times(run=10.0, waited=0.0, busy=10.0), stolen_s=5.0))
    assert found.share == pytest.approx(1 / 3)


def test_throttling_by_a_quota_is_separate() -> None:
    found = of(replace(times(run=5.0, waited=0.0, busy=5.0), throttled_s=15.0))
    assert (found.throttled_share, found.share) == (pytest.approx(0.75), 0)


def test_nothing_is_known_of_no_time() -> None:
    assert cpu_result([RankCpu(CpuTimes(), 0, 2, 2)]) is None


def test_a_row_of_numbers_is_the_rank_that_it_was_made_of() -> None:
    rank = RankCpu(times(run=1.0, waited=2.0, busy=3.0), 4_000_000_001, 8, 2)
    assert RankCpu.from_row(rank.to_row()) == rank


def look(at_s: float, threads: dict[int, tuple[float, float]]) -> CpuSample:
    return CpuSample(at_s=at_s, threads=threads, own_s=at_s, busy_s=2 * at_s, stolen_s=0.0, switches=round(at_s))


def test_times_are_counted_between_looks_and_not_while_paused() -> None:
    """A thread that begins is counted from then on, and one that ends leaves what it had no longer known."""
    looks = iter(
        [
            look(10, {1: (5.0, 1.0), 2: (1.0, 0.0)}),
            look(13, {1: (7.0, 2.0), 3: (0.5, 0.25)}),
            look(20, {1: (7.0, 2.0)}),
            look(21, {1: (8.0, 2.0)}),
        ]
    )
    timer = CpuTimer(lambda: next(looks))
    timer.pause()  # it is already
    timer.resume()
    timer.pause()
    timer.resume()
    assert timer.read() == CpuTimes(
        wall_s=4.0, run_s=3.5, waited_s=1.25, own_s=4.0, busy_s=8.0, stolen_s=0.0, switches=4
    )


class Counted:
    """A timer that notes its calls, and what the clock said."""

    def __init__(self, now) -> None:
        self.now, self.calls = now, []

    def resume(self) -> None:
        self.calls.append(("resume", self.now()))

    def pause(self) -> None:
        self.calls.append(("pause", self.now()))

    def read(self) -> CpuTimes:
        return CpuTimes(wall_s=1.0)


def test_a_clock_counts_cpu_time_of_counted_steps_alone() -> None:
    """Neither the warm-up, nor a pause, nor the start of a loader; and no step looks."""
    seconds = [0.0]
    timer = Counted(lambda: seconds[0])
    clock = StageClock(warmup_steps=2, cpu=timer, now=lambda: seconds[0])
    for number, _ in enumerate(clock.batches(range(5))):
        seconds[0] += 1.0
        clock.end_step(images=1)
        if number == 3:
            with clock.paused("evaluate"):
                seconds[0] += 10.0
    assert [call for call in timer.calls if call[1] > 0] == [
        ("resume", 2.0),
        ("pause", 4.0),
        ("resume", 14.0),
        ("pause", 15.0),
        ("resume", 15.0),
    ]
    assert [call for call in timer.calls if call[1] == 0] == [("pause", 0.0)]
    assert clock.drain().cpu == CpuTimes(wall_s=1.0)


@pytest.fixture
def proc(tmp_path):
    """Return a table with this process, which has two threads and a worker, on a node with three cores."""
    me = os.getpid()
    for pid, tasks, children in ((me, (me, 11), "12 "), (12, (12,), "")):
        for task in tasks:
            folder = tmp_path / str(pid) / "task" / str(task)
            folder.mkdir(parents=True)
            (folder / "children").write_text(children if task == pid else "")
            (folder / "schedstat").write_text(f"{3 if task == 12 else 1}000000000 500000000 7\n")
        numbers = " ".join(["0"] * 10)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a name) S {numbers} {2 * TICK} {TICK} 0 0")
    line = f"{TICK} 0 {TICK} 100 100 0 {TICK} {5 * TICK} 0 0"
    (tmp_path / "stat").write_text(f"cpu  1 2 3\ncpu0 {line}\ncpu1 {line}\ncpu2 {line}\nintr 5 5 5\n")
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull total=0\n")
    return tmp_path


def test_the_kernels_files_are_read(proc, tmp_path) -> None:
    (tmp_path / "cpu.stat").write_text("nr_periods 5\nnr_throttled 2\nthrottled_usec 1500000\n")
    found = ProcSampler([0, 2], CgroupLimits(cores=1.5, cores_of=tmp_path), proc, now=lambda: 7.0)()
    assert found.threads == {os.getpid(): (1.0, 0.5), 11: (1.0, 0.5), 12: (3.0, 0.5)}
    assert (found.own_s, found.busy_s, found.stolen_s) == (6.0, 6.0, 10.0)
    assert (found.at_s, found.throttled_s, found.pressure_s) == (7.0, 1.5, 2.5)
    assert core_ticks([7], proc) == (0, 0)


def test_version_1_of_control_groups_counts_nanoseconds(proc, tmp_path) -> None:
    (tmp_path / "cpu.stat").write_text("nr_periods 5\nnr_throttled 2\nthrottled_time 1500000000\n")
    assert ProcSampler([0], CgroupLimits(cores=1.5, cores_of=tmp_path), proc)().throttled_s == 1.5


def test_a_kernel_without_schedstat_gets_no_timer(tmp_path) -> None:
    assert build_cpu_timer(tmp_path) is None


def test_this_kernel_counts_what_this_process_runs() -> None:
    timer = build_cpu_timer()
    assert (timer is not None) == Path("/proc/self/schedstat").exists()
    if timer is not None:
        timer.resume()
        sum(number * number for number in range(2_000_000))
        assert timer.read().run_s > 0.02
