"""CPU time of this process and of others, and how much of it contention took from the ranks.

A rank wants a CPU while its threads, and those of its loader workers, run or wait in a run queue; the kernel counts
both in /proc/PID/schedstat (https://docs.kernel.org/scheduler/sched-stats.html). Other processes used what all
processes used (/proc/stat) less what this rank and the ranks on the same cores used, so a rank that waits for its own
loader workers does not count as starved. PSI (https://docs.kernel.org/accounting/psi.html) and involuntary context
switches are recorded only.

A sample costs 0.2 ms of CPU time, and 0.04 ms per thread (means of 200 samples on 2 busy cores). None is taken within a
step.
"""

import os
import resource
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final, Self, final

from paceline.core.host import INFINITY, CgroupLimits, find_limits
from paceline.core.process import PROC, cpu_ticks, descendants, read_text_or_empty, tasks
from paceline.core.results import CpuResult
from paceline.measure.timer import now_s

_NS: Final = 1e-9
_US: Final = 1e-6
_BUSY: Final = (0, 1, 2, 5, 6)
"""Columns of a core in /proc/stat: user, nice, system, irq, softirq. Guest time is part of user: proc(5)."""
_STOLEN: Final = 7


@dataclass(frozen=True)
class CpuSample:
    """A sample of cumulative CPU times in seconds, taken at `at_s`.

    `threads` has (run, waited) seconds of each thread of the rank and its workers, by thread id. `own_s` is the CPU
    time of their processes, including ended threads and workers. `busy_s` is what all processes used of the cores that
    the rank may use, `stolen_s` what a hypervisor gave to others. `throttled_s` is how long a CPU quota stopped the
    group, summed over cores, `pressure_s` how long anything on the node waited for a CPU, `switches` the involuntary
    context switches of the rank.
    """

    at_s: float
    threads: dict[int, tuple[float, float]]
    own_s: float
    busy_s: float
    stolen_s: float
    throttled_s: float = 0.0
    pressure_s: float = 0.0
    switches: int = 0


@dataclass(frozen=True)
class CpuTimes:
    """Differences between samples, in seconds as in `CpuSample`; `run_s` and `waited_s` are sums over all threads."""

    wall_s: float = 0.0
    run_s: float = 0.0
    waited_s: float = 0.0
    own_s: float = 0.0
    busy_s: float = 0.0
    stolen_s: float = 0.0
    throttled_s: float = 0.0
    pressure_s: float = 0.0
    switches: float = 0.0

    def plus(self, other: "CpuTimes") -> "CpuTimes":
        """Return the sum of both."""
        return CpuTimes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def between(cls, before: CpuSample, after: CpuSample) -> Self:
        """Return the difference; threads that started in between count from 0, threads that ended do not count."""
        nothing = (0.0, 0.0)
        passed = [
            (run_s - before.threads.get(thread, nothing)[0], waited_s - before.threads.get(thread, nothing)[1])
            for thread, (run_s, waited_s) in after.threads.items()
        ]
        return cls(
            wall_s=after.at_s - before.at_s,
            run_s=sum(max(0.0, run_s) for run_s, _ in passed),  # the kernel reuses thread ids
            waited_s=sum(max(0.0, waited_s) for _, waited_s in passed),
            own_s=max(0.0, after.own_s - before.own_s),
            busy_s=max(0.0, after.busy_s - before.busy_s),
            stolen_s=max(0.0, after.stolen_s - before.stolen_s),
            throttled_s=max(0.0, after.throttled_s - before.throttled_s),
            pressure_s=max(0.0, after.pressure_s - before.pressure_s),
            switches=after.switches - before.switches,
        )


@final
class CpuTimer:
    """Count CPU times between `resume` and `pause`, in any order of calls; initially paused."""

    def __init__(self, sample: Callable[[], CpuSample]) -> None:
        self._sample = sample
        self._times = CpuTimes()
        self._before: CpuSample | None = None

    def resume(self) -> None:
        """Start counting."""
        if self._before is None:
            self._before = self._sample()

    def pause(self) -> None:
        """Stop counting."""
        self._times, self._before = self.read(), None

    def read(self) -> CpuTimes:
        """Return the counts so far, without stopping."""
        if self._before is None:
            return self._times
        return self._times.plus(CpuTimes.between(self._before, self._sample()))


@dataclass(frozen=True)
class ProcSampler:
    """Sample this process, its descendants and the numbered `cores` by proc(5)."""

    cores: Collection[int]
    limits: CgroupLimits
    proc: Path = PROC
    now: Callable[[], float] = now_s

    def __call__(self) -> CpuSample:
        """Take a sample."""
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        pids = [os.getpid(), *descendants(os.getpid(), self.proc)]
        busy, stolen = core_ticks(self.cores, self.proc)
        return CpuSample(
            at_s=self.now(),
            threads={thread: times for pid in pids for thread, times in _threads(pid, self.proc).items()},
            own_s=tick_s * sum(cpu_ticks(pid, self.proc) for pid in pids),
            busy_s=tick_s * busy,
            stolen_s=tick_s * stolen,
            throttled_s=_throttled_s(self.limits),
            pressure_s=_pressure_s(self.proc),
            switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
        )


