"""Merge the measurements of the instrumented run of a profile into it: buckets, and a check of the trace."""

from pathlib import Path

from paceline.core.results import CommunicationResult, RunResult
from paceline.measure.trace import PROFILER_WARMUP_STEPS, trace_totals
from paceline.recipe.schema import Recipe

_BUCKET_FIELDS = ("bytes", "wire_s", "overlap", "buckets")


def merge_bucket_timings(base: RunResult, instrumented: RunResult | None) -> CommunicationResult | None:
    """Return the communication of `base` with the bucket timings of the instrumented run, if it has some.

    None if `base` averages no gradients.
    """
    timed = instrumented.communication if instrumented else None
    if base.communication is None or timed is None or timed.wire_s is None:
        return base.communication
    # Take the overlap from the instrumented run, too: a ratio must be of a single run.
    return base.communication.model_copy(update={name: getattr(timed, name) for name in _BUCKET_FIELDS})


def compute_trace_share(trace: Path, traced: RunResult, recipe: Recipe, length: int) -> float | None:
    """Return the seconds of all stages in rank 0's trace over those of its clock; 1 if they agree.

    None without a trace, or if the traced steps are not those that the clock measured.
    """
    counted = traced.account.counted_steps if traced.account else 0
    if length < counted or recipe.measure.warmup_steps < PROFILER_WARMUP_STEPS or not trace.is_file():
        return None
    clock_s = sum(stage.host_s for stage in traced.stages.values())
    totals_s = trace_totals(trace)
    return sum(totals_s.get(name, 0.0) for name in traced.stages) / clock_s if clock_s > 0 else None
