"""Gradients that are scaled within backward passes alone."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.watch.loss_scaler import LossScaler


@pytest.fixture
def scaler():
    found = LossScaler(torch)
    found.is_on = True
    yield found
    found.is_on = False  # its hook of optimizers stays in this process


def run_backward(scaler: LossScaler, *losses: torch.Tensor) -> None:
    hooks = scaler.begin_backward(list(losses))
    torch.autograd.backward(losses)
    scaler.end_backward(hooks)


def make_model(scaler: LossScaler) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.follow(optimizer)
    return model, optimizer


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad.clone() for each in model.parameters()]


def test_gradients_are_scaled_inside_and_the_same_outside(scaler):
    model, _optimizer = make_model(scaler)
    inside = []
    model[2].register_full_backward_hook(lambda module, before, after: inside.append(after[0].clone()))
    images = torch.randn(3, 4)
    for _ in range(2):  # the second adds to the gradients of the first
        model(images).mean().backward()
    expected, (unscaled, _) = gradients_of(model), inside
    model.zero_grad()
    for _ in range(2):
        run_backward(scaler, model(images).mean())
    assert all(map(torch.equal, gradients_of(model), expected))
    assert torch.equal(inside[-1], unscaled * 2**16)
    # What asks for gradients otherwise is not scaled.
    first = torch.autograd.grad(model(images).mean(), next(model.parameters()))[0]
    assert torch.equal(first, expected[0] / 2)


def test_a_backward_pass_within_another_is_not_scaled_twice(scaler):
    model, _optimizer = make_model(scaler)
    images = torch.randn(3, 4, requires_grad=True)
    model(images).mean().backward()
    expected = gradients_of(model)
    model.zero_grad()
    original = torch.autograd.backward

    def within(*args, **kwargs):
        hooks = scaler.begin_backward(args[0])
        original(*args, **kwargs)
        scaler.end_backward(hooks)

    torch.autograd.backward = within
    try:
        checkpoint(model, images, use_reentrant=True).mean().backward()
    finally:
        torch.autograd.backward = original
    assert all(map(torch.equal, gradients_of(model), expected))


def test_layers_that_are_unfrozen_or_added_are_followed(scaler):
    model, optimizer = make_model(scaler)
    model[0].requires_grad_(False)
    run_backward(scaler, model(torch.ones(3, 4)).mean())
    model[0].requires_grad_(True)
    more = nn.Linear(1, 1)
    optimizer.add_param_group({"params": more.parameters()})
    model.zero_grad()
    more(model(torch.ones(3, 4))).mean().backward()
    expected = gradients_of(model) + gradients_of(more)
    model.zero_grad()
    more.zero_grad()
    run_backward(scaler, more(model(torch.ones(3, 4))).mean())
    assert all(map(torch.equal, gradients_of(model) + gradients_of(more), expected))


def test_the_factor_halves_on_overflow_and_doubles_after_2000_steps(scaler):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    scaler.follow(optimizer)
    weight.grad = torch.tensor([float("inf")])
    optimizer.step()
    assert (weight.item(), weight.grad, scaler.factor) == (1.0, None, 2.0**15)
    weight.grad = torch.zeros(1)
    for _ in range(1999):
        optimizer.step()
    assert scaler.factor == 2.0**15
    optimizer.step()
    assert scaler.factor == 2.0**16
