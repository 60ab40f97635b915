"""The criterion of a step: the loss of the labels, or with `train.distill` also that of a teacher's predictions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.core.pixels import PixelFormat
from paceline.core.run_dir import RunDir
from paceline.core.units import count
from paceline.models.build import build_model
from paceline.models.published import find_published_weights
from paceline.recipe.load import load
from paceline.recipe.plan import mean_and_std
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.model import Model, is_published
from paceline.recipe.schema.train import Distill
from paceline.training.checkpoint import read_state
from paceline.training.context import RunContext
from paceline.training.init_weights import load_initial_weights
from paceline.training.precision import Precision
from paceline.training.trained_dataset import read_trained_dataset
from paceline.training.trainer import Criterion

_PROVENANCE: Final = "teacher"
_FIELD: Final = "train.distill.teacher"


@dataclass(frozen=True)
class LabelCriterion:
    """The loss of the labels alone."""

    loss: nn.Module

    def __call__(self, logits: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """Return the loss []."""
        loss: Tensor = self.loss(logits, targets)
        return loss


@dataclass(frozen=True)
class Normalization:
    """Convert images that are normalized for the trained model to the teacher's: `scale` and `shift` are [C, 1, 1]."""

    scale: Tensor
    shift: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images [N, C, H, W] in their own dtype."""
        return images * self.scale.to(images.dtype) + self.shift.to(images.dtype)


@dataclass(frozen=True)
class Teacher:
    """A frozen model in evaluation mode; `provenance` has its path and SHA-256.

    With `normalization` its images have another mean and standard deviation than the trained model's.
    """

    model: nn.Module
    normalization: Normalization | None
    provenance: Mapping[str, Any]

    def __call__(self, images: Tensor) -> Tensor:
        """Return logits [N, C] without gradients."""
        with torch.no_grad():
            logits: Tensor = self.model(self.normalization(images) if self.normalization else images)
            return logits


@dataclass(frozen=True)
class DistillCriterion:
    """The sum of the labels' loss and `loss` of the teacher's logits, weighted 1 - `weight` and `weight`.

    The teacher sees the augmented images of the step, mixed ones included.
    """

    labels: LabelCriterion
    teacher: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    weight: float

    def __call__(self, logits: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """Return the loss []."""
        taught = self.teacher(images)
        # float32, as the loss of the labels: autocast would round.
        with torch.autocast(logits.device.type, enabled=False):
            student = logits.to(torch.promote_types(logits.dtype, torch.float32))
            distilled = self.loss(student, taught.to(student.dtype))
        return (1 - self.weight) * self.labels(logits, targets, images) + self.weight * distilled


@dataclass(frozen=True)
class SoftDistillLoss:
    """KL divergence of softened probabilities, averaged over images, times the squared `temperature`.

    Hinton et al. 2015 (arXiv 1503.02531), section 2: the square keeps the size of the gradient.
    """

    temperature: float

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss [] of logits [N, C]."""
        log_student, log_teacher = ((logits / self.temperature).log_softmax(dim=1) for logits in (student, teacher))
        divergence = functional.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
        return divergence * self.temperature**2


def hard_distill_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy [] of the teacher's first class (DeiT, arXiv 2012.12877, equation 3)."""
    return functional.cross_entropy(student, teacher.argmax(dim=1))


def build_criterion(loss: nn.Module, section: Distill | str, teacher: Teacher | None) -> Criterion:
    """Return the criterion of a step from the loss of the labels, and the teacher if there is one."""
    labels = LabelCriterion(loss)
    if isinstance(section, str) or teacher is None:
        return labels
    distilled = SoftDistillLoss(section.temperature) if section.kind == "soft" else hard_distill_loss
    return DistillCriterion(labels, teacher, distilled, section.weight)


def teacher_section(section: Distill, student: Model, checkpoint: str) -> Model:
    """Return the recipe section of the teacher's model, with its weights; `checkpoint` is that of a run, or "".

    Raise `RecipeError` if it is not known, or code of your own that the recipe does not name.
    """
    if checkpoint:
        built = load(str(Path(checkpoint).parent.parent)).recipe.model
        if section.model != "auto":
            raise RecipeError(
                f"train.distill.model: {section.model} has no effect on a run, which has its own (leave it out)"
            )
    elif section.model != "auto":
        built = Model(name=section.model)
    elif section.teacher.startswith("timm:"):
        built = Model(name=section.teacher.partition(".")[0])
    elif is_published(section.teacher):
        library = "torchvision" if section.teacher.startswith("torchvision:") else "timm"
        raise RecipeError(
            f"train.distill.model: auto does not tell the model of {section.teacher} "
            f"(set train.distill.model={library}:NAME)"
        )
    else:
        built = student
    if is_plugin_name(built.name) and built.name != student.name:
        raise RecipeError(
            f"{_FIELD}: {section.teacher}: is of {built.name}, which is code of your own "
            "(set model.name to it, or name another teacher)"
        )
    is_name = section.teacher.startswith("timm:") and "." not in section.teacher
    values = {"weights": "default" if is_name else section.teacher, "weights_sha256": "off"}
    values |= {"freeze": "off", "unfreeze": "off", "lora": "off"}
    values |= {"norm": "batch"} if built.norm == "sync_batch" else {}
    try:
        return Model(**{**built.model_dump(exclude_unset=True), **values})
    except ValidationError as error:
        raise RecipeError(f"{_FIELD}: {error.errors()[0]['msg']}") from None


