"""State of optimizers beside the tensors of parameters: numbers, and changed group options.

Only plugin optimizers have any. Attributes of an optimizer object are not saved.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.training.optim.build import ParamGroup

_MANAGED_KEYS: Final = ("params", "lr", "lr_factor")
GROUP_PREFIX: Final = "group."
"""Prefix of tensors that belong to a group, not to a parameter."""


@dataclass(frozen=True)
class ExtraOptimizerState:
    """Extra state of `optimizer` called `name`; `initial` has the group options before the first step, as text."""

    optimizer: torch.optim.Optimizer
    name: str
    initial: tuple[dict[str, str], ...]

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer, name: str) -> Self:
        """Return the state of an optimizer before its first step."""
        # By text: any object has one, and the same one until it changes.
        groups = ({key: repr(value) for key, value in _options(group)} for group in optimizer.param_groups)
        return cls(optimizer, name, tuple(groups))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in the groups as `group.NUMBER.KEY`."""
        return {
            f"{GROUP_PREFIX}{number}.{key}": value
            for number, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, Tensor) and key not in _MANAGED_KEYS
        }

    def values(self) -> dict[str, Any]:
        """Return non-tensor state and changed group options as JSON values, or an empty dictionary.

        Raise `RecipeError` for types that a checkpoint cannot hold.
        """
        states: dict[str, dict[str, Any]] = {}
        for number, values in self.optimizer.state_dict()["state"].items():
            if not isinstance(number, int) or not isinstance(values, Mapping):
                raise RecipeError(
                    f"optim.name: {self.name} keeps {number!r} in its state, which is no parameter (keep it in the "
                    f"state of one, or in a group)"
                )
            states[str(number)] = {key: each for key, each in values.items() if not isinstance(each, Tensor)}
        groups = [
            {key: value for key, value in _options(group) if repr(value) != initial.get(key)}
            for group, initial in zip(self.optimizer.param_groups, self.initial, strict=True)
        ]
        for values in (*states.values(), *groups):
            self._check_plain(values)
        saved = {"state": {number: values for number, values in states.items() if values}, "groups": groups}
        return {"optimizer": saved} if saved["state"] or any(groups) else {}

    def load(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load what both returned, after the state of the parameters; `tensors` may contain others."""
        saved, groups = values.get("optimizer", {"state": {}, "groups": []}), self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        for number, each in saved["state"].items():
            self.optimizer.state[parameters[int(number)]].update(each)
        for group, each in zip(groups, saved["groups"], strict=False):
            group.update(each)
        for name, tensor in tensors.items():
            if name.startswith(GROUP_PREFIX):
                _, at, key = name.split(".", 2)
                group = groups[int(at)]
                like = group[key] if isinstance(group.get(key), Tensor) else group["params"][0]
                group[key] = tensor.to(like.device)

    def _check_plain(self, values: Mapping[Any, Any]) -> None:
        for key, value in values.items():
            if not isinstance(key, str) or not _is_plain(value):
                raise RecipeError(
                    f"optim.name: {self.name} keeps {key!r} as {type(value).__name__}, which a checkpoint cannot hold "
                    f"(keep a tensor, a finite number or a list of them, or set checkpoint.every=off)"
                )


def _options(group: ParamGroup) -> Iterator[tuple[str, Any]]:
    """Yield the options of `group` that are not tensors."""
    return ((key, value) for key, value in group.items() if key not in _MANAGED_KEYS and not isinstance(value, Tensor))


def _is_plain(value: object) -> bool:
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
