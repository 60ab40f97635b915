"""Load the trained model of a run with its preprocessing, from its run directory alone."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.core.pixels import PixelFormat, PixelType
from paceline.core.run_dir import RunDir
from paceline.data.decode_array import decode_image
from paceline.data.loaders.reader import to_planes
from paceline.data.resize import Resizer, build_eval_resizer, to_tensor
from paceline.data.transfer import DeviceTransfer
from paceline.models.validate import choose_memory_format
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.plan import eval_image_size, mean_and_std
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.train import PrecisionName
from paceline.training.calibration import read_temperature
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy
from paceline.training.eval_model import eval_precision, load_eval_model
from paceline.training.evaluator import EVAL_VIEWS, EvalViews
from paceline.training.precision import Precision, build_precision, set_numerics
from paceline.training.trained_dataset import TrainedDataset, read_trained_dataset

_NO_RANDOM_NUMBERS = np.empty(0)


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing from an image to the model's input, as in evaluation.

    Scale the short side to `resize` pixels and crop the center to `image_size` pixels squared; without `resize`,
    stretch the whole image. `channels` is 3 for RGB and 1 for grayscale. `mean` and `std` are per channel, of `pixels`
    divided by 255 (uint8), 65,535 (uint16) or 1 (float32). `interpolation`, bilinear or bicubic, is antialiased:
    Pillow's, or torch's with `is_pixels`, for datasets of pixel arrays of one size, and for pixels that are not 8-bit
    gray or RGB.
    """

    image_size: int
    resize: int | None
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_pixels: bool = False
    interpolation: str = "bilinear"
    pixels: PixelType = "uint8"

    @property
    def pixel_format(self) -> PixelFormat:
        """Channels and type of the pixels of image files."""
        return PixelFormat(self.channels, self.pixels)


