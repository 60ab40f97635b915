"""Adaptive gradient clipping is timm's, on every parameter but the classifier's."""

import copy

import pytest
import timm
import torch
from timm.models import model_parameters
from timm.utils import dispatch_clip_grad
from torch import nn

from paceline.core.errors import RecipeError
from paceline.training.clipping import build_adaptive_clip
from paceline.training.precision import MasterWeights


def make_model(name: str = "resnet10t") -> nn.Module:
    """Return a small model with gradients of very different sizes, and one row of each without any."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (number % 7 - 4)
        parameter.grad[0] = 0
    return model


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("factor", [0.01, 0.5])
def test_gradients_are_clipped_as_by_timm(name: str, factor: float) -> None:
    ours, theirs = make_model(name), make_model(name)
    clip = build_adaptive_clip(factor, ours, None, 7)
    assert clip is not None
    clip()
    dispatch_clip_grad(model_parameters(theirs, exclude_head=True), factor, mode="agc")
    unclipped = dict(make_model(name).named_parameters())
    for (key, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), key
    changed = [key for key, each in ours.named_parameters() if not torch.equal(each.grad, unclipped[key].grad)]
    assert changed and len(changed) < len(unclipped)


def test_master_weights_are_clipped_in_place_of_the_model_s() -> None:
    model = make_model().bfloat16()
    gradients = copy.deepcopy([each.grad for each in model.parameters()])
    masters = MasterWeights()
    named = masters.create(model)
    masters.copy_grads()
    clip = build_adaptive_clip(0.01, model, masters, 7)
    assert clip is not None
    clip()
    clipped = [not torch.equal(each.grad, before.float()) for (_, each), before in zip(named, gradients, strict=True)]
    assert any(clipped) and not any(clipped[-2:])


def test_clipping_is_off_unless_named_and_refused_if_only_the_classifier_is_trained() -> None:
    model = make_model()
    assert build_adaptive_clip("off", model, None, 7) is None
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    with pytest.raises(RecipeError, match=r"^train\.clip_agc: 0\.01 has no effect, .* \(set train\.clip_agc=off\)$"):
        build_adaptive_clip(0.01, model, None, 7)
