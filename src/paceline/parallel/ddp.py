"""DistributedDataParallel: replicas whose gradients are averaged during backward, with exposed communication timed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import WorldError
from paceline.core.stages import EXPOSED
from paceline.parallel.collectives import broadcast_buffers, mean_over_ranks
from paceline.parallel.comm_hooks import CommHook, PowerSGD
from paceline.parallel.strategy import Strategy, SwitchStage

FORWARD: Final = "forward"
CLIP_STAGE: Final = "optimizer"


class DDP(Strategy):
    """Average gradients over the replicas while backward runs (Li et al. 2020, arXiv 2006.15704).

    Without `sync_gradients` every rank trains alone, which measures the cost of communication: ranks exchange only the
    mean gradient norm, so that they make the same decisions.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        *,
        bucket_mb: float | None,
        bucket_view: bool,
        static_graph: bool,
        sync_gradients: bool,
        comm_hook: CommHook | None,
    ) -> None:
        self.world_size = world_size
        self.comm_hook = comm_hook
        self._device = device
        self._bucket_mb = bucket_mb
        self._bucket_view = bucket_view
        self._static_graph = static_graph
        self._sync_gradients = sync_gradients
        self._module: DistributedDataParallel | None = None
        self._wait_hook: GradReadyHook | None = None
        self._end_pass: Callable[[], None] = _do_nothing
        self._switch_stage: SwitchStage = _ignore_stage

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped; DDP's constructor broadcasts rank 0's parameters and buffers."""
        return self._wrap(model, init_sync=True)

    def unfreeze(self, model: nn.Module, set_trained: Callable[[], None]) -> nn.Module:
        """Wrap the model anew, as DDP sends the gradients of those parameters that it found trained."""
        assert self._module is not None, "prepare comes first"
        if self._wait_hook:
            self._wait_hook.remove()
        self._wait_hook, self._end_pass = None, _do_nothing
        self._module._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        set_trained()
        # The replicas are equal already, or differ for good without `sync_gradients`.
        return self._wrap(model, init_sync=False)

    def _wrap(self, model: nn.Module, *, init_sync: bool) -> nn.Module:
        self._module = DistributedDataParallel(
            model,
            init_sync=init_sync,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=self._bucket_view,
            static_graph=self._static_graph,
        )
        # Broadcast rank 0's buffers before each forward: only they are saved, so a resumed run has the same bits. Not
        # in the constructor's arguments, which would also skip the initial broadcast.
        self._module.broadcast_buffers = self._sync_gradients
        if self.comm_hook:
            self.comm_hook.attach(self._module)
        return self._module

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Call `step` until the buckets are final, so that a resumed process reduces as one that never stopped."""
        # Torch regroups parameters into buckets after the first backward pass of a process (after the second with a
        # static graph), by the order in which gradients arrived. Buckets decide the order in which a collective adds
        # the ranks' numbers, and so the last bits on more than two ranks. Compression keeps state per bucket, so it
        # needs this on two ranks too, and one more pass to see the new buckets.
        has_state = self.powersgd is not None
        if self._sync_gradients and (has_state or self.world_size > 2):
            for _ in range(1 + self._static_graph + has_state):
                step()
        if self.comm_hook:
            self.comm_hook.reset()

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Switch stages after this rank's last gradient, and while buffers are received."""
        assert self._module is not None, "prepare comes first"
        if self._sync_gradients:
            self._wait_hook = GradReadyHook(self._module, switch_stage, compiled=compiled)
            self._end_pass = self._wait_hook.end_pass
        else:
            self._switch_stage = switch_stage

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return `no_sync` for all but the final micro-batch. Raise `WorldError` for a static graph."""
        assert self._module is not None, "prepare comes first"
        self._end_pass()
        if final and self._sync_gradients:
            return contextlib.nullcontext()
        if self._static_graph:
            raise WorldError(
                "parallel.static_graph: true does not work with micro-batches (set parallel.static_graph=false, "
                "or train.accumulate=1)"
            )
        return self._module.no_sync()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradient; return its norm before, or the mean norm if each rank trains alone."""
        own_norm = super().clip(parameters, max_norm)
        if self._sync_gradients:
            return own_norm
        # The mean is NaN if any norm is, so all ranks stop or skip together; one that did so alone would leave the
        # others waiting in the next collective. The maximum would do, but libraries differ in what max(1, NaN) is.
        self._switch_stage(EXPOSED)
        mean_norm = mean_over_ranks(own_norm)
        self._switch_stage(CLIP_STAGE)
        return mean_norm

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Broadcast rank 0's buffers."""
        broadcast_buffers(model)  # forward of the wrapped model would do it, but evaluation calls the unwrapped one
        yield

    @property
    def powersgd(self) -> PowerSGD | None:
        """The compression with state; None if each rank trains alone."""
        # Checkpoints of ranks that train alone hold only rank 0's weights.
        return self.comm_hook.powersgd if self.comm_hook and self._sync_gradients else None


