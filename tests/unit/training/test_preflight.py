"""What a dry run finds out of a user's own augmentation and optimizer: what they are, and what they give."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.core.errors import RecipeError
from paceline.data.sources.builtin import load_digits
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan
from paceline.training.callbacks import Callback
from paceline.training.preflight import measure_saving, try_components


@dataclass
class Change:
    """An augmentation that gives floats, or raises when it is made, where it is told to."""

    how: str = ""
    num_draws: int = 1

    def __post_init__(self):
        if self.how == "raise":
            raise OSError("no table")

    def __call__(self, images, draws):
        return images.float() if self.how == "floats" else images


class Sorry(torch.optim.SGD):
    """An optimizer that is never made."""

    def __init__(self, groups, lr):
        raise OSError("no kernel")


class Odd(torch.optim.SGD):
    """An optimizer that keeps a set, or raises in its first step, where it is told to."""

    def __init__(self, groups, lr, how):
        super().__init__(groups, lr)
        self.how = how

    def step(self):
        if self.how == "raise":
            raise OSError("no kernel")
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1}


class Listens(Callback):
    """A callback that is never made."""

    def __init__(self):
        raise OSError("no file")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim={name: muon, lr: 0.02}", ""),
        ("optim={name: sgd, lr: 0.1, implementation: fused}", ""),
        ("train.class_weights={'7': 2}", ""),
        ("train.class_weights={'7': 2, cat: 3}", "train.class_weights: 'cat' is not a class of the dataset"),
        ("model={freeze: backbone}", ""),
        ("data.augment=[flip, 'own_parts:Change']", ""),
        ("data.augment=[{name: 'own_parts:Change', args: {how: floats}}]", "own_parts:Change returns torch.float32 [2"),
        ("data.augment=[{name: 'own_parts:Change', args: {how: raise}}]", "own_parts:Change raised OSError: no table"),
        ("optim={name: 'torch.optim:NAdam', lr: 0.1}", ""),
        ("optim={name: 'torch.optim:LBFGS', lr: 0.1}", "torch.optim:LBFGS cannot be used: its step() needs more than"),
        ("optim={name: 'own_parts:Sorry', lr: 0.1}", "own_parts:Sorry raised OSError: no kernel at "),
        ("optim={name: 'own_parts:Odd', lr: 0.1, args: {how: raise}}", "own_parts:Odd raised OSError: no kernel at "),
        ("optim={name: 'own_parts:Odd', lr: 0.1, args: {how: keep}}", "own_parts:Odd keeps 'seen' as set, which a"),
        ("train.callbacks=['own_parts:Listens']", "train.callbacks[0].name: own_parts:Listens raised OSError: no file"),
        ("optim.lr=0.2", ""),
    ],
)  # fmt: skip
def test_errors_of_the_first_step_are_raised_before(monkeypatch, override, message) -> None:
    monkeypatch.setitem(sys.modules, "own_parts", sys.modules[__name__])
    recipe = load("digits", Patch.parse([override])).recipe
    digits = load_digits()
    plan = Plan.derive(recipe, 1, digits.train.info, digits.val.info)
    before = torch.random.get_rng_state()
    if not message:
        try_components(recipe, plan, digits.train)
    else:
        with pytest.raises(RecipeError) as caught:
            try_components(recipe, plan, digits.train)
        assert message in str(caught.value)
    assert torch.equal(torch.random.get_rng_state(), before)


def tried(*overrides: str) -> tuple[str, ...]:
    recipe = load("digits", Patch.parse(list(overrides))).recipe
    digits = load_digits()
    return try_components(recipe, Plan.derive(recipe, 1, digits.train.info, digits.val.info), digits.train)


def test_layer_decay_and_class_weights_are_noted() -> None:
    assert tried() == ()
    layers, weights = tried("optim.layer_decay=0.5", 'train.class_weights={"7": 2}')
    assert layers.startswith("optim.layer_decay: 10 layers of 10 learn, at 0.00195 (layer 0) to 1 (layer 9) times")
    assert weights.startswith("train.class_weights: from 0.9")
    assert " (7), with a mean of 1" in weights


@pytest.mark.parametrize(
    ("optim", "note"), [("optim.layer_decay=0.5", "10 layers of 10 learn"), ("optim={name: muon, lr: 0.02}", "")]
)
def test_parameters_that_are_unfrozen_later_are_the_optimizers_too(optim: str, note: str) -> None:
    assert note in " ".join(tried("model.freeze=backbone", "model.unfreeze=1ep", "train.epochs=2", optim))


def test_the_state_of_parameters_that_are_unfrozen_later_is_saved_too(tmp_path: Path) -> None:
    frozen = ["model.freeze=backbone", "model.unfreeze=1ep"]
    sizes = [
        measure_saving(load("digits", Patch.parse(["model.width=0.1", *more])).recipe, tmp_path, load_digits(), 1).bytes
        for more in ([], frozen, frozen[:1])
    ]
    assert sizes[1] == sizes[0] > sizes[2]


def test_layer_decay_of_one_trained_layer_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^optim.layer_decay: 0.5 has no effect, as the last layer alone is trained"):
        tried("optim.layer_decay=0.5", "model.freeze=backbone")


class Counted(torch.nn.Module):
    """A network that looks at a value while it is made, which shapes alone do not have."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(in_channels, 1 + int(torch.ones(3).sum().item()))
        self.classifier = torch.nn.Linear(4, num_classes)


def test_a_network_of_a_users_own_is_made_of_values(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "own_parts", sys.modules[__name__])
    before = torch.random.get_rng_state()
    (told,) = tried("model={name: 'own_parts:Counted', width: 1.0}", "optim.layer_decay=0.5")
    assert told.startswith("optim.layer_decay: 2 layers of 2 learn")
    assert torch.equal(torch.random.get_rng_state(), before)
