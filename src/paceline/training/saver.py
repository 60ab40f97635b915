"""Capture the training state of all ranks, save it through rank 0, and restore it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.core.results import Status
from paceline.data.hard_sampler import ImageWeights
from paceline.parallel.strategy import Strategy
from paceline.training.checkpoint import (
    CheckpointWriter,
    ConvertTensors,
    FinalSave,
    Snapshot,
    is_weights_only,
    load_optimizer,
    load_tensor_group,
    model_tensors,
    optimizer_tensors,
    read_state,
)
from paceline.training.ema import WeightAverage, load_averages
from paceline.training.goodput import TimeSpent
from paceline.training.lr_schedule import LrSchedule
from paceline.training.optim.extra_state import GROUP_PREFIX, ExtraOptimizerState
from paceline.training.optim.schedule_free import ScheduleFree
from paceline.training.precision import Precision
from paceline.training.state import TrainState

_COMM_STATE: Final = "compression"
_IMAGE_WEIGHTS: Final = "image_weights"


@dataclass(frozen=True)
class TrainingState:
    """The components of a run that checkpoints save, beside its progress."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LrSchedule
    precision: Precision
    average: WeightAverage | None
    strategy: Strategy
    extra_state: ExtraOptimizerState
    image_weights: ImageWeights = field(default_factory=ImageWeights)

    def state_dict(self, state: TrainState, saved: Mapping[str, Any]) -> Snapshot:
        """Return the state of all components, gathered from all ranks, and the values `saved`. Collective.

        Raise `RecipeError` if the state of a plugin optimizer cannot be saved.
        """
        powersgd = self.strategy.powersgd
        tensors = {
            "model": model_tensors(self.model),
            "optimizer": {**optimizer_tensors(self.optimizer), **self.extra_state.tensors()},
            "precision": self.precision.tensors(),
            "average": self.average.tensors() if self.average else {},
            _COMM_STATE: powersgd.tensors() if powersgd else {},
            _IMAGE_WEIGHTS: _weights_to_tensors(self.image_weights),
        }
        comm_values = powersgd.values(self.model) if powersgd else {}
        values = {
            "train": state.to_dict(),
            "schedule": self.schedule.state_dict(),
            "scale": self.precision.scaler.state_dict() if self.precision.scaler else {},
            **self.extra_state.values(),
            **({_COMM_STATE: comm_values} if comm_values else {}),
            **saved,
        }
        # An optimizer may have no state yet, but its file always exists.
        groups = {name: group for name, group in tensors.items() if group or name == "optimizer"}
        averages = "optimizer" if isinstance(self.optimizer, ScheduleFree) else "average"
        gathered = {name: self.strategy.gather(group) for name, group in groups.items()}
        return Snapshot(gathered, values, frozenset({"model", averages}))

    def load_state_dict(self, checkpoint: Path) -> TrainState:
        """Load the state of `checkpoint`, whose weights are already loaded; return the progress.

        Raise `CheckpointError` for an intact checkpoint of another run.
        """
        with _raising_mismatch(checkpoint):
            return self._load_state(checkpoint)

    def load_comm_state(self, checkpoint: Path) -> str:
        """Load the state of gradient compression after all warm-up passes; return a note if some is lost.

        Raise `CheckpointError` as `load_state_dict`.
        """
        with _raising_mismatch(checkpoint):
            values, tensors = read_state(checkpoint).get(_COMM_STATE, {}), load_tensor_group(checkpoint, _COMM_STATE)
            powersgd = self.strategy.powersgd
            if powersgd:
                return powersgd.load(self.model, values, tensors)
            if not values:
                return ""
            return f"resumed without PowerSGD's residuals of {values['ranks']} ranks: a single rank sends no gradients"

    def _load_state(self, checkpoint: Path) -> TrainState:
        moments, values = load_tensor_group(checkpoint, "optimizer"), read_state(checkpoint)
        of_parameters = {name: tensor for name, tensor in moments.items() if not name.startswith(GROUP_PREFIX)}
        load_optimizer(self.optimizer, of_parameters, shard_like=self.strategy.shard_like)
        self.extra_state.load(values, moments)
        average, master, scaler = self.average, self.precision.master, self.precision.scaler
        if master and not is_weights_only(checkpoint):  # which is loaded by a run at its end, and trains no more
            master.load(self._shard(load_tensor_group(checkpoint, "precision"), master.tensors()))
        averages = self._shard(load_tensor_group(checkpoint, "average"), average.tensors() if average else {})
        load_averages(average, averages)
        self.schedule.load_state_dict(values["schedule"])
        if scaler:
            scaler.load_state_dict(values["scale"])
        if weights := load_tensor_group(checkpoint, _IMAGE_WEIGHTS):
            self.image_weights.update(weights["values"].numpy(), int(weights["step"]))
        return TrainState.from_dict(values["train"])

    def _shard(self, full: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self.strategy.shard_like(tensor, own[name]) if name in own else tensor
            for name, tensor in full.items()
        }


