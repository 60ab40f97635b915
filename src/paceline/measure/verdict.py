"""What held a run back, in one word, one sentence and one override to try. Pure, and never more than was measured.

Judged by device time, which on a CPU is host time: a host that waits for data while its GPU still has work queued
costs nothing.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final, Literal

from paceline.core.units import Duration, count
from paceline.measure.summary import OTHER, ClockSummary

Bottleneck = Literal["input-bound", "copy-bound", "evaluation-bound", "compute-bound", "unknown"]
WAITING_SHARE: Final = 0.2
"""Share of the wall clock from which waiting for data, or copying it, is called the bottleneck."""
EVALUATION_SHARE: Final = 0.5
"""Share of all the clock's time above which evaluation is."""
COMPUTE: Final = ("device_augment", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Verdict:
    """`bottleneck`, the `evidence` for it, and `try_`: an override to paste, or "" when none was earned."""

    bottleneck: Bottleneck
    evidence: str
    try_: str

    def to_dict(self) -> dict[str, str]:
        """Return {bottleneck, evidence, try}, as in `result.json`."""
        return {"bottleneck": self.bottleneck, "evidence": self.evidence, "try": self.try_}


def verdict(
    summary: ClockSummary,
    *,
    workers: int | None = None,
    cores: int | None = None,
    eval_every: Duration | None = None,
) -> Verdict:
    """Judge a summary. An override is computed from what the run used; a setting left out is not advised on.

    `workers` decode for this rank (0: the rank itself), `cores` are the logical cores it may use, `eval_every`
    is the time between evaluations.
    """
    if summary.n == 0:
        to_try = "measure.warmup_steps=0" if summary.warmup_s > 0 else ""
        return Verdict("unknown", "No step was counted.", to_try)
    evaluate_s = summary.pauses.get("evaluate", 0.0)
    if evaluate_s > EVALUATION_SHARE * summary.elapsed_s:
        evidence = f"Evaluation took {evaluate_s:.3g} s of {summary.elapsed_s:.3g} s."
        return Verdict("evaluation-bound", evidence, _rarer(evaluate_s, summary.elapsed_s, eval_every))
    data_wait_s, h2d_s = _device_s(summary, "data_wait"), _device_s(summary, "h2d")
    enough_s = WAITING_SHARE * summary.wall_s
    if data_wait_s >= max(enough_s, h2d_s):
        to_try = _more_workers(data_wait_s, summary.wall_s, workers, cores)
        return Verdict("input-bound", _took("Waiting for data", data_wait_s, summary), to_try)
    if h2d_s >= enough_s:
        return Verdict("copy-bound", _took("Copying to the device", h2d_s, summary), "")
    if _device_s(summary, *COMPUTE) < _device_s(summary, OTHER):
        return Verdict("unknown", _took("What no stage covers", _device_s(summary, OTHER), summary), "")
    return Verdict("compute-bound", _took("Computing", _device_s(summary, *COMPUTE), summary), "")


def _device_s(summary: ClockSummary, *stages: str) -> float:
    return sum(total.device_s for name, total in summary.stages.items() if name in stages)


def _took(what: str, seconds: float, summary: ClockSummary) -> str:
    share = seconds / summary.wall_s
    return f"{what} took {seconds:.3g} s of the {summary.wall_s:.3g} s of {count(summary.n, 'step')} ({share:.0%})."


def _more_workers(waiting_s: float, wall_s: float, workers: int | None, cores: int | None) -> str:
    """Return as many workers as would decode a batch in the time that a step does not wait."""
    if workers is None or cores is None or waiting_s >= wall_s:
        return ""
    # Without workers decoding took the wait; with some, each of them was decoding all the time.
    decoding_s = waiting_s if workers == 0 else workers * wall_s
    needed = min(ceil(decoding_s / (wall_s - waiting_s)), cores)
    return f"data.workers={needed}" if needed > workers else ""


def _rarer(evaluate_s: float, elapsed_s: float, eval_every: Duration | None) -> str:
    """Return an interval at which evaluation would take no longer than the rest."""
    if eval_every is None or eval_every.value == 0 or evaluate_s >= elapsed_s:
        return ""
    factor = ceil(evaluate_s / (elapsed_s - evaluate_s))
    return f"train.eval_every={Duration(eval_every.value * factor, eval_every.unit)}"
