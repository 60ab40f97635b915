"""Averaged weights: a moving average beside the raw ones, the average an optimizer keeps itself, or none.

An average belongs to a model whose parameters are there for good, so it is built after `Strategy.prepare`. It judges
nothing: `train.judge` puts it into the model for the length of an evaluation.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, RecipeError
from paceline.recipe.schema.section import Off
from paceline.recipe.schema.train import Ema
from paceline.train.optimizers.schedule_free import ScheduleFree
from paceline.train.precision import Named

UPDATES = "average.updates"
"""What the number of updates is called among the saved tensors."""


class Average(Protocol):
    """Follow the weights, and stand in for them."""

    @property
    def exists(self) -> bool:
        """Whether there are averaged weights at all."""
        ...

    def update(self, step: int) -> None:
        """Take in the weights that optimizer step `step`, from 0, has left: `weigh`, then `move`, where it is `due`."""
        ...

    def due(self, step: int) -> bool:
        """Whether the weights that optimizer step `step` leaves are taken in."""
        ...

    def weigh(self) -> None:
        """Settle what the next `move` weighs the new weights by, and count it: what only the host knows."""
        ...

    def move(self) -> None:
        """Take in the weights: what only the device does."""
        ...

    def weigh_on_device(self) -> None:
        """Let `weigh` write to the device from now on, where `move` finds it however it is called."""
        ...

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights; afterwards it has the raw ones, bit by bit."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to hold, by name: the tensors themselves, sharded where parameters are."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned, each sharded as it was. Raise `CheckpointError` for other names."""
        ...


class NoAverage:
    """Only the raw weights."""

    exists = False

    def update(self, step: int) -> None:
        """Do nothing."""

    def due(self, step: int) -> bool:
        """Return False: nothing moves."""
        return False

    def weigh(self) -> None:
        """Do nothing."""

    def move(self) -> None:
        """Do nothing."""

    def weigh_on_device(self) -> None:
        """Do nothing."""

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over nothing."""
        _check_names(tensors, ())


class ExponentialAverage:
    """An exponential moving average of parameters and batch-norm statistics, updated every `every` steps.

    average <- decay * average + (1 - decay) * weights, from the initial weights on; with `warmup`, update n, from 0,
    uses min(decay, (1 + n) / (10 + n)), as TensorFlow's ExponentialMovingAverage does. Averages are float32, of
    float64 weights float64; integers, such as the count of batches, are copied. What no checkpoint holds
    (non-persistent buffers) is left alone. `named` is what moves in place of the model's own tensors: the float32
    copies of 16-bit weights.
    """

    exists = True

    def __init__(self, model: nn.Module, decay: float, every: int, *, warmup: bool, named: Named = ()) -> None:
        self._decay = decay
        self._every = every
        self._warmup = warmup
        self._updates = torch.zeros((), dtype=torch.int64)  # on the host, where it is read at every update
        self._share: float | Tensor = 0.0  # of the weights in the next average
        state = model.state_dict(keep_vars=True)
        self._names = list(state)
        self._live = [tensor.detach() for tensor in state.values()]
        moved = dict(named)
        self._sources = [moved.get(name, live).detach() for name, live in state.items()]
        self._averages = [_wide(tensor) for tensor in self._sources]
        floating = [number for number, tensor in enumerate(self._live) if tensor.is_floating_point()]
        # Under FSDP parameters are sharded and buffers are not, and no operation over a list takes both.
        are_parameters = [isinstance(tensor, nn.Parameter) for tensor in state.values()]
        self._lists = [[number for number in floating if are_parameters[number] is wanted] for wanted in (True, False)]
        self._copied = [number for number, tensor in enumerate(self._live) if not tensor.is_floating_point()]

    def update(self, step: int) -> None:
        """Move the averages towards the weights, when it is time."""
        if self.due(step):
            self.weigh()
            self.move()

    def due(self, step: int) -> bool:
        """Whether it is time."""
        return (step + 1) % self._every == 0

    def weigh(self) -> None:
        """Settle the share of the weights in the next averages."""
        made = int(self._updates)
        decay = min(self._decay, (1 + made) / (10 + made)) if self._warmup else self._decay
        if isinstance(self._share, Tensor):
            self._share.fill_(1 - decay)
        else:
            self._share = 1 - decay
        self._updates += 1

    @torch.no_grad()
    def move(self) -> None:
        """Move the averages towards the weights. A share on the device takes a kernel for each of them."""
        for numbers in filter(None, self._lists):
            averages = [self._averages[number] for number in numbers]
            moved = [self._sources[number].to(average.dtype) for number, average in zip(numbers, averages, strict=True)]
            if isinstance(self._share, Tensor):
                torch._foreach_lerp_(averages, moved, [self._share] * len(averages))
            else:
                torch._foreach_lerp_(averages, moved, self._share)
        for number in self._copied:
            self._averages[number].copy_(self._live[number])

    def weigh_on_device(self) -> None:
        """Keep the share in float32 beside the averages."""
        self._share = torch.zeros((), device=self._averages[0].device)

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averages, in its own number format."""
        return _replaced(self._live, self._averages)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by the names of the model's tensors, and the number of updates made."""
        return {**dict(zip(self._names, self._averages, strict=True)), UPDATES: self._updates}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over averages and number of updates."""
        own = self.tensors()
        _check_names(tensors, own)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class OptimizerAverage:
    """The average that schedule-free SGD keeps itself; its state is in the optimizer's.

    Buffers stay as they are: batch-norm statistics are those of the weights that were trained with.
    """

    exists = True

    def __init__(self, model: nn.Module, optimizer: ScheduleFree) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not {id(each) for each in self._parameters} <= {id(each) for each in model.parameters()}:
            # The average would be of the master copy, and the model evaluated as it is.
            raise RecipeError("optim.name: schedule_free keeps no master copy (set train.precision=bf16 or fp32)")

    def update(self, step: int) -> None:
        """Do nothing: the optimizer has."""

    def due(self, step: int) -> bool:
        """Return False: nothing moves."""
        return False

    def weigh(self) -> None:
        """Do nothing."""

    def move(self) -> None:
        """Do nothing."""

    def weigh_on_device(self) -> None:
        """Do nothing."""

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the parameters are the averaged ones."""
        return _replaced(self._parameters, [self._optimizer.average_of(each) for each in self._parameters])

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: the optimizer's state is saved as such."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over nothing."""
        _check_names(tensors, ())


