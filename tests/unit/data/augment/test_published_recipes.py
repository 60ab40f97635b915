"""Presets of published recipes have the published parameters, and augment as the original code does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from scipy import stats
from timm.data import create_transform
from torchvision import transforms
from torchvision.transforms.v2 import functional as F

from paceline.data.augment.build import build_augments
from paceline.recipe.load import load

MEAN = (0.485, 0.456, 0.406)
RAND_AUGMENT = {"name": "rand_augment_timm", "num_ops": 2, "magnitude_std": 0.5, "p": 0.5}
CROP = {"name": "random_resized_crop", "scale": [0.08, 1.0], "ratio": [0.75, 4 / 3]}
FLIP = {"name": "flip", "p": 0.5, "mode": "random"}


def mixing(mixup: float) -> list[dict[str, Any]]:
    more = {"p": 1.0, "until": "off"}
    return [{"name": "mixup", "alpha": mixup, **more}, {"name": "cutmix", "alpha": 1.0, **more}]


def strikes_back(magnitude: float, mixup: float) -> list[dict[str, Any]]:
    return [CROP, FLIP, {**RAND_AUGMENT, "magnitude": magnitude}, *mixing(mixup)]


# arXiv 2110.00476, table 2; pytorch/vision issue 3995; README_revenge.md of facebookresearch/deit.
PUBLISHED: dict[str, dict[str, Any]] = {
    "timm-a1": {
        "data.image_size": 224,
        "data.batch_size": 2048,
        "data.eval_crop": 0.95,
        "data.sampler.repeats": 3,
        "optim.name": "lamb",
        "optim.lr": 5e-3,
        "optim.weight_decay": 0.01,
        "schedule.name": "cosine",
        "schedule.warmup": "5ep",
        "train.epochs": 600,
        "train.label_smoothing": 0.1,
        "train.loss.name": "bce",
        "model.drop_path": 0.05,
        "train.precision": "amp",
        "train.ema": "off",
        "data.augment": strikes_back(7, 0.2),
    },
    "timm-a2": {
        "data.image_size": 224,
        "data.batch_size": 2048,
        "data.eval_crop": 0.95,
        "data.sampler.repeats": 3,
        "optim.name": "lamb",
        "optim.lr": 5e-3,
        "optim.weight_decay": 0.02,
        "schedule.name": "cosine",
        "schedule.warmup": "5ep",
        "train.epochs": 300,
        "train.label_smoothing": 0,
        "train.loss.name": "bce",
        "model.drop_path": 0.05,
        "train.precision": "amp",
        "train.ema": "off",
        "data.augment": strikes_back(7, 0.1),
    },
    "timm-a3": {
        "data.image_size": 160,
        "data.eval_image_size": 224,
        "data.batch_size": 2048,
        "data.eval_crop": 0.95,
        "data.sampler.name": "shuffle",
        "optim.name": "lamb",
        "optim.lr": 8e-3,
        "optim.weight_decay": 0.02,
        "schedule.name": "cosine",
        "schedule.warmup": "5ep",
        "train.epochs": 100,
        "train.label_smoothing": 0,
        "model.drop_path": 0,
        "train.precision": "amp",
        "train.loss.name": "bce",
        "train.ema": "off",
        "data.augment": strikes_back(6, 0.1),
    },
    "torchvision-v2": {
        "data.batch_size": 8 * 128,
        "optim.name": "sgd",
        "optim.lr": 0.5,
        "optim.momentum": 0.9,
        "optim.nesterov": False,
        "optim.weight_decay": 2e-5,
        "optim.decay_norm_and_bias": False,
        "schedule.name": "cosine",
        "schedule.warmup": "5ep",
        "schedule.warmup_start": 0.01,
        "schedule.final": 0,
        "train.epochs": 600,
        "train.label_smoothing": 0.1,
        "train.loss.name": "cross_entropy",
        "data.image_size": 176,
        "data.eval_image_size": 224,
        "data.eval_crop": pytest.approx(224 / 232),
        "data.sampler.repeats": 4,
        "train.ema.every": 32,
        "data.interpolation": "bilinear",
        "train.ema.decay": pytest.approx(1 - (1 - 0.99998) * 1024 * 32 / 600, abs=1e-9),
        "data.augment": [
            *(CROP, FLIP, {"name": "trivial_augment"}),
            {"name": "random_erasing", "p": 0.1, "scale": [0.02, 0.33], "ratio": [0.3, 3.3]},
            *mixing(0.2),
        ],
    },
    "deit3-small": {
        "data.batch_size": 8 * 256,
        "data.image_size": 224,
        "optim.name": "lamb",
        "optim.lr": 4e-3,
        "optim.weight_decay": 0.05,
        "schedule.name": "cosine",
        "schedule.warmup": "5ep",
        "train.epochs": 800,
        "train.label_smoothing": 0,
        "train.loss.name": "bce",
        "train.loss.target_threshold": 0,
        "model.drop_path": 0.05,
        "data.sampler.repeats": 3,
        "data.interpolation": "bicubic",
        "schedule.warmup_start": pytest.approx(1e-6 / 4e-3),
        "data.augment": [
            *(CROP, FLIP, {"name": "three_augment"}),
            {"name": "color_jitter", "brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.0, "p": 1.0},
            *mixing(0.8),
        ],
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    values = load(name).recipe.to_dict()
    for path, expected in PUBLISHED[name].items():
        value: Any = values
        for key in path.split("."):
            value = value[key]
        assert value == expected, path


@pytest.mark.parametrize(("name", "config"), [("timm-a1", "rand-m7-mstd0.5-inc1"), ("timm-a3", "rand-m6-mstd0.5-inc1")])
def test_timm_s_transforms_are_those_of_the_preset(name: str, config: str) -> None:
    crop, flip, rand_augment, *_ = create_transform(224, is_training=True, auto_augment=config).transforms
    ours = load(name).recipe.to_dict()["data"]["augment"]
    assert (list(crop.scale), list(crop.ratio)) == (ours[0]["scale"], ours[0]["ratio"]) and flip.p == ours[1]["p"]
    (settings,) = {(each.prob, each.magnitude, each.magnitude_std, each.magnitude_max) for each in rand_augment.ops}
    assert settings == (ours[2]["p"], ours[2]["magnitude"], ours[2]["magnitude_std"], None)
    assert rand_augment.num_layers == ours[2]["num_ops"]


def by_timm(name: str) -> Callable[[Image.Image], Any]:
    _, _, rand_augment, *_ = create_transform(
        32, is_training=True, auto_augment="rand-m7-mstd0.5-inc1", interpolation="bilinear", mean=MEAN
    ).transforms
    return rand_augment


def by_torchvision(name: str) -> Callable[[Image.Image], Any]:
    def erase(image: Image.Image) -> torch.Tensor:
        pixels = transforms.functional.to_tensor(image) - torch.tensor(MEAN)[:, None, None]
        return (transforms.RandomErasing(0.1)(pixels) + torch.tensor(MEAN)[:, None, None]) * 255

    return transforms.Compose([transforms.TrivialAugmentWide(), erase])


def by_deit(name: str) -> Callable[[Image.Image], Any]:
    def blur(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(0.1, 2.0))))

    changes = [transforms.Grayscale(3), ImageOps.solarize, blur]
    return transforms.Compose([transforms.RandomChoice(changes), transforms.ColorJitter(0.3, 0.3, 0.3)])


@pytest.mark.parametrize(
    ("name", "build"), [("timm-a1", by_timm), ("torchvision-v2", by_torchvision), ("deit3-small", by_deit)]
)
def test_a_sampled_batch_is_distributed_as_that_of_the_original_code(name: str, build, monkeypatch) -> None:
    """Mean, contrast and colorfulness of 1,500 versions of a photograph-like image, without crops and flips."""
    torch.manual_seed(0)
    np.random.seed(0)
    num = 1500
    image = F.resize(torch.rand(3, 5, 5), [32, 32]).mul(230).add(15).to(torch.uint8)
    augments = build_augments(load(name).recipe.data.augment[2:], MEAN)
    generator = np.random.default_rng(1)
    ours = image.expand(num, -1, -1, -1)
    for augment in augments:
        ours = augment(ours, torch.from_numpy(generator.random((num, augment.num_draws))))
    change, picture = build(name), Image.fromarray(image.permute(1, 2, 0).numpy())
    made = [change(picture) for _ in range(num)]
    theirs = torch.stack(
        [each if isinstance(each, torch.Tensor) else torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in made]
    )
    for measure in (mean, contrast, colorfulness, sharpness):
        one, other = measure(ours.double()).numpy(), measure(theirs.double()).numpy()
        # Rounded, so that what differs in the last digit is equal.
        assert stats.ks_2samp(one.round(0), other.round(0)).pvalue > 1e-3, measure.__name__
        assert len(set(other.round(0))) > 3, measure.__name__


def mean(images: torch.Tensor) -> torch.Tensor:
    return images.mean(dim=(1, 2, 3))


def contrast(images: torch.Tensor) -> torch.Tensor:
    return images.mean(dim=1).flatten(1).std(dim=1)


def colorfulness(images: torch.Tensor) -> torch.Tensor:
    return images.std(dim=1).mean(dim=(1, 2))


def sharpness(images: torch.Tensor) -> torch.Tensor:
    return images.diff(dim=3).abs().mean(dim=(1, 2, 3))
