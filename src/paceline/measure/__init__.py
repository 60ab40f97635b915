"""Account for every second of a run. `StageClock` is public: it works in anyone's loop, and needs no torch."""

from paceline.measure.clock import EPOCH_BOUNDARY, Clock, NullClock, StageClock, build_clock
from paceline.measure.summary import ClockSummary, StageTotal

__all__ = ["EPOCH_BOUNDARY", "Clock", "ClockSummary", "NullClock", "StageClock", "StageTotal", "build_clock"]