def _weights_to_tensors(weights: ImageWeights) -> dict[str, Tensor]:
    if not len(weights.values):
        return {}
    return {"values": torch.from_numpy(weights.values), "step": torch.tensor(weights.step)}


def require_optimizer_state(checkpoint: Path) -> None:
    """Raise `CheckpointError` if training cannot continue from `checkpoint`, which has only the weights."""
    if is_weights_only(checkpoint):
        run = checkpoint.parent.parent
        raise CheckpointError(
            f"{checkpoint}: has only the weights, as the disk was full, and training needs the optimizer's state too "
            f"(start a new run from its weights: model.weights={run})"
        )


@contextlib.contextmanager
def _raising_mismatch(checkpoint: Path) -> Iterator[None]:
    """Convert errors of a `checkpoint` that does not fit into `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        first = " ".join(str(error).split())[:150]
        raise CheckpointError(
            f"{checkpoint}: was written by another run or paceline version: {first} (start a new run)"
        ) from None


def load_average_tensors(
    checkpoint: Path,
    average: WeightAverage | None,
    optimizer: torch.optim.Optimizer | None,
    convert: ConvertTensors = dict,
) -> None:
    """Load only the averaged weights, unsharded and converted. Raise `CheckpointError` if the checkpoint has none."""
    if isinstance(optimizer, ScheduleFree):
        load_optimizer(optimizer, load_tensor_group(checkpoint, "optimizer"))
    elif average:
        tensors = convert(load_tensor_group(checkpoint, "average"))
        if not tensors:
            raise CheckpointError(f"train.ema: {checkpoint} has no averaged weights (set train.ema=off)")
        average.load(tensors)


@dataclass(frozen=True)
class CheckpointSaver:
    """Save the state of all ranks with `checkpoint_values`; only rank 0 has a `writer`. Collective."""

    training_state: TrainingState
    checkpoint_values: Mapping[str, Any]
    writer: CheckpointWriter | None
    time_spent: Callable[[], TimeSpent]

    def __call__(self, state: TrainState, final: FinalSave = "") -> None:
        """Save `state` and the training state."""
        state.spent = self.time_spent()
        snapshot = self.training_state.state_dict(state, self.checkpoint_values)
        if self.writer:
            self.writer.save(state.step, state.best_step, snapshot, final)

    def finish(self, state: TrainState, status: Status) -> Status:
        """Wait until all is on disk; return `status`, or on rank 0 `failed` if the final weights were not saved.

        Raise `CheckpointError` if a preempted run could not be saved.
        """
        if self.writer is None:
            return status
        self.writer.flush()
        is_lost = self.writer.result().failed and self.writer.saved_step != state.step
        if is_lost and status == "preempted":
            last = f"is that of step {self.writer.saved_step}" if self.writer.saved_step >= 0 else "is an earlier one"
            raise CheckpointError(
                f"train: the run stopped at step {state.step}, which could not be saved; the last checkpoint {last} "
                f"(see the warnings, and resume)"
            )
        return "failed" if is_lost else status
