"""An augmentation plugin runs in its position, with its own draws, and is validated each time."""

import sys
from dataclasses import dataclass

import pytest
import torch

from paceline.core.errors import RecipeError
from paceline.data.augment.build import build_augments, build_device_transforms, has_host_augments
from paceline.data.transfer import DeviceBatch, DeviceTransfer
from paceline.recipe.schema.augment import Flip, OwnAugment
from paceline.recipe.schema.data import Data

IMAGES = torch.arange(2 * 1 * 2 * 2, dtype=torch.uint8).reshape(2, 1, 2, 2)


@dataclass
class Brighter:
    """Add up to `most` to each image."""

    most: int = 100
    num_draws: int = 1
    gives: str = "images"

    def __call__(self, images, draws):
        if self.gives == "raise":
            raise ValueError("no")
        changed = images + (draws[:, 0] * self.most).to(torch.uint8)[:, None, None, None]
        gives = {"images": changed, "floats": changed.float(), "half": changed[:1], "none": None}
        return (gives | {"elsewhere": changed.to("meta")})[self.gives]


@pytest.fixture
def section(monkeypatch):
    module = type(sys)("parts_of_augment")
    module.Brighter = Brighter
    monkeypatch.setitem(sys.modules, "parts_of_augment", module)
    return lambda **args: OwnAugment(name="parts_of_augment:Brighter", args=args)


def test_a_plugin_runs_in_its_position_with_its_draws(section) -> None:
    flip, own = build_augments((Flip(), section(most=10)), (0.5,))
    assert (flip.num_draws, own.num_draws, own.needs_host, own.alternating) == (1, 1, False, False)
    changed = own(IMAGES, torch.tensor([[0.0], [0.5]], dtype=torch.float64))
    assert torch.equal(changed, IMAGES + torch.tensor([0, 5], dtype=torch.uint8)[:, None, None, None])


def test_a_plugin_runs_on_the_device_with_its_draws(section) -> None:
    data = Data(augment=(Flip(), section(most=10)))
    assert not has_host_augments(data)
    place = DeviceTransfer(torch.device("cpu"), torch.float32, (0.0,), (1.0,), torch.contiguous_format)
    deferred = build_device_transforms(data, place, 2, on_device=True)
    draws = torch.tensor([[0.9, 0.0], [0.9, 0.5]], dtype=torch.float64)  # no flip; then its own
    images, _ = deferred(DeviceBatch(IMAGES, torch.zeros(2, dtype=torch.int64), draws))
    wanted = IMAGES + torch.tensor([0, 5], dtype=torch.uint8)[:, None, None, None]
    assert torch.equal(images, place.normalize(wanted))
    assert build_device_transforms(data, place, 2, on_device=False).augments == (), "and else it is the loader's"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"gives": "floats"}, "data.augment[1].name: parts_of_augment:Brighter returns torch.float32 [2, 1, 2, 2] on"),
        ({"gives": "half"}, "data.augment[1].name: parts_of_augment:Brighter returns torch.uint8 [1, 1, 2, 2] on"),
        ({"gives": "none"}, "data.augment[1].name: parts_of_augment:Brighter returns NoneType for torch.uint8"),
        (
            {"gives": "elsewhere"},
            "data.augment[1].name: parts_of_augment:Brighter returns torch.uint8 [2, 1, 2, 2] on meta for "
            "torch.uint8 [2, 1, 2, 2] on cpu (return images",
        ),
        ({"gives": "raise"}, "data.augment[1].name: parts_of_augment:Brighter raised ValueError: no at "),
    ],
)
def test_invalid_results_and_errors_of_a_plugin_are_reported(section, args, message) -> None:
    _, own = build_augments((Flip(), section(**args)), (0.5,))
    with pytest.raises(RecipeError) as caught:
        own(IMAGES, torch.zeros(2, 1, dtype=torch.float64))
    assert str(caught.value).startswith(message)


def test_draws_must_be_a_number(section) -> None:
    with pytest.raises(RecipeError, match=r"data.augment\[0\].name: .* has num_draws -1 \(set it to "):
        build_augments((section(num_draws=-1),), (0.5,))
