"""Say when a replica begins to wait for other ranks: for the mean gradients in backward, for rank 0's buffers before.

What is said is the name of a stage, so that waiting is charged to communication and not to what it is hidden in. The
bits of a step are the same with and without.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.stages import EXPOSED

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