def build_average(
    section: Ema | Off, model: nn.Module, optimizer: torch.optim.Optimizer | None, named: Named
) -> Average:
    """Return the average of `train.ema`, or the optimizer's own, of the weights `model` has once it is prepared.

    `named` is what the optimizer moves, by the model's names, as `Weights.named` returns it.
    Raise `RecipeError` when both are asked for, or the optimizer moves other weights than the model's.
    """
    match section, optimizer:
        case Ema(), ScheduleFree():
            raise RecipeError("train.ema: has no effect with optim.name schedule_free, which averages (set it to off)")
        case Ema(), _:
            return ExponentialAverage(model, section.decay, section.every, warmup=section.warmup, named=named)
        case _, ScheduleFree():
            return OptimizerAverage(model, optimizer)
        case _:
            return NoAverage()


def _wide(tensor: Tensor) -> Tensor:
    """Return a copy in float32 at least; integers keep their type."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype, copy=True)


@contextlib.contextmanager
def _replaced(live: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Put `values` into `live` for a while; they are copied, so that addresses, which CUDA graphs know, stay."""
    kept = [tensor.detach().clone() for tensor in live]
    try:
        _copy(live, values)
        yield
    finally:
        _copy(live, kept)


@torch.no_grad()
def _copy(live: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(live, values, strict=True):
        tensor.copy_(value)


def _check_names(given: Mapping[str, Tensor], own: Mapping[str, Tensor] | Sequence[str]) -> None:
    wrong = sorted(set(given) ^ set(own))
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(f"average: {wrong[0]}{more} do not fit the recipe (resume with the run's own recipe)")
