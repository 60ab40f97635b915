"""Measure how long a command and its processes wait for cores that other processes hold. Torch-free."""

import os
import time
from contextlib import suppress
from typing import Final, final

from paceline.core.results import CpuResult
from paceline.measure.cpu import CpuTimer, CpuTimes, RankCpu, build_cpu_timer, cpu_result

_EVERY_S: Final = 1.0
"""Seconds between samples: one costs 0.2 ms, and 0.04 ms per thread."""


@final
class CommandCpu:
    """CPU time of all processes below this one, up to the last `update` at which they ran."""

    def __init__(self) -> None:
        self._timer: CpuTimer | None = None
        self._times = CpuTimes()
        self._next_s = time.monotonic()
        with suppress(Exception):  # a measurement must not prevent the training
            timer = build_cpu_timer()
            if timer is not None:
                timer.resume()
            self._timer = timer

    def update(self) -> None:
        """Take a sample if the last one is a second ago; measure nothing from then on if that fails."""
        if self._timer is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EVERY_S
        try:
            times = self._timer.read()
        except Exception:  # a measurement must not end the training
            self._timer = None
            return
        if times.run_s >= self._times.run_s:  # threads that have ended no longer count
            self._times = times

    @property
    def result(self) -> CpuResult | None:
        """Return the share of time lost to other processes; None if it was not measured."""
        if self._timer is None:
            return None
        return cpu_result([RankCpu(self._times, place=0, cores=len(os.sched_getaffinity(0)), threads=0)])
