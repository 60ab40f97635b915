"""DistributedDataParallel: replicas whose gradients are averaged during backward, with exposed communication timed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import WorldError
from paceline.core.stages import EXPOSED
from paceline.parallel.base import (
    CommState,
    NoCommState,
    all_gather_rows,
    broadcast_buffers,
    clip_to_norm,
    gradient_norm,
    mean_over_ranks,
    sum_over_ranks,
)
from paceline.parallel.comm_hooks import CommHook, CommTimes

FORWARD: Final = "forward"

SwitchStage = Callable[[str], None]
"""Charges what follows to the stage of that name. On a GPU, backward calls it from a thread of torch's."""


@final
class LastGradientHook:
    """Call `ready` in a backward pass when the last gradient of this rank is there, before it is sent.

    Which parameter's it is follows from the network. It is learnt in the first backward pass, in which every
    parameter tells and `ready` is not called; from then on one hook is left. Where that parameter takes no part in a
    later pass, `ready` is not called in it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ready: Callable[[], None]) -> None:
        self._ready = ready
        self._last: torch.Tensor | None = None
        trainable = [each for each in parameters if each.requires_grad]
        self._learning = [
            each.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
            for each in trainable
        ]

    def end_pass(self) -> None:
        """Keep what a backward pass has taught, if there was one. Call it between passes."""
        if self._last is None:
            return
        for hook in self._learning:
            hook.remove()
        self._learning.clear()
        self._last.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: self._ready()
        )
        self._last = None

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self._last = parameter


@final
class GradReadyHook:
    """Turn to `exposed_communication` while `replica` waits for other ranks, and back to `forward` after buffers.

    Waiting for gradients ends with backward, in whose stage it lies. With `compiled`, torch's compiler is told to leave
    the hooks alone: they stand around the graph of the model and never in it.
    """

    def __init__(self, replica: DistributedDataParallel, switch_stage: SwitchStage, *, compiled: bool) -> None:
        self._replica = replica
        self._switch_stage = switch_stage
        self._receives = False
        self._last_gradient = LastGradientHook(replica.module.parameters(), self._gradients_are_ready)
        if any(True for _ in replica.module.buffers()):
            aside: Callable[[Any], Any] = torch.compiler.disable if compiled else _identity
            replica.register_forward_pre_hook(aside(self._before_buffers))
            replica.module.register_forward_pre_hook(aside(self._before_forward))

    def end_pass(self) -> None:
        """Take note that a backward pass may have ended. Call it before a micro-batch."""
        self._last_gradient.end_pass()

    def _gradients_are_ready(self) -> None:
        if self._replica.require_backward_grad_sync:  # else more micro-batches follow, and nothing is sent
            self._switch_stage(EXPOSED)

    def _before_buffers(self, module: nn.Module, args: object) -> None:
        if self._replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._receives = True
            self._switch_stage(EXPOSED)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        # Evaluation calls the model itself, and receives nothing.
        if self._receives:
            self._receives = False
            self._switch_stage(FORWARD)


def _identity(hook: Any) -> Any:
    return hook


CLIP_STAGE: Final = "optimizer"
"""The stage in which gradients are shortened."""

_RANK_0_WEIGHTS_ONLY: Final = (
    "resumed with rank 0's weights on every rank: with parallel.sync_gradients=false no others are saved"
)


class DDP:
    """Replicas that average their gradients while backward runs (Li et al. 2020, arXiv 2006.15704).

    Before each forward the buffers of rank 0 go to all ranks, so that a resumed run starts from what an
    uninterrupted one would have used.

    Without `averages` every rank trains alone, to show what communication costs: weights, buffers and gradients are
    each rank's own, and of a step only one number is sent, by which ranks decide alike (`clip`).
    """

    def __init__(
        self,
        device: torch.device,
        *,
        bucket_mb: float | None,
        bucket_view: bool,
        static_graph: bool,
        averages: bool,
        wiring: CommHook,
    ) -> None:
        self._device = device
        self._bucket_mb = bucket_mb
        self._bucket_view = bucket_view
        self._static_graph = static_graph
        self._averages = averages
        self._comm_hook = wiring
        self._module: DistributedDataParallel | None = None
        self._end_pass: Callable[[], None] = _do_nothing
        self._switch_stage: SwitchStage = _ignore_stage

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped, with rank 0's parameters and buffers on every rank."""
        self._module = DistributedDataParallel(
            model,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=self._bucket_view,
            static_graph=self._static_graph,
        )
        # Only now: the constructor gives all ranks the same buffers to start with.
        self._module.broadcast_buffers = self._averages
        self._comm_hook.attach(self._module)
        return self._module

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Call `step` first, so that a process that resumes sums gradients in the order of one that never stopped.

        Torch groups parameters into buckets anew after the first backward pass of a process, or for a static graph
        after the second, by the order in which gradients arrived. Which ones share a bucket decides in which order the
        ranks' numbers are added, which on more than two ranks shows in the last bits. What is kept between steps is
        kept by bucket: then two ranks need it too, and one pass more, which shows what the buckets are.
        """
        is_kept = self.comm_state().has_state
        if self._averages and (is_kept or dist.get_world_size() > 2):
            for _ in range(1 + self._static_graph + is_kept):
                step()
        self._comm_hook.reset()

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Turn to `exposed_communication` from the last gradient of this rank on, and while buffers come in.

        A rank that trains alone waits neither there nor then, but in `clip`.
        """
        assert self._module is not None, "prepare comes first"
        if self._averages:
            self._end_pass = GradReadyHook(self._module, switch_stage, compiled=compiled).end_pass
        else:
            self._switch_stage = switch_stage

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context without communication for all but the final micro-batch.

        Raise `WorldError` for a static graph, with which torch cannot leave communication out.
        """
        assert self._module is not None, "prepare comes first"
        self._end_pass()
        if final and self._averages:
            return contextlib.nullcontext()
        if self._static_graph:
            raise WorldError(
                "parallel.static_graph: true does not go with micro-batches (set parallel.static_graph=false, "
                "or train.accumulate=1)"
            )
        return self._module.no_sync()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Return the norm of the averaged gradient, which every rank has whole, and shorten it to `max_norm`.

        Where each rank trains alone it shortens its own gradient by its own norm; returned is the mean of all norms,
        which is no number where one of them is none. A rank that stopped or skipped by itself would leave the others
        alone in the next collective. The largest norm would tell as much, but what libraries make of the larger of
        1 and NaN differs.
        """
        norm = gradient_norm([each.grad for each in parameters if each.grad is not None])
        own_norm = clip_to_norm(parameters, norm, max_norm)
        if self._averages:
            return own_norm
        self._switch_stage(EXPOSED)
        mean_norm = mean_over_ranks(own_norm)
        self._switch_stage(CLIP_STAGE)
        return mean_norm

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks."""
        return mean_over_ranks(value)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return sum_over_ranks(value)

    def all_gather(self, value: Tensor) -> Tensor:
        """Return the ranks' values as rows."""
        return all_gather_rows(value)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Broadcast rank 0's buffers; the model itself, unlike its wrapper, waits for no one."""
        broadcast_buffers(model)
        yield

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`: every rank has them whole."""
        return dict(tensors)

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return `full`."""
        return full

    def comm_times(self) -> CommTimes | None:
        """Return what each bucket took, where it is timed."""
        return self._comm_hook.times()

    def comm_state(self) -> CommState:
        """Return what compression keeps. Of ranks that train alone, checkpoints have rank 0's weights and no others."""
        return self._comm_hook.state() if self._averages else NoCommState(_RANK_0_WEIGHTS_ONLY)


def _do_nothing() -> None:
    """Settle nothing: nobody listens."""


def _ignore_stage(stage: str) -> None:
    """Turn to no other stage: nobody listens."""
