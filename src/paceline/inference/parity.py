"""Whether what was exported answers as the run's network does: on its own images, before anybody is given the file."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.data.loader import LoaderOptions, build_eval_loader
from paceline.data.placement import Placement
from paceline.data.sampler import EvalShard
from paceline.data.sources.build import build_validation
from paceline.inference.classifier import Classifier
from paceline.inference.network import Network
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load

TOLERANCE = 1e-4
"""Of the largest logit, or of 1 where they are smaller. float32 sums of a few thousand products in another order differ
by 1e-6 to 1e-5 of it; a layer that is another one, by 1e-2 and more."""
NUM_IMAGES = 32
_SEED = 0

Answer = Callable[[Tensor], Tensor]
"""From what a network is given to its logits, float32 [n, classes]."""


@dataclass(frozen=True)
class Sample:
    """Images to compare on, uint8 [n, c, h, w], at least one, and what they are in words."""

    images: Tensor
    of: str


@dataclass(frozen=True)
class Parity:
    """The largest difference between two networks' logits, over the largest logit or 1, and how it was found.

    `top5` is how many of the images have the same five classes first, in order (or all, where there are fewer).
    """

    difference: float
    num_images: int
    of: str
    top5: int

    @property
    def is_kept(self) -> bool:
        """Whether the difference is small enough. One that is no number is not."""
        return self.difference <= TOLERANCE


def sample_images(classifier: Classifier) -> Sample:
    """Return up to `NUM_IMAGES` images of the run's validation split, drawn once and for all.

    Noise stands in where there are none, with the reason. Raise `RecipeError` for a data set that is code which the run
    names and which may not run.
    """
    require_consent(load(str(classifier.run)), own_code=classifier.own_code, of=("data.source",))
    try:
        images = _validation_images(classifier)
    except (DataError, RecipeError) as error:
        preprocessing = classifier.preprocessing
        shape = (NUM_IMAGES, preprocessing.channels, preprocessing.image_size, preprocessing.image_size)
        noise = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(_SEED))
        return Sample(noise, f"images of noise, as there are no validation images: {' '.join(str(error).split())}")
    return Sample(images, "validation images")


def compare(classifier: Classifier, network: Network, answer: Answer, sample: Sample) -> Parity:
    """Return how the logits of `answer`, which is asked as `network` is, differ from the classifier's own in float32.

    The file is asked for one image and then for 31 or more, few images being asked again, so that a batch that is not
    of any size is found. Raise `PacelineError` where the classifier's own are no numbers.
    """
    num_images = len(sample.images)
    images = sample.images[torch.arange(max(NUM_IMAGES, num_images)) % num_images]
    expected = _expected(classifier, images)
    if not expected.isfinite().all():
        name = classifier.checkpoint.name
        raise PacelineError(f"--checkpoint: {name}: its network's logits are no numbers (take another checkpoint)")
    inputs = network.inputs(images)
    with torch.inference_mode():
        found = torch.cat([answer(inputs[:1]), answer(inputs[1:])])
    scale = max(1.0, float(expected.abs().max()))
    first = min(5, expected.shape[1])
    agree = (expected.topk(first).indices == found.topk(first).indices).all(dim=1)[:num_images]
    difference = float((expected - found).abs().max()) / scale
    return Parity(difference, num_images, sample.of, int(agree.sum()))


def check(parity: Parity, what: str) -> None:
    """Raise `PacelineError` where `what` was exported answers otherwise than the network."""
    if not parity.is_kept:
        raise PacelineError(
            f"{what}: its logits differ from PyTorch's by {parity.difference:.2g} of the largest on "
            f"{parity.num_images} {parity.of}, more than {TOLERANCE:g} (use another --format; nothing was written)"
        )


def _expected(classifier: Classifier, images: Tensor) -> Tensor:
    """Return the logits of the classifier's own network and normalising, which the exported ones are other code than.

    They are computed in float32 on the CPU, as a file's are.
    """
    model = copy.deepcopy(classifier.model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
    told = classifier.preprocessing
    place = Placement(torch.device("cpu"), torch.float32, told.mean, told.std, torch.contiguous_format)
    with torch.inference_mode():
        logits: Tensor = model(place.normalise(images))
    return logits


def _validation_images(classifier: Classifier) -> Tensor:
    """Return images as evaluation shows them. Raise `DataError` or `RecipeError` where there are none."""
    data = classifier.recipe.data
    source = build_validation(data.source, skip_bad=True)
    number = min(NUM_IMAGES, len(source))
    if not number:
        raise DataError("the validation split is empty")
    shard = EvalShard(number, number, of=len(source))
    options = LoaderOptions(workers=0, pin_memory=False)
    skipping = data.model_copy(update={"on_bad_image": "skip"})
    loader = build_eval_loader(skipping, source, shard, classifier.preprocessing.image_size, options)
    images = torch.cat([batch.images for batch in loader.batches(0, shard.num_batches)])
    if not len(images):
        raise DataError(f"none of {number} that were drawn can be read (paceline data verify lists all)")
    return images