@final
class LastGradientHook:
    """Call `ready` in a backward pass once this rank's last gradient is computed, before it is sent.

    The first pass only finds the parameter whose gradient is last.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ready: Callable[[], None]) -> None:
        # The order depends on the model. One hook per parameter finds it; a permanent hook per parameter would cost a
        # call into Python each.
        self._ready = ready
        self._last: torch.Tensor | None = None
        self._hook: Any = None
        trainable = [each for each in parameters if each.requires_grad]
        self._discovery_hooks = [
            each.register_post_accumulate_grad_hook(self._record_gradient)  # type: ignore[no-untyped-call]
            for each in trainable
        ]

    def end_pass(self) -> None:
        """Replace all hooks by one on the last gradient, once it is known. Call it between passes."""
        if self._last is None:
            return
        last, self._last = self._last, None
        self.remove()
        self._hook = last.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: self._ready()
        )

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in (*self._discovery_hooks, *filter(None, [self._hook])):
            hook.remove()
        self._discovery_hooks.clear()

    def _record_gradient(self, parameter: torch.Tensor) -> None:
        self._last = parameter


@final
class GradReadyHook:
    """Switch to `exposed_communication` while `replica` waits for other ranks, and back to `forward` after buffers."""

    def __init__(self, replica: DistributedDataParallel, switch_stage: SwitchStage, *, compiled: bool) -> None:
        self._replica = replica
        self._switch_stage = switch_stage
        self._awaits_buffers = False
        self._last_gradient = LastGradientHook(replica.module.parameters(), self._gradients_are_ready)
        self._forward_hooks: list[RemovableHandle] = []
        if any(True for _ in replica.module.buffers()):
            # Keep the hooks out of the compiled graph: they surround it.
            outside_graph: Callable[[Any], Any] = torch.compiler.disable if compiled else _identity
            self._forward_hooks = [
                replica.register_forward_pre_hook(outside_graph(self._before_buffers)),
                replica.module.register_forward_pre_hook(outside_graph(self._before_forward)),
            ]

    def end_pass(self) -> None:
        """Record that a backward pass may have ended. Call it before each micro-batch."""
        self._last_gradient.end_pass()

    def remove(self) -> None:
        """Remove all hooks."""
        self._last_gradient.remove()
        for hook in self._forward_hooks:
            hook.remove()

    def _gradients_are_ready(self) -> None:
        if self._replica.require_backward_grad_sync:  # else more micro-batches follow and nothing is sent
            self._switch_stage(EXPOSED)

    def _before_buffers(self, module: nn.Module, args: object) -> None:
        if self._replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._awaits_buffers = True
            self._switch_stage(EXPOSED)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        # Evaluation calls the unwrapped model, which receives nothing.
        if self._awaits_buffers:
            self._awaits_buffers = False
            self._switch_stage(FORWARD)


def _identity(hook: Any) -> Any:
    return hook


def _do_nothing() -> None:
    """Stand in for the hooks until `on_comm_wait` registers them."""


def _ignore_stage(stage: str) -> None:
    """Stand in for the clock if nothing is timed."""
