"""The loss of a teacher's predictions: torch's and DeiT's formulas, on the images of the step."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.core.pixels import PixelFormat
from paceline.core.run_dir import RunDir
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.train import Distill
from paceline.training.distill import (
    DistillCriterion,
    LabelCriterion,
    SoftDistillLoss,
    Teacher,
    _build_normalization,
    _check_pixels,
    build_criterion,
    check_teacher_run,
    hard_distill_loss,
    teacher_section,
)
from paceline.training.loss import CrossEntropy
from paceline.training.trained_dataset import TrainedDataset

CPU = torch.device("cpu")
STUDENT, TAUGHT = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()
LABELS, IMAGES = torch.tensor([0, 3, 1, 1, 2, 0]), torch.zeros(6, 3, 2, 2)


class Recorded(nn.Module):
    """Return the same logits, and remember the images and whether gradients were recorded."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images, self.has_gradients = images, torch.is_grad_enabled()
        return TAUGHT


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_soft_is_the_divergence_of_softened_probabilities(temperature: float) -> None:
    student, taught = (logits.div(temperature).softmax(1) for logits in (STUDENT, TAUGHT))
    expected = temperature**2 * (taught * (taught.log() - student.log())).sum(1).mean()
    torch.testing.assert_close(SoftDistillLoss(temperature)(STUDENT, TAUGHT), expected)


def test_hard_is_half_of_deits_loss() -> None:
    """The criterion of facebookresearch/deit with `--distillation-type hard`, alpha 0.5."""
    model = Recorded()
    criterion = build_criterion(CrossEntropy(0.0), Distill(teacher="x", kind="hard"), Teacher(model, None, {}))
    expected = 0.5 * (functional.cross_entropy(STUDENT, LABELS) + functional.cross_entropy(STUDENT, TAUGHT.argmax(1)))
    torch.testing.assert_close(criterion(STUDENT, LABELS, IMAGES), expected)
    assert model.images is IMAGES and not model.has_gradients


def test_weight_is_the_share_of_the_teacher() -> None:
    labels = LabelCriterion(CrossEntropy(0.0))
    criterion = DistillCriterion(labels, Recorded(), hard_distill_loss, 0.25)
    expected = 0.75 * labels(STUDENT, LABELS, IMAGES) + 0.25 * hard_distill_loss(STUDENT, TAUGHT)
    torch.testing.assert_close(criterion(STUDENT, LABELS, IMAGES), expected)
    logits = STUDENT.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert criterion(logits, LABELS, IMAGES).dtype == torch.float32


def test_a_teacher_sees_images_in_its_own_normalization() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    own, theirs = ((0.1, 0.5, 0.4), (0.2, 0.3, 1.0)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    normalize = [DeviceTransfer(CPU, torch.float32, *each, torch.contiguous_format).normalize for each in (own, theirs)]
    convert = _build_normalization(own, theirs, CPU)
    assert convert is not None and _build_normalization(own, own, CPU) is None
    torch.testing.assert_close(convert(normalize[0](pixels)), normalize[1](pixels))


@pytest.mark.parametrize(
    ("distill", "name", "weights"),
    [
        ({"teacher": "timm:resnet50.a1_in1k"}, "timm:resnet50", "timm:resnet50.a1_in1k"),
        ({"teacher": "timm:resnet50"}, "timm:resnet50", "default"),
        ({"teacher": "big.pth"}, "resnet18_cifar", "big.pth"),
        ({"teacher": "big.pth", "model": "timm:vit_small_patch16_224"}, "timm:vit_small_patch16_224", "big.pth"),
        ({"teacher": "torchvision:IMAGENET1K_V1", "model": "torchvision:resnet18"}, "torchvision:resnet18",
         "torchvision:IMAGENET1K_V1"),
    ],
)  # fmt: skip
def test_the_model_of_a_teacher(distill: dict, name: str, weights: str) -> None:
    section = teacher_section(Distill(**distill), Model(norm="sync_batch", freeze="backbone"), "")
    assert (section.name, section.weights, section.norm, section.freeze) == (name, weights, "batch", "off")


@pytest.mark.parametrize(
    ("names", "channels", "is_multi_label", "problem"),
    [
        (("a", "b"), 1, False, ""),
        (("b", "a"), 1, False, "was not trained on the 2 classes and 1 channel"),
        (("a", "b"), 3, False, "was trained on images of 3 channels of uint8"),
        (("a", "b"), 1, True, "was trained on several labels per image"),
    ],
)
def test_a_run_teaches_its_own_classes_with_one_label(
    tmp_path: Path, names: tuple[str, ...], channels: int, is_multi_label: bool, problem: str
) -> None:
    own = DatasetInfo("birds", "train", 4, ("a", "b"), 1, None, (0.5,), (1.0,))
    theirs = replace(own, class_names=names, channels=channels)
    trained = TrainedDataset(theirs, is_pixels=False, is_multi_label=is_multi_label)
    RunDir(tmp_path).dataset.write_text(json.dumps(trained.to_dict()))
    checkpoint = str(tmp_path / "checkpoints" / "step-1")
    with pytest.raises(RecipeError, match=f"^train.distill.teacher: run: {problem}") if problem else nullcontext():
        assert check_teacher_run(Distill(teacher="run"), checkpoint, own).class_names == names


@pytest.mark.parametrize(
    ("trained", "given", "fits"),
    [
        (PixelFormat(5, "uint16"), PixelFormat(5, "uint16"), True),
        (PixelFormat(3), PixelFormat(3, "uint16"), True),  # both are divided by their full scale
        (PixelFormat(5, "uint16"), PixelFormat(5, "float32"), False),
        (PixelFormat(5, "float32"), PixelFormat(5, "float32"), True),
        (PixelFormat(3), PixelFormat(1), False),
    ],
)
def test_a_teacher_takes_images_of_its_channels_and_scale(trained: PixelFormat, given: PixelFormat, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(RecipeError, match=f"teacher: run: .*{trained}, .* {given} "):
        _check_pixels(trained, given, Distill(teacher="run"))
