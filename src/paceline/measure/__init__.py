"""Account for every second of a run. `StageClock` is public: it works in anyone's loop, and needs no torch."""

from paceline.measure.clock import Clock, NullClock, StageClock, build_clock
from paceline.measure.summary import ClockSummary, StageTotal

__all__ = ["Clock", "ClockSummary", "NullClock", "StageClock", "StageTotal", "build_clock"]
