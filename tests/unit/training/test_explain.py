"""Maps over images: drawn for any number of channels and kind of model, within a time limit, bad images left out."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.core.results import MisclassifiedImage
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.schema.data import Data
from paceline.training.explain import MapPainter, MistakeExplainer, draw_heat
from paceline.training.precision import build_precision

CPU = torch.device("cpu")


def painter(model: nn.Module, channels: int, *, is_multi_label: bool = False) -> MapPainter:
    half = (0.5,) * channels
    transfer = DeviceTransfer(CPU, torch.float32, half, half, torch.contiguous_format)
    return MapPainter(model, transfer, build_precision("fp32", CPU), is_multi_label=is_multi_label)


def convolutions(channels: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def images(number: int, channels: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, 16, 16, channels), dtype=np.uint8)


@pytest.mark.parametrize("channels", [1, 2, 3, 12])
def test_a_map_is_drawn_per_class_for_any_number_of_channels(channels: int) -> None:
    pixels = torch.from_numpy(images(2, channels)).permute(0, 3, 1, 2)
    drawn = painter(convolutions(channels), channels)(pixels, torch.tensor([[0, 1], [2, 0]]))
    assert [[(each.size, each.mode) for each in of_image] for of_image in drawn] == [[((16, 16), "RGB")] * 2] * 2
    assert drawn[0][0].tobytes() != drawn[0][1].tobytes()


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_a_transformer_is_explained_by_covering_parts(monkeypatch, is_multi_label: bool) -> None:
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=2, embed_dim=16, depth=1, num_heads=2, num_classes=3
    )
    nn.init.normal_(model.head.weight)
    monkeypatch.setattr("paceline.training.explain.grad_cam", None)
    pixels = torch.from_numpy(images(1, 3)).permute(0, 3, 1, 2)
    ((drawn,),) = painter(model, 3, is_multi_label=is_multi_label)(pixels, torch.tensor([[1]]))
    assert drawn.size == (16, 16)


def test_heat_is_where_the_map_is_high_and_a_map_of_zeros_leaves_gray() -> None:
    pixels = np.full((8, 8, 3), 100, dtype=np.uint8)
    values = np.zeros((2, 2), dtype=np.float32)
    assert np.unique(np.asarray(draw_heat(pixels, values))).tolist() == [100]
    values[1, 1] = 0.25  # scaled to its own maximum
    heat = np.asarray(draw_heat(pixels, values)).astype(int)
    assert heat[7, 7, 0] - heat[7, 7, 2] > 100 and heat[0, 0].tolist() == [100] * 3
    values[0, 0], values[0, 1] = np.inf, np.nan
    assert draw_heat(pixels, values).tobytes() == heat.astype(np.uint8).tobytes()
    assert isinstance(draw_heat(pixels[..., :1], values), Image.Image)


def test_mistakes_are_explained_until_the_time_is_up() -> None:
    half = (0.5,)
    info = DatasetInfo("made", "val", 4, ("a", "b", "c"), 1, None, half, half)
    source = ArraySource(info, images(4, 1), np.array([0, 1, 2, 0]))
    mistakes = [MisclassifiedImage(index, 0, 1, 0.9, 1.0) for index in (3, 1, 2)]
    times_s = iter([0.0, 0.4, 0.8, 1.0])  # a run of 30 s has 0.9 s
    explainer = MistakeExplainer(painter(convolutions(1), 1), source, Data(), 16, 30.0, now=lambda: next(times_s))
    found = dict(explainer(mistakes))
    assert list(found) == [3, 1] and all(each.keys() == {"predicted", "true"} for each in found.values())
