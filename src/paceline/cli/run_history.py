"""Read from a run directory what `paceline doctor` needs: step times, failures, restarts and checkpoint costs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.core.goodput import Mtbf, observed_mtbf
from paceline.core.results import FINISHED, CheckpointResult, GoodputResult
from paceline.core.run_dir import RunDir, read_lines
from paceline.recipe.schema.recipe import Checkpoint
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, read_state
from paceline.training.goodput import Attempt, TimeSpent, compute_goodput, estimate_last_end, read_attempts


@dataclass(frozen=True)
class RunHistory:
    """History of a run, in seconds.

    `step_s` is the (50th, 99th) percentile of the means between records, None without any. `every_s` is the time
    between checkpoints, None if unknown or off. `restart_s` is the median of `restarts` from a failure to the first
    new step, or the start-up alone. `at_risk_s` is the training since the newest checkpoint of an unfinished run.
    """

    step_s: tuple[float, float] | None
    every_s: float | None
    restart_s: float
    restarts: int
    failures: int
    up_s: float
    goodput: GoodputResult | None
    saving: CheckpointResult | None
    at_risk_s: float

    @property
    def mtbf(self) -> Mtbf:
        """Estimated mean time between failures."""
        return observed_mtbf(self.failures, self.up_s)


def read_run_history(rundir: RunDir, section: Checkpoint) -> RunHistory:
    """Return the history of `rundir` with checkpoints as in `section`. Raise `PacelineError` for damaged files."""
    plan = rundir.read_plan()
    steps = _step_s(rundir, float(plan.get("batch_size", 0)))
    attempts = read_attempts(rundir.attempts)
    failed = [attempt for attempt in attempts if _has_failed(attempt)]
    ended = estimate_last_end(attempts, rundir)
    restarts = _restarts(ended, {attempt.start.number for attempt in failed})
    newest = CheckpointStorage(rundir.checkpoints, KeepPolicy(num_newest=1)).newest()
    saved = read_state(newest).get("train", {}) if newest else {}
    result = rundir.read_result() if (rundir.path / "result.json").exists() else None
    trained_s = ended[-1].end.trained_s if ended and ended[-1].end else 0.0
    spent, saved_s = _saved_times(saved, rundir)
    # A run that ended in any other way may have been resumed since.
    is_over = result is not None and result.status in FINISHED
    so_far = compute_goodput(ended, trained_s, spent) if ended else None
    return RunHistory(
        step_s=steps,
        every_s=_every_s(section, float(plan.get("checkpoint_every", 0)), steps),
        restart_s=median(restarts or [attempt.start.startup_s for attempt in ended] or [0.0]),
        restarts=len(restarts),
        failures=len(failed),
        up_s=sum(attempt.end.ended_s - attempt.start.started_s for attempt in ended if attempt.end),
        goodput=result.goodput if result and is_over else so_far,
        saving=result.checkpoints if result and result.checkpoints and result.checkpoints.saved else None,
        at_risk_s=0.0 if is_over else max(0.0, trained_s - saved_s),
    )


def _saved_times(saved: dict[str, Any], rundir: RunDir) -> tuple[TimeSpent, float]:
    try:
        spent = TimeSpent(**{name: float(value) for name, value in saved.get("spent", {}).items()})
        return spent, float(saved.get("trained_s", 0.0))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{rundir.checkpoints}: the newest holds no valid times: {error} (remove it)") from None


def _step_s(rundir: RunDir, batch_size: float) -> tuple[float, float] | None:
    speeds = [float(row["images_per_s"]) for row in read_lines(rundir.steps)]
    seconds = sorted(batch_size / speed for speed in speeds if speed > 0)
    if not seconds or not batch_size:
        return None
    return median(seconds), seconds[ceil(0.99 * len(seconds)) - 1]


def _every_s(section: Checkpoint, every: float, step_s: tuple[float, float] | None) -> float | None:
    if section.every == "off":
        return None
    if section.every.is_time:
        return float(section.every.seconds)
    return every * step_s[0] if step_s and every else None


def _has_failed(attempt: Attempt) -> bool:
    if attempt.end is not None:
        return attempt.end.how in ("killed", "failed")
    # A process of another host cannot be checked.
    if attempt.start.host != os.uname().nodename:
        return False
    try:
        # Signal 0 only asks whether the process exists.
        os.kill(attempt.start.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # the PID belongs to another user's process
    return False


def _restarts(ended: Sequence[Attempt], failed: set[int]) -> list[float]:
    """Return the seconds from each failure to the next process's first step."""
    return [
        attempt.start.startup_s + max(0.0, attempt.start.started_s - before.end.ended_s)
        for before, attempt in pairwise(ended)
        if before.end and before.start.number in failed
    ]
