"""Account for every second of a run. `StageClock` is public: it works in anyone's loop, and needs no torch."""

from paceline.core.stages import EPOCH_BOUNDARY
from paceline.measure.clock import Clock, ClockSummary, NullClock, StageClock, StageTotal, build_clock

__all__ = ["EPOCH_BOUNDARY", "Clock", "ClockSummary", "NullClock", "StageClock", "StageTotal", "build_clock"]
