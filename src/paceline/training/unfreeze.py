"""Train frozen parameters from a later step on (`model.unfreeze`). The phase is a pure function of the step."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from paceline.core.stages import UNFREEZE
from paceline.data.batch import Batch
from paceline.models.freeze import list_frozen, set_trained, set_training_mode
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model
from paceline.training.checkpoint import read_state
from paceline.training.pause_log import LogPause
from paceline.training.state import TrainState
from paceline.training.trainer import EagerStep, StepSeeder


@dataclass(frozen=True)
class Unfreezing:
    """The parameters `names` are trained from global step `step` on; no names without `model.unfreeze`."""

    section: Model
    names: frozenset[str]
    step: int
    num_classes: int

    def is_done(self, step: int) -> bool:
        """Return whether global step `step`, from 0, trains them."""
        return bool(self.names) and step >= self.step

    def unfreeze(self, model: nn.Module) -> None:
        """Train the parameters, and put the frozen modules into training mode, in place."""
        set_trained(model, self.names, is_trained=True)
        set_training_mode(self.section.model_copy(update={"freeze": "off"}), model, self.num_classes)

    @contextlib.contextmanager
    def all_trained(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the parameters of every phase require gradients, as the optimizer holds them."""
        frozen = [parameter for name, parameter in model.named_parameters() if name in self.names]
        before = [parameter.requires_grad for parameter in frozen]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter, requires_grad in zip(frozen, before, strict=True):
                parameter.requires_grad_(requires_grad)


def build_unfreezing(section: Model, plan: Plan, model: nn.Module) -> Unfreezing:
    """Return what `section.unfreeze` says about an unprepared `model`."""
    names = list_frozen(section, model, plan.num_classes) if plan.unfreeze_step else frozenset()
    return Unfreezing(section, names, plan.unfreeze_step, plan.num_classes)


def read_step(checkpoint: Path) -> int:
    """Return the number of steps that a checkpoint was saved after."""
    return int(read_state(checkpoint).get("train", {}).get("step", 0))


@dataclass
class UnfreezingStep:
    """Train by `step`, and from global step `first_step` on by what `unfreeze` makes of it."""

    step: EagerStep
    first_step: int
    unfreeze: Callable[[EagerStep], EagerStep]
    seeder: StepSeeder
    log_pause: LogPause

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Run a step with seeded generators; return this rank's mean loss [] on the device."""
        if state.step == self.first_step:
            with self.step.clock.paused(UNFREEZE), self.log_pause(UNFREEZE, state.step):
                self.step = self.unfreeze(self.step)
            self.seeder.seed_step(state.step)  # warm-up passes draw random numbers
        return self.step(batch, state)
