"""Estimate the time of a run while it trains, report it once, and compare it with the truth at the end. Rank 0 only."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from paceline.core.host import find_limits
from paceline.core.process import descendants, read_text_or_empty
from paceline.core.results import EstimateResult, Status
from paceline.core.world import World
from paceline.measure.throughput import RunTimer
from paceline.measure.time_estimate import PlannedWork, RunEstimator
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.sampler import Hard
from paceline.recipe.schema.train import Train
from paceline.training.context import RunContext
from paceline.training.eval_model import has_weight_average
from paceline.training.outputs import RunOutputs
from paceline.training.process import RunProcess
from paceline.training.state import TrainState

REPORT_AFTER_S: Final = 20.0
"""Seconds of training after which a run reports its estimate."""
_MIN_SHARE: Final = 0.2
"""Share of the steps after which a shorter run does."""
_SHARE_OF_LIMIT: Final = 0.3
"""Share of `train.max_time`, start-up included, after which a run with a short one does."""


class RunTiming:
    """Update `estimator` with each step, and pass an estimate to `report` once, `after_s` seconds into training."""

    def __init__(
        self,
        estimator: RunEstimator,
        timer: RunTimer,
        report: Callable[[EstimateResult], None],
        measure_memory: Callable[[], tuple[int, int]],
        after_s: float = REPORT_AFTER_S,
    ) -> None:
        self.estimator = estimator
        self._timer = timer
        self._report = report
        self._measure_memory = measure_memory
        self._after_s = after_s
        self._start = estimator.step
        self._estimate: EstimateResult | None = None
        self._memory: tuple[int, int] | None = None

    def step_ended(self, state: TrainState) -> None:
        """Count step `state.step` (from 0), and report the estimate when it is due."""
        self.estimator.update(state.step + 1)
        if self._estimate is None and self.estimator.is_ready and self._is_due():
            self._make_estimate()

    def _is_due(self) -> bool:
        planned = self.estimator.work.total_steps - self._start
        is_far = self.estimator.step - self._start >= _MIN_SHARE * planned
        return is_far or self._timer.process_elapsed_s >= self._after_s

    def _make_estimate(self) -> None:
        forecast = self.estimator.remaining()
        assert forecast is not None, "it is ready"
        used, total = self._memory = self._measure_memory()
        self._estimate = EstimateResult(
            step=self.estimator.step,
            made_s=self._timer.process_elapsed_s,
            forecast=forecast,
            memory_bytes=used,
            memory_total_bytes=total,
        )
        self._report(self._estimate)

    def estimate(self, status: Status) -> EstimateResult | None:
        """Return the estimate compared with the truth, now that the run has ended; see `RunResult.estimate`."""
        if self._estimate is None or status != "completed" or self._start:
            return None
        return self._estimate.ended(self._timer.process_elapsed_s)

    def forecast(self, status: Status) -> EstimateResult | None:
        """Return the time of the whole training from step 0, if a time limit ended it after two steps or more."""
        forecast = self.estimator.forecast(0) if status == "time_reached" else None
        if forecast is None:
            return None
        # Before the end there were loader workers.
        used, total = self._memory or self._measure_memory()
        return EstimateResult(step=0, made_s=0.0, forecast=forecast, memory_bytes=used, memory_total_bytes=total)


def build_planned_work(recipe: Recipe, plan: Plan, checkpoint_bytes: int = 0) -> PlannedWork:
    """Return the steps, evaluations and checkpoints of a run; each evaluation of averaged weights, too, has all views.

    A checkpoint has `checkpoint_bytes`.
    """
    sampler = recipe.data.sampler
    return PlannedWork.from_plan(
        plan,
        eval_passes=recipe.data.eval_views * (2 if has_weight_average(recipe.train, recipe.optim) else 1),
        evaluates_train=recipe.train.eval_train == "on",
        checkpoint_bytes=checkpoint_bytes,
        weigh_after=sampler.steps(plan.steps_per_epoch, plan.total_steps) if isinstance(sampler, Hard) else range(0),
    )


def add_timing(
    context: RunContext, process: RunProcess, outputs: RunOutputs, timer: RunTimer, state: TrainState
) -> tuple[RunOutputs, RunTiming | None]:
    """Return the outputs of rank 0 with a `RunTiming` that sees each step and pause; None on other ranks."""
    if outputs.goodput is None:
        return outputs, None
    work = build_planned_work(context.recipe, context.plan, outputs.checkpoint_bytes)
    left_s = _time_left(context.recipe.train, outputs)
    timing = RunTiming(
        RunEstimator(work, state.step, limit_s=left_s),
        timer,
        process.progress.on_estimate,
        lambda: measure_memory(context.world, context.device),
        min(REPORT_AFTER_S, _SHARE_OF_LIMIT * left_s),
    )
    log_pause, on_step = outputs.log_pause, outputs.on_step

    @contextmanager
    def pause(name: str, step: int) -> Iterator[None]:
        with log_pause(name, step), timing.estimator.paused(name, step):
            yield

    def step_ended(state: TrainState, lr: float) -> None:
        timing.step_ended(state)
        on_step(state, lr)

    return replace(outputs, log_pause=pause, on_step=step_ended), timing


def _time_left(section: Train, outputs: RunOutputs) -> float:
    assert outputs.goodput is not None
    return (
        float("inf") if section.max_time == "off" else max(0.0, section.max_time.seconds - outputs.goodput.running_s())
    )


def measure_memory(world: World, device: torch.device) -> tuple[int, int]:
    """Return the peak memory in bytes, and the memory there is: of this rank's GPU, or of the ranks of this node.

    On a CPU each rank counts like this one, with its loader workers, and the memory is that of the control group.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)[1]
    # Workers share most pages with their rank, so that only their proportional share counts.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    used = own + sum(map(_proportional_bytes, descendants(os.getpid())))
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return used * world.local_world_size, int(min(installed, find_limits().memory_bytes))


def _proportional_bytes(pid: int) -> int:
    """Return the proportional set size of a process (proc(5), smaps_rollup); 0 if it has ended."""
    lines = read_text_or_empty(f"/proc/{pid}/smaps_rollup").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
