"""Check that an exported file computes the same logits as the run's model, before anyone uses it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.data.loader import LoaderOptions, build_eval_loader
from paceline.data.placement import DeviceTransfer
from paceline.data.sampler import EvalShard
from paceline.data.sources.build import build_validation
from paceline.inference.classifier import Classifier
from paceline.inference.network import ExportModel
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load

# Relative to the largest logit, or to 1 if that is smaller. Another summation order of float32 products changes 1e-6 to
# 1e-5 of it, a wrong layer 1e-2 and more.
PARITY_TOLERANCE = 1e-4
NUM_PARITY_IMAGES = 32
_SEED = 0

# From a model's input to its logits, float32 [n, classes].
LogitsFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ParityImages:
    """At least one image to compare on, uint8 [n, c, h, w], and a description of the images."""

    images: Tensor
    description: str


@dataclass(frozen=True)
class ExportParity:
    """The largest difference of logits, relative to the largest logit or 1, and the images compared.

    `top5` is the number of images with the same five top classes in order (all classes if there are fewer).
    """

    difference: float
    num_images: int
    of: str
    top5: int

    @property
    def is_within_tolerance(self) -> bool:
        """Return whether the difference is within tolerance; NaN is not."""
        return self.difference <= PARITY_TOLERANCE


def load_parity_images(classifier: Classifier) -> ParityImages:
    """Return up to `NUM_PARITY_IMAGES` images of the run's validation split, always the same ones.

    Use noise if there are none, and say why. Raise `RecipeError` for a plugin data set that may not run.
    """
    require_consent(load(str(classifier.run)), own_code=classifier.own_code, of=("data.source",))
    try:
        images = _load_validation_images(classifier)
    except (DataError, RecipeError) as error:
        preprocessing = classifier.preprocessing
        shape = (NUM_PARITY_IMAGES, preprocessing.channels, preprocessing.image_size, preprocessing.image_size)
        noise = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(_SEED))
        return ParityImages(noise, f"noise images, as there are no validation images: {' '.join(str(error).split())}")
    return ParityImages(images, "validation images")


def measure_parity(
    classifier: Classifier, network: ExportModel, answer: LogitsFunction, sample: ParityImages
) -> ExportParity:
    """Return how logits of `answer`, which takes the input of `network`, differ from the classifier's in float32.

    Raise `PacelineError` if the classifier's own logits are NaN or infinite.
    """
    num_images = len(sample.images)
    images = sample.images[torch.arange(max(NUM_PARITY_IMAGES, num_images)) % num_images]
    expected = _reference_logits(classifier, images)
    if not expected.isfinite().all():
        name = classifier.checkpoint.name
        raise PacelineError(f"--checkpoint: {name}: the model's logits are NaN or infinite (use another checkpoint)")
    # One image, then 31 or more, repeating images if need be, detects a fixed batch size.
    inputs = network.prepare_inputs(images)
    with torch.inference_mode():
        actual = torch.cat([answer(inputs[:1]), answer(inputs[1:])])
    scale = max(1.0, float(expected.abs().max()))
    first = min(5, expected.shape[1])
    agree = (expected.topk(first).indices == actual.topk(first).indices).all(dim=1)[:num_images]
    difference = float((expected - actual).abs().max()) / scale
    return ExportParity(difference, num_images, sample.description, int(agree.sum()))


def check_parity(parity: ExportParity, what: str) -> None:
    """Raise `PacelineError` if the exported file `what` is not equivalent to the model."""
    if not parity.is_within_tolerance:
        raise PacelineError(
            f"{what}: its logits differ from PyTorch's by {parity.difference:.2g} of the largest on "
            f"{parity.num_images} {parity.of}, more than {PARITY_TOLERANCE:g} (use another --format; nothing was written)"
        )


def _reference_logits(classifier: Classifier, images: Tensor) -> Tensor:
    # The classifier's own code, which the exported model does not share.
    model = copy.deepcopy(classifier.model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
    preprocessing = classifier.preprocessing
    placement = DeviceTransfer(
        torch.device("cpu"), torch.float32, preprocessing.mean, preprocessing.std, torch.contiguous_format
    )
    with torch.inference_mode():
        logits: Tensor = model(placement.normalize(images))
    return logits


def _load_validation_images(classifier: Classifier) -> Tensor:
    data = classifier.recipe.data
    source = build_validation(data.source, skip_bad=True)
    number = min(NUM_PARITY_IMAGES, len(source))
    if not number:
        raise DataError("the validation split is empty")
    shard = EvalShard(number, number, split_size=len(source))
    options = LoaderOptions(workers=0, pin_memory=False)
    skipping = data.model_copy(update={"on_bad_image": "skip"})
    loader = build_eval_loader(skipping, source, shard, classifier.preprocessing.image_size, options)
    images = torch.cat([batch.images for batch in loader.batches(0, shard.num_batches)])
    if not len(images):
        raise DataError(f"none of {number} that were drawn can be read (paceline data verify lists all)")
    return images
