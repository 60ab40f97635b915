"""State of optimizers beside the tensors of parameters: numbers, and changed group options.

Only plugin optimizers have any. Attributes of an optimizer object are not saved.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.training.optim.build import ParamGroup

_MANAGED_KEYS: Final = ("params", "lr", "lr_factor")
GROUP_PREFIX: Final = "group."
"""Prefix of tensors that belong to a group, not to a parameter."""
_MISSING: Final = object()


@dataclass(frozen=True)
class ExtraOptimizerState:
    """Extra state of `optimizer` called `name`; `initial_groups` are the group options before the first step."""

    optimizer: torch.optim.Optimizer
    name: str
    initial_groups: tuple[ParamGroup, ...]

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer, name: str) -> Self:
        """Return the state of an optimizer before its first step."""
        built = (
            {key: _copy_if_comparable(value) for key, value in _group_options(group)}
            for group in optimizer.param_groups
        )
        return cls(optimizer, name, tuple(built))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in the groups as `group.NUMBER.KEY`."""
        return {
            f"{GROUP_PREFIX}{number}.{key}": value
            for number, group in enumerate(self.optimizer.param_groups)
            for key, value in _group_options(group)
            if isinstance(value, Tensor)
        }

    def values(self) -> dict[str, Any]:
        """Return non-tensor state and changed group options as JSON values, or an empty dictionary.

        Raise `RecipeError` for types that a checkpoint cannot hold.
        """
        state = {str(number): self._parameter_values(number, each) for number, each in self._state_by_number().items()}
        groups = [
            self._changed_options(group, built)
            for group, built in zip(self._param_groups(), self.initial_groups, strict=True)
        ]
        saved: dict[str, Any] = {"state": {number: each for number, each in state.items() if each}, "groups": groups}
        return {"optimizer": saved} if saved["state"] or any(groups) else {}

    def load(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load what both returned, after the state of the parameters; `tensors` may contain others."""
        saved = values.get("optimizer", {"state": {}, "groups": []})
        parameters = [parameter for group in self._param_groups() for parameter in group["params"]]
        for number, each in saved["state"].items():
            self.optimizer.state[parameters[int(number)]].update(_map_values(_decode, each))
        for group, each in zip(self._param_groups(), saved["groups"], strict=False):
            group.update(_map_values(_decode, each))
        for name, tensor in tensors.items():
            if name.startswith(GROUP_PREFIX):
                _, at, key = name.split(".", 2)
                group = self._param_groups()[int(at)]
                group[key] = tensor.to(_device_of(group, key))

    def _param_groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups

    def _state_by_number(self) -> dict[Any, Any]:
        state: dict[Any, Any] = self.optimizer.state_dict()["state"]
        return state

    def _parameter_values(self, number: object, each: object) -> dict[str, Any]:
        if not isinstance(number, int) or not isinstance(each, Mapping):
            raise RecipeError(
                f"optim.name: {self.name} keeps {number!r} in its state, which is no parameter (keep it in the state "
                f"of one, or in a group)"
            )
        return {key: self._encode_checked(key, value) for key, value in each.items() if not isinstance(value, Tensor)}

    def _changed_options(self, group: ParamGroup, built: ParamGroup) -> dict[str, Any]:
        others = ((key, value) for key, value in _group_options(group) if not isinstance(value, Tensor))
        return {
            key: self._encode_checked(key, value) for key, value in others if _differs(value, built.get(key, _MISSING))
        }

    def _encode_checked(self, key: object, value: object) -> Any:
        try:
            if not isinstance(key, str):
                raise TypeError
            return _encode(value)
        except TypeError:
            kind = type(value).__name__
            raise RecipeError(
                f"optim.name: {self.name} keeps {key!r} as {kind}, which a checkpoint cannot hold (keep a tensor or a "
                f"number, or set checkpoint.every=off)"
            ) from None


def _group_options(group: ParamGroup) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in group.items() if key not in _MANAGED_KEYS)


def _copy_if_comparable(value: Any) -> Any:
    """Return a copy of `value` if equality can detect a change, else the value."""
    has_equality = any("__eq__" in vars(kind) for kind in type(value).__mro__ if kind is not object)
    return copy.deepcopy(value) if has_equality and not isinstance(value, Tensor) else value


def _differs(value: Any, before: Any) -> bool:
    try:
        return type(value) is not type(before) or bool(value != before)
    except Exception:  # arrays compare elementwise
        return True


def _device_of(group: ParamGroup, key: str) -> torch.device:
    """Return the device of a group's tensor, or of its parameters."""
    tensor: Tensor = group[key] if isinstance(group.get(key), Tensor) else group["params"][0]
    return tensor.device


def _map_values(change: Callable[[Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: change(value) for key, value in values.items()}


def _encode(value: Any) -> Any:
    """Encode `value` for JSON, which lacks tuples and non-finite numbers. Raise `TypeError` for other objects."""
    kind = type(value)
    if kind in (bool, int, str, type(None)) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is list:
        return [_encode(each) for each in value]
    if kind is tuple:
        return {"tuple": [_encode(each) for each in value]}
    raise TypeError


def _decode(value: Any) -> Any:
    match value:
        case {"float": text}:
            return float(text)
        case {"tuple": [*values]}:
            return tuple(_decode(each) for each in values)
        case [*values]:
            return [_decode(each) for each in values]
    return value
