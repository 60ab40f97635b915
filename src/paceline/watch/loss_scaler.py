"""Scale the gradients of a script that a ladder makes compute in float16, from outside."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any, Final, final

# Those of torch.amp.GradScaler.
_FIRST_FACTOR: Final = 2.0**16
_STEPS_TO_GROW: Final = 2000
_MARK: Final = "_paceline_is_unscaled"
Hook = Any  # torch.utils.hooks.RemovableHandle


@final
class LossScaler:
    """Scale gradients within `backward()`, where they have 16 bits, as `torch.amp.GradScaler` scales a loss.

    The gradient of the loss is multiplied by a factor and that of each parameter divided by it before it is added to
    `grad`, so that scripts clip, reduce and print what they would without it. A step with gradients that are not finite
    changes nothing: they become None, which optimizers leave out. The factor is halved then, and doubled after 2,000
    other steps in a row.
    """

    def __init__(self, torch: Any) -> None:
        self.is_on = False
        self.factor = _FIRST_FACTOR
        self._torch = torch
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_steps = 0  # since the factor changed
        self._is_in_backward = False
        # torch.optim deletes the module's name.
        sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(self._before_step)

    def follow(self, optimizer: Any) -> None:
        """Scale the gradients of an optimizer's parameters back."""
        self._optimizers.add(optimizer)

    def begin_backward(self, tensors: Any) -> list[Hook]:
        """Scale the gradients of a backward pass from `tensors` until `end_backward` has its result.

        A backward pass within another, as of reentrant checkpoints, has scaled gradients already.
        """
        if not self.is_on or self._is_in_backward:
            return []
        for optimizer in self._optimizers:
            for parameter in _parameters(optimizer):  # layers may have been added or unfrozen
                if parameter.requires_grad and not hasattr(parameter, _MARK):
                    parameter.register_hook(self._unscale)
                    setattr(parameter, _MARK, True)
        roots = tensors if isinstance(tensors, list | tuple) else [tensors]
        roots = [each for each in roots if isinstance(each, self._torch.Tensor) and each.requires_grad]
        self._is_in_backward = bool(roots)
        return [each.register_hook(self._scale) for each in roots]

    def end_backward(self, hooks: list[Hook]) -> None:
        """End what `begin_backward` began."""
        if hooks:
            self._is_in_backward = False
        for hook in hooks:
            hook.remove()

    def _scale(self, gradient: Any) -> Any:
        return gradient * self.factor

    def _unscale(self, gradient: Any) -> Any:
        return gradient / self.factor if self._is_in_backward else gradient

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_on:
            return
        gradients = [each.grad for each in _parameters(optimizer) if each.grad is not None]
        if not gradients:
            return
        self._num_steps += 1
        if not self._are_finite(gradients):
            for each in _parameters(optimizer):
                each.grad = None
            self.factor, self._num_steps = self.factor / 2, 0
        elif self._num_steps == _STEPS_TO_GROW:
            self.factor, self._num_steps = self.factor * 2, 0

    def _are_finite(self, gradients: list[Any]) -> bool:
        norms = self._torch._foreach_norm(gradients)  # one value per tensor, and one wait for all
        return bool(self._torch.stack([each.to(norms[0].device) for each in norms]).isfinite().all())


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]
