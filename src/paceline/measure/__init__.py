"""Account for every second of a run. `StageClock` works in any training loop, and needs no torch."""

from paceline.core.stages import EPOCH_BOUNDARY
from paceline.measure.clock import Clock, ClockSummary, NullClock, StageClock, StageTotal, build_clock

__all__ = ["EPOCH_BOUNDARY", "Clock", "ClockSummary", "NullClock", "StageClock", "StageTotal", "build_clock"]
