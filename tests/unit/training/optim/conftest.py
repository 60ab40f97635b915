"""A small thing to train, for an optimizer in torch and for its formula in NumPy: same start, same gradients.

Everything is float64, so that a formula is told from one that resembles it; what remains is the order of additions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from paceline.recipe.schema.optim import OptimSection
from paceline.training.optim.build import build_optimizer, set_lr

Arrays = dict[str, np.ndarray]

SHAPES = {
    "filters": (6, 3, 3, 3),
    "gain": (6,),
    "zeros": (6,),  # what a bias starts as: a layer whose norm is 0
    "still": (2, 3),  # its gradient is 0 at first
    "tall": (7, 4),
    "classifier": (5, 7),
    "bias": (5,),
}
NORMS_AND_BIASES = ("gain", "zeros", "bias")
LRS = (0.01, 0.05, 0.05, 0.0, 0.02, 0.02, 0.01)


@dataclass(frozen=True)
class Walk:
    """Where parameters start, and which gradient they meet at a step; it depends on where they are."""

    start: Arrays
    noise: list[Arrays]
    lrs: tuple[float, ...] = LRS

    def gradient(self, step: int, name: str, value: np.ndarray) -> np.ndarray:
        if name == "still" and step == 0:
            return np.zeros_like(value)
        return self.noise[step][name] + 0.3 * value

    def parameters(self, dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(torch.tensor(value, dtype=dtype)) for name, value in self.start.items()}

    def take(
        self, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], steps: range | None = None
    ) -> list[Arrays]:
        """Take steps with `optimizer`; return the parameters after each."""
        seen = []
        for step in steps or range(len(self.lrs)):
            for name, parameter in parameters.items():
                gradient = self.gradient(step, name, parameter.detach().double().numpy())
                parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
            set_lr(optimizer.param_groups, self.lrs[step])
            optimizer.step()
            seen.append({name: parameter.detach().double().numpy().copy() for name, parameter in parameters.items()})
        return seen

    def follow(self, section: OptimSection) -> list[Arrays]:
        """Return the parameters after every step of the optimizer that `section` asks for."""
        parameters = self.parameters()
        return self.take(build_optimizer(section, parameters.items(), "cpu"), parameters)

    def reckon(self, formula: Callable[[str, np.ndarray], Iterator[Callable]]) -> list[Arrays]:
        """Return the parameters after every step by `formula`, a generator for each parameter.

        It is made with the name and the starting value, and yields the value; it is sent (gradient, lr).
        """
        walkers = {name: formula(name, value.copy()) for name, value in self.start.items()}
        values = {name: next(walker) for name, walker in walkers.items()}
        seen = []
        for step, lr in enumerate(self.lrs):
            values = {
                name: walker.send((self.gradient(step, name, values[name]), lr)) for name, walker in walkers.items()
            }
            seen.append({name: value.copy() for name, value in values.items()})
        return seen


@pytest.fixture
def walk() -> Walk:
    random = np.random.default_rng(0)
    start = {name: np.zeros(s) if name == "zeros" else random.normal(size=s) for name, s in SHAPES.items()}
    noise = [{name: random.normal(size=s) for name, s in SHAPES.items()} for _ in LRS]
    return Walk(start, noise)


@pytest.fixture
def assert_same() -> Callable[[list[Arrays], list[Arrays]], None]:
    """Compare two walks, to what a different order of float64 additions leaves after seven steps."""

    def compare(found: list[Arrays], expected: list[Arrays]) -> None:
        assert len(found) == len(expected) == len(LRS)
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys() == SHAPES.keys()
            for name in one:
                np.testing.assert_allclose(one[name], other[name], rtol=1e-11, atol=1e-12, err_msg=name)

    return compare
