"""`LastGradientHook` learns which gradient is last, and calls for that one only."""

import torch
from torch import nn

from paceline.parallel.ddp import LastGradientHook


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(rows))


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def test_the_last_gradient_calls_from_the_second_backward_on() -> None:
    model, calls = Network(), list[bool]()
    last = LastGradientHook(model.parameters(), lambda: calls.append(model.first.weight.grad is not None))
    last.end_pass()  # before any pass there is nothing to learn
    backward(model)
    assert calls == []
    for passes in (1, 2, 3):
        last.end_pass()
        model.zero_grad()
        backward(model)
        assert calls == [True] * passes


def test_one_hook_remains() -> None:
    model = Network()
    last = LastGradientHook(model.parameters(), lambda: None)
    hooks = [each._post_accumulate_grad_hooks for each in model.parameters()]  # what torch keeps them in
    assert [len(each) for each in hooks] == [1] * 6
    backward(model)
    last.end_pass()
    assert sorted(len(each) for each in hooks) == [0, 0, 0, 0, 0, 1]


def test_frozen_parameters_get_no_hook() -> None:
    model = Network()
    model.first.requires_grad_(False)
    calls: list[str] = []
    last = LastGradientHook(model.parameters(), lambda: calls.append("ready"))
    for _ in range(2):
        backward(model)
        last.end_pass()
    assert calls == ["ready"]