@dataclass(frozen=True)
class Classifier:
    """A run's trained model in evaluation mode; `classes` are in the order of its logits.

    `sizing`, `place`, `precision` and `views` are those of evaluation. `trust_code` allows code that the run names to
    run. `evaluated_image_size` is that of the run's evaluation in pixels, None if `preprocessing` has the same.
    `temperature` divides the logits; it is None if the checkpoint was not calibrated. With `threshold` images have
    several labels: the classes whose probability, the sigmoid of a logit, is above it.
    """

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    run: Path
    checkpoint: Path
    recipe: Recipe
    sizing: Resizer
    place: DeviceTransfer
    precision: Precision
    views: EvalViews
    trust_code: bool = False
    evaluated_image_size: int | None = None
    temperature: float | None = None
    threshold: float | None = None

    @property
    def activation(self) -> Literal["softmax", "sigmoid"]:
        """Return the function that turns logits into probabilities."""
        return "softmax" if self.threshold is None else "sigmoid"

    @property
    def model_image_size(self) -> int:
        """Return the height and width in pixels of the images that the run evaluated, for which its model was built."""
        return self.evaluated_image_size or self.preprocessing.image_size

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.place.device

    def image(self, data: bytes, name: str) -> Tensor:
        """Return the image in a file's bytes, uint8 or float32 [channels, image_size, image_size], on the CPU.

        Decode the same formats as training (`data.decode`). Raise `ImageError`, which calls the file `name`.
        """
        preprocessing = self.preprocessing
        decoded = decode_image(data, preprocessing.pixel_format, name=name)
        if isinstance(decoded, np.ndarray):
            return self.sizing(to_planes(decoded), _NO_RANDOM_NUMBERS, preprocessing.image_size)
        image = to_tensor(decoded) if preprocessing.is_pixels else decoded
        return self.sizing(image, _NO_RANDOM_NUMBERS, preprocessing.image_size)

    def log_probabilities(self, images: Tensor) -> Tensor:
        """Return float64 [N, classes] on the model's device for images [N, C, H, W] on any device."""
        with torch.inference_mode():
            normalized = self.place.normalize(images.to(self.device, non_blocking=True))
            with self.precision.autocast():
                logits = self.views(self.model, normalized)
            # In float64, so that rounding creates no ties among 16-bit logits.
            logits = logits.double() / (self.temperature or 1.0)
            return logits.log_softmax(dim=1) if self.threshold is None else nn.functional.logsigmoid(logits)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return float32 [N, classes] on the model's device for images [N, C, H, W].

        Each row sums to 1, unless there is a `threshold`.
        """
        return self.log_probabilities(images).exp().float()


def load_classifier(
    run: Path, checkpoint: str = "last", device: str = "auto", *, trust_code: bool = False
) -> Classifier:
    """Load the model of run directory `run` from checkpoint `last`, `best` or a step number.

    The weights are those that the run evaluated: averaged ones if it keeps any (`train.ema`, schedule_free). `device`
    is cpu, cuda, or auto for a GPU if there is one. A number format that the CPU lacks becomes float32. On a GPU, set
    torch to the run's numerics (TF32 or not). Torch's random state does not change.

    A plugin model, which the run names by import path, is imported only with `trust_code`: set it if you trust the code
    and the run. Other plugins of the run are never imported. Raise `RecipeError` for a plugin model without
    `trust_code`, for a folder that is not a run and for an unknown device, and `CheckpointError` if there is no
    complete checkpoint.
    """
    rundir = RunDir.existing(run)
    loaded = load(str(rundir.path))
    require_consent(loaded, trust_code=trust_code, paths=("model",))
    recipe = loaded.recipe
    facts = read_trained_dataset(rundir)
    target = _choose_device(device)
    precision = _build_eval_precision(recipe.train.precision, target)
    preprocessing = _build_preprocessing(recipe.data, facts)
    path = CheckpointStorage(rundir.checkpoints, KeepPolicy(1)).by_name(checkpoint)
    info = facts.info
    layout = choose_memory_format(recipe.model, target, num_classes=info.num_classes, channels=info.channels)
    model = load_eval_model(recipe, facts, precision, target, path, layout)
    return Classifier(
        model=model,
        classes=info.class_names,
        preprocessing=preprocessing,
        run=rundir.path,
        checkpoint=path,
        recipe=recipe,
        sizing=build_eval_resizer(recipe.data, are_one_size=facts.are_one_size),
        place=DeviceTransfer(
            target, precision.dtype, preprocessing.mean, preprocessing.std, layout, pixels=preprocessing.pixels
        ),
        precision=precision,
        views=EVAL_VIEWS[recipe.data.eval_views],
        trust_code=trust_code,
        temperature=read_temperature(rundir, path),
        threshold=recipe.train.label_threshold if facts.is_multi_label else None,
    )


def with_image_size(classifier: Classifier, image_size: int) -> Classifier:
    """Return `classifier` for images of `image_size` pixels squared, with the same share of the image cropped.

    Raise `RecipeError` if its model does not support that size.
    """
    preprocessing, recipe = classifier.preprocessing, classifier.recipe
    if image_size == preprocessing.image_size:
        return classifier
    # On the CPU in float32, like an export, so that a failure is the model's and not a GPU kernel's.
    model = copy.deepcopy(classifier.model).to("cpu", torch.float32)
    try:
        with torch.inference_mode():
            shape = tuple(model(torch.zeros(1, preprocessing.channels, image_size, image_size)).shape)
    except Exception as error:  # a model may raise anything
        reason = " ".join(str(error).split())[:150]
        raise _image_size_error(classifier, image_size, f": {reason}") from None
    if shape != (1, len(classifier.classes)):
        raise _image_size_error(
            classifier, image_size, f", for which it returns shape {list(shape)} instead of a logit per class"
        )
    resize = None if preprocessing.resize is None else round(image_size / recipe.data.eval_crop)
    return replace(
        classifier,
        preprocessing=replace(preprocessing, image_size=image_size, resize=resize),
        evaluated_image_size=classifier.evaluated_image_size or preprocessing.image_size,
    )


def _image_size_error(classifier: Classifier, image_size: int, why: str) -> RecipeError:
    size = classifier.preprocessing.image_size
    return RecipeError(
        f"--image-size: {classifier.recipe.model.name} cannot take images of {image_size} x {image_size} pixels{why} "
        f"(leave it out: the run's are {size} x {size})"
    )


def _choose_device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"--device: {name!r} is not a device (write cpu, cuda or auto)")
    if name == "cuda" and not has_gpu:
        raise RecipeError("--device: cuda: no usable GPU (use --device cpu)")
    return torch.device("cuda", 0) if has_gpu and name != "cpu" else torch.device("cpu")


def _build_eval_precision(trained: PrecisionName, device: torch.device) -> Precision:
    # A CPU may lack the number format of the run's evaluation.
    name = eval_precision(trained, device)
    # cuDNN's benchmark takes longer than a few images do, and its choice may change the last bits.
    set_numerics(name, device, benchmark=False)
    return build_precision(name, device)


def _build_preprocessing(data: Data, facts: TrainedDataset) -> Preprocessing:
    info = facts.info
    size = eval_image_size(data, info)
    mean, std = mean_and_std(data, info)
    is_cropped = data.eval_resize == "crop" and not facts.are_one_size
    return Preprocessing(
        image_size=size,
        resize=round(size / data.eval_crop) if is_cropped else None,
        channels=info.channels,
        mean=mean,
        std=std,
        is_pixels=facts.is_pixels,
        interpolation=data.interpolation,
        pixels=info.pixels,
    )
