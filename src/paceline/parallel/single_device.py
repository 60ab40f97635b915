"""One process, with nothing to join: on one device, or driving all GPUs of its node from one thread each."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from paceline.parallel.base import CommState, NoCommState, clip_to_norm, gradient_norm
from paceline.parallel.comm_hooks import CommTimes
from paceline.parallel.ddp import SwitchStage


class SingleDevice:
    """One rank on one device."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Do nothing: the first step is like the others."""

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Do nothing: there is no one to wait for."""

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Return the norm of the gradient, float32 [], and shorten it to `max_norm`."""
        norm = gradient_norm([each.grad for each in parameters if each.grad is not None])
        return clip_to_norm(parameters, norm, max_norm)

    def mean(self, value: Tensor) -> Tensor:
        """Return `value`."""
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Return `value`."""
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        """Return `value` as the only row."""
        return value.unsqueeze(0)

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the only rank is rank 0."""
        return contextlib.nullcontext()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, which are whole."""
        return dict(tensors)

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return `full`."""
        return full

    def comm_times(self) -> CommTimes | None:
        """Return None: nothing is sent."""
        return None

    def comm_state(self) -> CommState:
        """Return that of nothing."""
        return NoCommState()


class DataParallel:
    """One rank that copies its model to every visible GPU at each step and splits its batch over them.

    For comparison: the copies and the threads of one interpreter cost what ddp does not pay (Li et al. 2020, arXiv
    2006.15704, section 2.2). Only the batch norms of the first GPU keep statistics. Evaluation uses one GPU.
    """

    def __init__(self) -> None:
        self._single = SingleDevice()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped for all visible GPUs."""
        return nn.DataParallel(model)

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Do nothing: the first step is like the others."""

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Do nothing: there is no one to wait for."""

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Return the norm of the gradient, float32 [], and shorten it to `max_norm`."""
        return self._single.clip(parameters, max_norm)

    def mean(self, value: Tensor) -> Tensor:
        """Return `value`: outputs are gathered on the first GPU."""
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Return `value`: outputs are gathered on the first GPU."""
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        """Return `value` as the only row."""
        return value.unsqueeze(0)

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, which are whole."""
        return dict(tensors)

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return `full`."""
        return full

    def comm_times(self) -> CommTimes | None:
        """Return None: nothing is sent."""
        return None

    def comm_state(self) -> CommState:
        """Return that of nothing."""
        return NoCommState()
