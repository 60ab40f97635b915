"""A custom model: built by its contract, tried before training, refused in one line."""

import dataclasses
import sys
import warnings

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.models.build import build_model
from paceline.models.validate import check_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model

PLAN = Plan(
    world_size=1, batch_size=4, rank_batch=4, micro_batch=4, eval_batch=4, train_images=4, val_images=4, num_classes=3,
    channels=1, image_size=8, eval_image_size=8, train_sizes=((0, 8),), steps_per_epoch=1, dropped_images=0,
    total_steps=1, eval_every=0, checkpoint_every=0, checkpoint_every_s=0.0, checkpoint_keep_every=0,
    check_replicas_every=0, log_every=0, peak_lr=0.1, lr_sentence="",
)  # fmt: skip


class Net(nn.Module):
    """A linear layer, which may do what torch's meta device cannot."""

    def __init__(self, num_classes, in_channels, size=8, outputs=0, looks=False, gives="logits"):
        super().__init__()
        self.linear = nn.Linear(in_channels * size * size, outputs or num_classes)
        self.looks, self.gives = looks, gives

    def forward(self, images):
        if self.looks and images.sum().item() != 0:
            raise AssertionError("images of zeros are tried")
        logits = self.linear(images.flatten(1))
        return logits if self.gives == "logits" else {"logits": logits}


@pytest.fixture
def section(monkeypatch):
    module = type(sys)("parts_of_nets")
    module.Net, module.no_net = Net, lambda num_classes, in_channels: 3
    monkeypatch.setitem(sys.modules, "parts_of_nets", module)

    def made(name="Net", *, args=None, **fields) -> Model:
        return Model(name=f"parts_of_nets:{name}", args=args or {}, **fields)

    return made


def test_a_custom_model_gets_the_classes_and_its_args_and_is_initialized_by_the_seed(section) -> None:
    torch.manual_seed(3)
    first = build_model(section(args={"outputs": 5}), num_classes=3, channels=1)
    torch.manual_seed(3)
    second = Net(3, 1, outputs=5)
    assert torch.equal(first.linear.weight, second.linear.weight)


@pytest.mark.parametrize("args", [{}, {"looks": True}], ids=["on the meta device", "where it looks at values"])
def test_a_network_that_fits_passes_and_draws_nothing(section, args) -> None:
    before = torch.get_rng_state()
    check_model(section(args=args), PLAN)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"outputs": 7},
            "model.name: parts_of_nets:Net gives torch.float32 [2, 7] for images [2, 1, 8, 8], not logits [2, 3] "
            "(return one number per class)",
        ),
        ({"gives": "dict"}, "model.name: parts_of_nets:Net gives a dict for images [2, 1, 8, 8], not logits [2, 3]"),
        ({"size": 9}, "model.name: parts_of_nets:Net cannot take a batch of 2x1x8x8: "),
        ({"size": -1, "outputs": 1.5}, "model.name: parts_of_nets:Net raised TypeError: "),
    ],
)
def test_a_network_that_does_not_fit_is_one_line(section, args, says) -> None:
    with pytest.raises(RecipeError) as caught:
        check_model(section(args=args), PLAN)
    assert str(caught.value).startswith(says)
    assert len(str(caught.value).splitlines()) == 1


def test_a_plugin_that_is_not_a_module_and_built_in_settings_are_refused(section) -> None:
    with pytest.raises(RecipeError, match=r"no_net makes a int, not a torch.nn.Module \(return a module\)"):
        build_model(section("no_net"), num_classes=3, channels=1)
    for fields in ({"width": 2.0}, {"norm": "group"}, {"drop_path": 0.1}, {"zero_init_residual": True}):
        with pytest.raises(RecipeError, match=rf"model.{next(iter(fields))}: .* has no effect on parts_of_nets:Net"):
            build_model(section(**fields), num_classes=3, channels=1)


class Loads(Net):
    """A network that brings weights of its own, and may warn of something else, or be made in evaluation mode."""

    def __init__(self, num_classes, in_channels, warns=False, evaluates=False):
        super().__init__(num_classes, in_channels)
        self.norm = nn.Sequential(nn.BatchNorm2d(in_channels), nn.ReLU())
        with torch.device("cpu"):
            own = {name: torch.ones(tensor.shape) for name, tensor in self.state_dict().items()}
        self.load_state_dict(own)
        if warns:
            warnings.warn("for sale: an old network", stacklevel=1)
        if evaluates:
            self.norm.eval()

    def forward(self, images):
        assert images.is_meta, "it is tried without memory"
        return super().forward(self.norm(images))


def test_a_model_that_loads_weights_is_tried_without_torchs_warnings(section) -> None:
    sys.modules["parts_of_nets"].Loads = Loads
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert check_model(section("Loads"), PLAN) == ()
        check_model(section("Loads", args={"warns": True}), PLAN)
    assert [str(each.message) for each in caught] == ["for sale: an old network"]
    with warnings.catch_warnings(record=True) as caught, torch.device("meta"):
        warnings.simplefilter("always")
        Loads(3, 1)
    assert len(caught) == 7, "torch no longer warns: nothing need be silenced"


def test_evaluation_mode_that_training_ends_is_reported(section) -> None:
    sys.modules["parts_of_nets"].Loads = Loads
    assert check_model(section("Loads", args={"evaluates": True}), PLAN) == (
        "model.name: parts_of_nets:Loads puts norm and 2 more modules into evaluation mode in its constructor, and "
        "training undoes that (do so in train(), or set model.freeze)",
    )
    frozen = check_model(section("Loads", args={"evaluates": True}, freeze=["norm.*"]), PLAN)
    assert frozen == ("model.freeze: 195 parameters of 197 are trained",)


def test_a_batch_of_one_can_be_trained_on_where_no_norm_counts(section) -> None:
    class Norms(Net):
        def __init__(self, num_classes, in_channels):
            super().__init__(num_classes, in_channels)
            self.norm = nn.BatchNorm1d(64)

        def forward(self, images):
            return self.linear(self.norm(images.flatten(1)))

    sys.modules["parts_of_nets"].Norms = Norms
    one = dataclasses.replace(PLAN, micro_batch=1, eval_batch=1)
    with pytest.raises(RecipeError, match="Expected more than 1 value per channel"):
        check_model(section("Norms"), one)
    assert check_model(section("Norms", freeze=["norm.*"]), one) == ("model.freeze: 195 parameters of 323 are trained",)
