"""Strategies of one process: a single device, or `nn.DataParallel` over all GPUs of the node."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from paceline.parallel.base import CommState, NoCommState, clip_to_norm, gradient_norm
from paceline.parallel.comm_hooks import CommTimes
from paceline.parallel.ddp import SwitchStage


class SingleDevice:
    """Train one rank on one device."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Do nothing: there are no buckets."""

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Do nothing: there is no other rank."""

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradient; return its norm before."""
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
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, which are whole."""
        return dict(tensors)

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return `full`."""
        return full

    def comm_times(self) -> CommTimes | None:
        """Return None."""
        return None

    def comm_state(self) -> CommState:
        """Return `NoCommState`."""
        return NoCommState()


class DataParallel:
    """`nn.DataParallel` over all visible GPUs, for comparison with ddp (arXiv 2006.15704, section 2.2).

    Only the first GPU's batch norms keep statistics. Evaluation uses one GPU.
    """

    def __init__(self) -> None:
        self._single = SingleDevice()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped."""
        return nn.DataParallel(model)

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Do nothing: there are no buckets."""

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Do nothing: there is no other rank."""

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradient; return its norm before."""
        return self._single.clip(parameters, max_norm)

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
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, which are whole."""
        return dict(tensors)

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return `full`."""
        return full

    def comm_times(self) -> CommTimes | None:
        """Return None."""
        return None

    def comm_state(self) -> CommState:
        """Return `NoCommState`."""
        return NoCommState()
