"""How busy the CPU is, of what the ranks of a node may use of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.core.limits import CgroupLimits


class CoreTime(NamedTuple):
    """CPU seconds since some moment: those that were spent, of those there were."""

    busy_s: float
    available_s: float


class ReadCoreTime(Protocol):
    """Count CPU seconds."""

    def __call__(self) -> CoreTime:
        """Return the seconds until now."""
        ...


@dataclass(frozen=True)
class ReadCores:
    """The seconds of the cores with these `numbers`, whoever is busy there; no numbers stand for all cores."""

    psutil: Any
    numbers: Sequence[int]

    def __call__(self) -> CoreTime:
        """Return the seconds of all of them."""
        cores = [core._asdict() for core in self.psutil.cpu_times(percpu=True)]
        if self.numbers and max(self.numbers) < len(cores):  # else some are off, and the list does not say which
            cores = [cores[number] for number in self.numbers]
        # Time of guests is in user and nice already: proc(5), /proc/stat.
        total_s = sum(s for core in cores for kind, s in core.items() if kind not in ("guest", "guest_nice"))
        return CoreTime(total_s - sum(core["idle"] + core.get("iowait", 0.0) for core in cores), total_s)


@dataclass(frozen=True)
class ReadQuota:
    """The seconds that a group of processes has spent, of those its quota lets it spend."""

    limits: CgroupLimits
    now: Callable[[], float]

    def __call__(self) -> CoreTime:
        """Return the seconds of the group."""
        return CoreTime(self.limits.cpu_s(), self.now() * self.limits.cores)


def build_core_time_reader(
    psutil: Any, numbers: Sequence[int], limits: CgroupLimits, now: Callable[[], float]
) -> ReadCoreTime:
    """Return what counts the cores of these `numbers`, or the quota where that is tighter."""
    usable = len(numbers) or psutil.cpu_count() or 1
    return ReadQuota(limits, now) if limits.cores < usable else ReadCores(psutil, numbers)


def busy_share(before: CoreTime, after: CoreTime) -> float | None:
    """Return the busy share in between, 0 to 1; None where no time has passed by the kernel's clock of 10 ms."""
    there_were_s = after.available_s - before.available_s
    if there_were_s <= 0:
        return None
    return min(1.0, max(0.0, (after.busy_s - before.busy_s) / there_were_s))  # a quota may be exceeded for a moment