@contextmanager
def teacher_errors(section: Distill, wanted: str = "") -> Iterator[None]:
    """Raise errors about `model` as errors about the teacher; `wanted` are the classes it must have."""
    try:
        yield
    except RecipeError as error:
        if str(error).startswith("model.freeze"):  # its classifier would start fresh
            raise RecipeError(f"{_FIELD}: {section.teacher}: does not have {wanted}") from None
        name_field = _FIELD if section.model == "auto" else "train.distill.model"
        text = str(error).replace("model.weights", _FIELD).replace("model.name", name_field)
        raise RecipeError(text) from None


def check_teacher_run(section: Distill, checkpoint: str, info: DatasetInfo) -> DatasetInfo:
    """Return the dataset that the run of `checkpoint` was trained on.

    Raise `RecipeError` unless it has the classes and pixels of `info`, and one label per image.
    """
    trained = read_trained_dataset(RunDir(Path(checkpoint).parent.parent))
    if trained.info.class_names != info.class_names:
        raise RecipeError(f"{_FIELD}: {section.teacher}: was not trained on {_describe_classes(info)}")
    _check_pixels(trained.info.pixel_format, info.pixel_format, section)
    if trained.is_multi_label:
        raise RecipeError(
            f"{_FIELD}: {section.teacher}: was trained on several labels per image, and images of {info.name} have one "
            "(name another teacher)"
        )
    return trained.info


def load_teacher(
    context: RunContext, precision: Precision, section: Distill, checkpoint: str, *, may_download: bool
) -> Teacher:
    """Load the teacher of `section`; `checkpoint` is that of a run, or "".

    Raise `RecipeError` if it has other classes or cannot take the images of the run, and as `load_initial_weights`.
    """
    plan, info, own = context.plan, context.datasets.train.info, context.mean_and_std
    theirs = own
    model_section = teacher_section(section, context.recipe.model, checkpoint)
    if checkpoint:
        trained = check_teacher_run(section, checkpoint, info)
        theirs = mean_and_std(load(str(Path(checkpoint).parent.parent)).recipe.data, trained)
    with teacher_errors(section, _describe_classes(info)):
        with torch.random.fork_rng(devices=[]):
            model = build_model(
                model_section, num_classes=plan.num_classes, channels=plan.channels, image_size=plan.image_size
            )
        model.requires_grad_(False)  # before loading: a frozen classifier must not keep its random initial weights
        weights = load_initial_weights(model_section, model, checkpoint, may_download=may_download)
        if is_published(model_section.weights) and plan.channels == 3:
            config = find_published_weights(model_section).config
            theirs = tuple(config["mean"]), tuple(config["std"])
    precision.cast_model(model)
    model.to(context.device).to(memory_format=context.memory_format).eval()
    origin = weights.provenance.get("started_from", {})
    teacher = Teacher(model, _build_normalization(own, theirs, context.device), {_PROVENANCE: origin})
    _probe(teacher, context, precision, section)
    return teacher


def _check_pixels(trained: PixelFormat, given: PixelFormat, section: Distill) -> None:
    # Integers of 8 and 16 bits have the same scale once they are divided; that of floats is the dataset's own.
    if trained.channels != given.channels or ("float32" in (trained.pixels, given.pixels) and trained != given):
        raise RecipeError(
            f"{_FIELD}: {section.teacher}: was trained on images of {trained}, and the dataset has {given} "
            "(name another teacher)"
        )


def check_same_teacher(teacher: Teacher, start_from: str, section: Distill) -> None:
    """Raise `RecipeError` if the checkpoint `start_from` was trained with another teacher."""
    before, now = read_state(Path(start_from)).get(_PROVENANCE, {}), teacher.provenance[_PROVENANCE]
    if before.get("sha256") != now.get("sha256"):
        raise RecipeError(
            f"{_FIELD}: {section.teacher}: its SHA-256 is {now.get('sha256')}, and the run was trained with "
            f"{before.get('sha256')} (bring that teacher back, or start a new run)"
        )


def _describe_classes(info: DatasetInfo) -> str:
    classes, channels = count(info.num_classes, "class", "classes"), count(info.channels, "channel")
    return f"the {classes} and {channels} of the dataset (name a teacher of the same classes and channels)"


_MeanAndStd = tuple[tuple[float, ...], tuple[float, ...]]


def _build_normalization(own: _MeanAndStd, theirs: _MeanAndStd, device: torch.device) -> Normalization | None:
    if own == theirs:
        return None
    (mean, std), (their_mean, their_std) = (
        (torch.tensor(each, dtype=torch.float64).view(-1, 1, 1) for each in pair) for pair in (own, theirs)
    )
    scale, shift = std / their_std, (mean - their_mean) / their_std
    return Normalization(scale.float().to(device), shift.float().to(device))


def _probe(teacher: Teacher, context: RunContext, precision: Precision, section: Distill) -> None:
    """Raise `RecipeError` unless the teacher returns a logit per class for the sizes of the run's images."""
    plan = context.plan
    for size in {size for _, size in plan.train_sizes}:
        images = torch.zeros(2, plan.channels, size, size, dtype=precision.dtype, device=context.device)
        try:
            with precision.autocast():
                shape = list(teacher(images).shape)
        except Exception as error:  # a model may raise anything
            shape, reason = [], " ".join(str(error).split())[:150]
        else:
            reason = f"its outputs for two images have the shape {shape}"
        if shape != [2, plan.num_classes]:
            raise RecipeError(
                f"{_FIELD}: {section.teacher}: does not classify images of {size} pixels: {reason} (name another)"
            )
