"""What the run that measures more than its stages, and is slower for it, adds to a profile: buckets, and a check."""

from pathlib import Path

from paceline.core.results import CommunicationResult, RunResult
from paceline.measure.trace import PROFILER_WARMUP_STEPS, trace_totals
from paceline.recipe.schema import Recipe

_OF_BUCKETS = ("bytes", "wire_s", "overlap", "buckets")


def communication(base: RunResult, aside: RunResult | None) -> CommunicationResult | None:
    """Return what a step of the base waits for, with what buckets took in the run aside, where they were timed there.

    Their overlap is of the run aside alone, as a ratio is to be of one run. None where the base averages nothing.
    """
    timed = aside.communication if aside else None
    if base.communication is None or timed is None or timed.wire_s is None:
        return base.communication
    return base.communication.model_copy(update={name: getattr(timed, name) for name in _OF_BUCKETS})


def trace_share(trace: Path, traced: RunResult, recipe: Recipe, length: int) -> float | None:
    """Return the seconds of all stages in a trace of rank 0's over those of its clock: 1 where they agree.

    None where there is no trace, or `length` steps from the end of the warm-up are not those that the clock counted.
    """
    counted = traced.account.counted_steps if traced.account else 0
    if length < counted or recipe.measure.warmup_steps < PROFILER_WARMUP_STEPS or not trace.is_file():
        return None
    clock_s = sum(stage.host_s for stage in traced.stages.values())
    totals_s = trace_totals(trace)
    return sum(totals_s.get(name, 0.0) for name in traced.stages) / clock_s if clock_s > 0 else None
