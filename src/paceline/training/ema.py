"""Weight averages: an exponential moving average (EMA), or the average that a schedule-free optimizer keeps."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, RecipeError
from paceline.recipe.schema.base import Off
from paceline.recipe.schema.train import Ema
from paceline.training.optim.schedule_free import ScheduleFree
from paceline.training.precision import NamedParameters

NUM_UPDATES_KEY = "average.updates"
"""Key of the number of updates among the saved tensors."""


class WeightAverage(Protocol):
    """An average of the weights."""

    def update(self, step: int) -> None:
        """Include the weights after optimizer step `step` (from 0), if an update is due."""
        ...

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights. The raw weights are restored bit by bit."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint needs, by name, sharded if the parameters are."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned, in the same sharding. Raise `CheckpointError` for other names."""
        ...


class ExponentialMovingAverage:
    """EMA of parameters and BatchNorm statistics, updated every `every` steps.

    average <- decay * average + (1 - decay) * weights, starting from the initial weights. With `warmup`, update n (from
    0) uses min(decay, (1 + n) / (10 + n)), as in TensorFlow's ExponentialMovingAverage. Averages are at least float32;
    integers are copied. `named` has the float32 master copies of parameters, which are averaged instead.
    """

    def __init__(
        self, model: nn.Module, decay: float, every: int, *, warmup: bool, named: NamedParameters = ()
    ) -> None:
        self._decay = decay
        self._every = every
        self._warmup = warmup
        self._updates = torch.zeros((), dtype=torch.int64)  # on the host, where every update reads it
        state = model.state_dict(keep_vars=True)
        self._names = list(state)
        self._model_tensors = [tensor.detach() for tensor in state.values()]
        masters = dict(named)
        self._sources = [masters.get(name, live).detach() for name, live in state.items()]
        self._averaged = [_to_float32(tensor) for tensor in self._sources]
        floating = [number for number, tensor in enumerate(self._model_tensors) if tensor.is_floating_point()]
        # FSDP shards parameters but not buffers, and no foreach operation accepts both.
        are_parameters = [isinstance(tensor, nn.Parameter) for tensor in state.values()]
        self._foreach_groups = [
            [number for number in floating if are_parameters[number] is wanted] for wanted in (True, False)
        ]
        self._copied = [number for number, tensor in enumerate(self._model_tensors) if not tensor.is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the weights if an update is due."""
        if (step + 1) % self._every:
            return
        num_updates = int(self._updates)
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates)) if self._warmup else self._decay
        self._updates += 1
        for numbers in filter(None, self._foreach_groups):
            averages = [self._averaged[number] for number in numbers]
            values = [
                self._sources[number].to(average.dtype) for number, average in zip(numbers, averages, strict=True)
            ]
            torch._foreach_lerp_(averages, values, 1 - decay)
        for number in self._copied:
            self._averaged[number].copy_(self._model_tensors[number])

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averages, cast to its dtypes."""
        return _swapped_in(self._model_tensors, self._averaged)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by the model's names, and the number of updates."""
        return {**dict(zip(self._names, self._averaged, strict=True)), NUM_UPDATES_KEY: self._updates}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load averages and number of updates."""
        targets = self.tensors()
        _check_average_names(tensors, targets)
        for name, tensor in targets.items():
            tensor.copy_(tensors[name])


class OptimizerWeightAverage:
    """The average that schedule-free SGD keeps. Buffers, such as BatchNorm statistics, are not averaged."""

    def __init__(self, model: nn.Module, optimizer: ScheduleFree) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not {id(each) for each in self._parameters} <= {id(each) for each in model.parameters()}:
            # The average would follow the master copy, and evaluation would use the model's own weights.
            raise RecipeError("optim.name: schedule_free keeps no master copy (set train.precision=bf16 or fp32)")

    def update(self, step: int) -> None:
        """Do nothing: the optimizer updates the average."""

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the parameters are the averaged ones."""
        return _swapped_in(self._parameters, [self._optimizer.average_of(each) for each in self._parameters])

    def tensors(self) -> dict[str, Tensor]:
        """Return {}: the average is part of the optimizer's state."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that `tensors` is empty."""
        _check_average_names(tensors, ())


def build_weight_average(
    section: Ema | Off, model: nn.Module, optimizer: torch.optim.Optimizer | None, named: NamedParameters
) -> WeightAverage | None:
    """Return the average of `train.ema` or of the optimizer for a prepared `model`; None if there is none.

    `named` is from `Precision.optimized_parameters`. Raise `RecipeError` if both are configured, or if a
    schedule-free optimizer updates master weights.
    """
    match section, optimizer:
        case Ema(), ScheduleFree():
            raise RecipeError("train.ema: has no effect with optim.name schedule_free, which averages (set it to off)")
        case Ema(), _:
            return ExponentialMovingAverage(model, section.decay, section.every, warmup=section.warmup, named=named)
        case _, ScheduleFree():
            return OptimizerWeightAverage(model, optimizer)
        case _:
            return None


def load_averages(average: WeightAverage | None, tensors: Mapping[str, Tensor]) -> None:
    """Load the averages of a checkpoint. Raise `CheckpointError` if they are not those of the recipe."""
    if average is None:
        _check_average_names(tensors, ())
    else:
        average.load(tensors)


def _to_float32(tensor: Tensor) -> Tensor:
    """Return a copy in at least float32; integers keep their dtype."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype, copy=True)


@contextlib.contextmanager
def _swapped_in(live: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Temporarily copy `values` into `live`, in place: CUDA graphs refer to the addresses."""
    saved = [tensor.detach().clone() for tensor in live]
    try:
        _copy_tensors(live, values)
        yield
    finally:
        _copy_tensors(live, saved)


@torch.no_grad()
def _copy_tensors(live: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(live, values, strict=True):
        tensor.copy_(value)


def _check_average_names(given: Mapping[str, Tensor], expected: Mapping[str, Tensor] | Sequence[str]) -> None:
    wrong = sorted(set(given) ^ set(expected))
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(f"average: {wrong[0]}{more} do not fit the recipe (resume with the run's own recipe)")
