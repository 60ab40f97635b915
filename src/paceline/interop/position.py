"""Position of a training loop in the global steps of an exact order."""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, Self

from paceline.core.errors import CheckpointError


class Position:
    """Count a loop's steps. Each iteration is the next epoch, or the rest of the epoch of a loaded state.

    `step` is the global step of the next batch, and `start` that of the first batch of the next iteration, both counted
    from 0 through all epochs. `resumed_epoch` is the epoch of the last resume. `identity` has the settings on which the
    samples of a step depend.
    """

    def __init__(self, steps_per_epoch: int, identity: Mapping[str, int | str]) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.step = self.start = 0
        self._identity = dict(identity)
        self.resumed_epoch = 0

    def copy(self) -> Self:
        """Return an independent copy."""
        return copy(self)

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, from 0."""
        return self.start // self.steps_per_epoch

    def iterate(self) -> Iterator[int]:
        """Yield the global steps of the next iteration. The consumer sets `step` once it has the batch."""
        first = self.start
        self.start = (first // self.steps_per_epoch + 1) * self.steps_per_epoch
        yield from range(first, self.start)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        # The same epoch keeps the position of a loaded state: trainers call this before the first epoch after a resume.
        if epoch != self.epoch:
            self.start = epoch * self.steps_per_epoch
        self.step = self.start

    def resume(self, step: int) -> None:
        """Start the next iteration at global step `step`."""
        self.step = self.start = step
        self.resumed_epoch = self.epoch

    def state_dict(self) -> dict[str, int | str]:
        """Return `step` and the identity."""
        return {"step": self.step, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the step of `state`. Raise `CheckpointError` for another identity and for an invalid step."""
        for name in dict.fromkeys((*self._identity, *state)):
            saved, value = state.get(name), self._identity.get(name)
            if name != "step" and saved != value:
                raise CheckpointError(
                    f"loader: the state has {name} {saved}, but this loader {value} (use the recipe or the arguments "
                    f"that it was saved with)"
                )
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(
                f"loader: the state has step {step!r} (load the return value of a loader's state_dict)"
            )
        self.resume(step)