def build_cpu_timer(proc: Path = PROC) -> CpuTimer | None:
    """Return the CPU timer of this rank, None without /proc/PID/schedstat."""
    # Without schedstat (CONFIG_SCHED_INFO) waiting threads look like sleeping ones.
    if not hasattr(os, "sched_getaffinity") or not _threads(os.getpid(), proc):
        return None
    return CpuTimer(ProcSampler(os.sched_getaffinity(0), find_limits(), proc))


def core_ticks(cores: Collection[int], proc: Path = PROC) -> tuple[int, int]:
    """Return the ticks that all processes used of `cores`, and those that a hypervisor gave to others."""
    busy = stolen = 0
    names = {f"cpu{core}" for core in cores}
    for line in read_text_or_empty(proc / "stat").splitlines():
        name, *numbers = line.split()
        if name in names:
            busy += sum(int(numbers[place]) for place in _BUSY)
            stolen += int(numbers[_STOLEN])
    return busy, stolen


@dataclass(frozen=True)
class RankCpu:
    """CPU times of a rank, its number of cores, and of its compute `threads`.

    `place` identifies the node and the set of cores; ranks on the same cores have the same number.
    """

    times: CpuTimes
    place: int
    cores: int
    threads: int

    def to_row(self) -> list[float]:
        """Return the values as numbers, for other ranks."""
        return [*astuple(self.times), self.place, self.cores, self.threads]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Self:
        """Return the value of such a row."""
        *times, place, cores, threads = row
        return cls(CpuTimes(*times), int(place), int(cores), int(threads))


def cpu_result(ranks: Sequence[RankCpu]) -> CpuResult | None:
    """Return the CPU result of the rank that lost the largest share to other processes; None if no time was counted.

    Of the time that threads of a rank waited, others are charged with at most what they used of the cores: if others
    kept two cores busy for 0.5 s, no more than 0.5 s was lost to them, however many threads waited. Ranks on the same
    cores share what others used, in proportion to their waiting.
    """
    found = [_rank_result(number, ranks) for number, each in enumerate(ranks) if each.times.wall_s > 0]
    return max(found, key=lambda each: each.share, default=None)


def _rank_result(number: int, ranks: Sequence[RankCpu]) -> CpuResult:
    rank = ranks[number]
    local_ranks = [each for each in ranks if each.place == rank.place]
    times = rank.times
    own_s = sum(each.times.own_s for each in local_ranks)
    others_s = max(0.0, times.busy_s - own_s)
    waited_s = sum(each.times.waited_s for each in local_ranks)
    # Others cannot have taken more than they used; the rest of the waiting was for the ranks' own threads.
    charged = min(1.0, others_s / waited_s) if waited_s else 0.0
    # A hypervisor takes a core from whoever is on it, without a wait in any queue of this kernel.
    stolen_s = times.stolen_s * min(1.0, times.own_s / times.busy_s) if times.busy_s else 0.0
    lost_s = charged * times.waited_s + stolen_s
    own_wait_s = (1 - charged) * times.waited_s
    throttled_s = times.throttled_s
    return CpuResult(
        rank=number,
        cores=rank.cores,
        ranks=len(local_ranks),
        threads=rank.threads,
        wall_s=times.wall_s,
        run_s=times.run_s,
        waited_s=times.waited_s,
        lost_s=lost_s,
        share=_share_of(lost_s, times.run_s),
        own_share=_share_of(own_wait_s, times.run_s),
        throttled_share=_share_of(throttled_s, own_s),
        others_cores=(others_s + times.stolen_s) / times.wall_s,
        pressure=min(1.0, times.pressure_s / times.wall_s),
        switches=round(times.switches),
    )


def _share_of(lost_s: float, had_s: float) -> float:
    return lost_s / (lost_s + had_s) if lost_s > 0 else 0.0


def _threads(pid: int, proc: Path) -> dict[int, tuple[float, float]]:
    """Return (run, waited) seconds of each thread of a process."""
    found = {}
    for thread in tasks(pid, proc):
        numbers = read_text_or_empty(f"{proc}/{pid}/task/{thread}/schedstat").split()
        if len(numbers) >= 2:
            found[thread] = (int(numbers[0]) * _NS, int(numbers[1]) * _NS)
    return found


def _throttled_s(limits: CgroupLimits) -> float:
    if limits.cores == INFINITY:
        return 0.0
    numbers = dict(line.split(maxsplit=1) for line in read_text_or_empty(limits.cores_of / "cpu.stat").splitlines())
    # throttled_usec in cgroup v2, throttled_time in v1 (https://docs.kernel.org/scheduler/sched-bwc.html).
    if "throttled_usec" in numbers:
        return int(numbers["throttled_usec"]) * _US
    return int(numbers.get("throttled_time", 0)) * _NS


def _pressure_s(proc: Path) -> float:
    # The kernel may be built without PSI.
    some, *_ = read_text_or_empty(proc / "pressure" / "cpu").splitlines() or [""]
    total = some.rpartition("total=")[2]
    return int(total) * _US if total.isdecimal() else 0.0
