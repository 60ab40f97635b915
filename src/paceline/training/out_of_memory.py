"""Turn out-of-memory errors of training into one line that names the setting to change."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.core.units import count, size
from paceline.data.batch import Batch
from paceline.measure.memory import DEVICE_SHARE, device_limit
from paceline.recipe.plan import list_accumulations
from paceline.training.context import RunContext
from paceline.training.saver import TrainingState
from paceline.training.state import TrainState
from paceline.training.trainer import TrainStep

_ELSE: Final = "train.precision=amp, model.checkpoint_activations=true, or a smaller data.image_size"
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is that of an allocator: torch's for GPUs and CPUs, or Python's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # `DefaultCPUAllocator`


@dataclass(frozen=True)
class ExplainedStep:
    """Run `step`, and turn its out-of-memory errors into a `RecipeError` that suggests `train.accumulate`."""

    step: TrainStep
    context: RunContext
    training: TrainingState

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Run a step; return this rank's mean loss [] on the device."""
        try:
            return self.step(batch, state)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            context, plan, now = self.context, self.context.plan, self.context.recipe.train.num_micro_batches
            numbers = list_accumulations(context.recipe, plan.world_size)
            overload = _overload(context, self.training, error)
            number = suggest_accumulation(numbers, now, overload)
            fix = f"train.accumulate=auto, or at least {number}; or {_ELSE}" if number else _ELSE
            raise RecipeError(
                f"train.accumulate: {now}: {_where(context, error)} in step {state.step + 1:,}, with micro-batches of "
                f"{count(plan.micro_batch, 'image')} (set {fix})"
            ) from None


@contextmanager
def explain_others(context: RunContext) -> Iterator[None]:
    """Raise a `RecipeError` for running out of memory outside of steps: in evaluation, loading or start-up."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        batch, workers = context.plan.eval_batch, context.loader_choice.workers
        other = f"data.workers, which is {workers}" if workers else "free some memory"
        raise RecipeError(
            f"data.eval_batch_size: {batch}: {_where(context, error)} outside of training steps (lower it, or {other})"
        ) from None


def suggest_accumulation(numbers: list[int], now: int, overload: float) -> int | None:
    """Return the smallest of `numbers` that is at least `overload` times, and at least twice, as many as `now`.

    `overload` is the memory that activations need relative to what they may use.
    """
    least = now * max(2, math.ceil(overload))
    return next((number for number in numbers if number >= least), numbers[-1] if numbers[-1] > now else None)


def _overload(context: RunContext, training: TrainingState, error: BaseException) -> float:
    if context.device.type != "cuda":
        return 1.0
    parameters = [each for group in training.optimizer.param_groups for each in group["params"]]
    values = [value for state in training.optimizer.state.values() for value in state.values()]
    kept = 2 * sum(each.nbytes for each in parameters)  # weights and gradients
    kept += sum(value.nbytes for value in values if isinstance(value, Tensor))
    allowed = DEVICE_SHARE * device_limit(context.device) - kept
    activations = torch.cuda.max_memory_allocated(context.device) + _tried_bytes(error) - kept
    return activations / allowed if allowed > 0 else math.inf


def _tried_bytes(error: BaseException) -> float:
    """Return the size of the allocation that failed, 0 if the message does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", str(error), re.IGNORECASE)
    if found:
        return float(found[1]) * _UNITS[found[2]]
    found = re.search(r"tried to allocate (\d+) bytes", str(error))
    return float(found[1]) if found else 0.0


def _where(context: RunContext, error: BaseException) -> str:
    is_gpu, tried = context.device.type == "cuda", _tried_bytes(error)
    kind = f"the {size(device_limit(context.device))} of its GPU" if is_gpu else "host memory"
    more = f" when it asked for another {size(tried)}" if tried else ""
    return f"rank {context.world.rank} ran out of {kind}{more}"
