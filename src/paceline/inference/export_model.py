"""Define the model to export, the protocol of export formats and the parity check."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

import paceline
from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.results import printable_class_name
from paceline.data.loaders.build import LoaderOptions, build_eval_loader
from paceline.data.order import EvalShard
from paceline.data.sources.build import build_validation
from paceline.data.transfer import DeviceTransfer
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load

# Relative to the largest logit, or to 1 if that is smaller. Another summation order of float32 products changes 1e-6 to
# 1e-5 of it, a wrong layer 1e-2 and more.
PARITY_TOLERANCE = 1e-4
NUM_PARITY_IMAGES = 32
_SEED = 0
# From a model's input to its logits, float32 [n, classes].
LogitsFunction = Callable[[Tensor], Tensor]
OUTPUT_NAME = "logits"


class ExportModel(Protocol):
    """A model to export: from its single input `images` to logits, float32 [n, classes]."""

    @property
    def module(self) -> nn.Module:
        """Return the module to export, in eval mode; its argument is named `images`."""
        ...

    @property
    def input_description(self) -> str:
        """Describe `images` in a sentence."""
        ...

    @property
    def layout(self) -> str:
        """Return dtype and axis order of `images`, such as `uint8 NHWC`."""
        ...

    def prepare_inputs(self, images: Tensor) -> Tensor:
        """Return the module's input for uint8 images [n, c, h, w]."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the trained model's complete state_dict; floating tensors are float32."""
        ...


class BareModel:
    """The trained model alone; its caller normalizes the pixels."""

    layout = "float32 NCHW"

    def __init__(self, classifier: Classifier) -> None:
        self.module = _NamedInput(_to_float32_cpu(classifier.model))
        self._preprocessing = classifier.preprocessing
        self._pixels = _PixelNormalization(self._preprocessing)

    @property
    def input_description(self) -> str:
        """Describe `images` in a sentence."""
        size = self._preprocessing.image_size
        return f"float32 [batch, {self._preprocessing.channels}, {size}, {size}], (pixel / 255 - mean) / std"

    def prepare_inputs(self, images: Tensor) -> Tensor:
        """Return float32 [n, c, h, w]."""
        normalised: Tensor = self._pixels(images)
        return normalised

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors."""
        return _copy_tensors(self.module.network)


class ModelWithPreprocessing:
    """The trained model behind pixel normalization, for images as an image library returns them."""

    layout = "uint8 NHWC"

    def __init__(self, classifier: Classifier) -> None:
        self.module = _NamedInput(
            _to_float32_cpu(classifier.model), _PixelNormalization(classifier.preprocessing, is_last=True)
        )
        self._preprocessing = classifier.preprocessing

    @property
    def input_description(self) -> str:
        """Describe `images` in a sentence."""
        size = self._preprocessing.image_size
        return f"uint8 [batch, {size}, {size}, {self._preprocessing.channels}], pixels 0 to 255"

    def prepare_inputs(self, images: Tensor) -> Tensor:
        """Return uint8 [n, h, w, c]."""
        return images.permute(0, 2, 3, 1).contiguous()

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors."""
        return _copy_tensors(self.module.network)


def build_export_model(classifier: Classifier, *, with_preprocessing: bool) -> ExportModel:
    """Return the model to export, with or without pixel normalization."""
    return ModelWithPreprocessing(classifier) if with_preprocessing else BareModel(classifier)


class _PixelNormalization(nn.Module):
    """Normalize uint8 images [n, c, h, w], or [n, h, w, c] with `is_last`, to float32 [n, c, h, w]."""

    mean: Tensor
    scale: Tensor

    def __init__(self, preprocessing: Preprocessing, *, is_last: bool = False) -> None:
        super().__init__()
        self._is_last = is_last
        shape = (1, preprocessing.channels, 1, 1)
        mean = torch.tensor(preprocessing.mean, dtype=torch.float32).mul_(255).view(shape)
        scale = torch.tensor(preprocessing.std, dtype=torch.float32).mul_(255).reciprocal_().view(shape)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized images."""
        planes = images.permute(0, 3, 1, 2) if self._is_last else images
        # Same order of operations as `DeviceTransfer.normalize`, so that the results are bit-identical.
        return (planes.to(torch.float32) - self.mean) * self.scale


class _NamedInput(nn.Module):
    """Call a model through an argument with the name of the file's input."""

    def __init__(self, network: nn.Module, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.network = network
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits."""
        logits: Tensor = self.network(self.before(images))
        return logits


def _to_float32_cpu(model: nn.Module) -> nn.Module:
    # An exported file computes in float32 and runs anywhere, whatever the precision and device of the run.
    portable = copy.deepcopy(model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
    return portable.eval().requires_grad_(False)


def _copy_tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}


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
        """Whether the difference is within tolerance; NaN is not."""
        return self.difference <= PARITY_TOLERANCE


def load_parity_images(classifier: Classifier) -> ParityImages:
    """Return up to `NUM_PARITY_IMAGES` images of the run's validation split, always the same ones.

    Use noise if there are none, and say why. Raise `RecipeError` for a plugin data set that may not run.
    """
    require_consent(load(str(classifier.run)), own_code=classifier.own_code, paths=("data.source",))
    try:
        images = _load_validation_images(classifier)
    except (DataError, RecipeError) as error:
        preprocessing = classifier.preprocessing
        shape = (NUM_PARITY_IMAGES, preprocessing.channels, preprocessing.image_size, preprocessing.image_size)
        noise = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(_SEED))
        return ParityImages(noise, f"noise images, as there are no validation images: {' '.join(str(error).split())}")
    return ParityImages(images, "validation images")


def measure_parity(
    classifier: Classifier, network: ExportModel, compute_logits: LogitsFunction, sample: ParityImages
) -> ExportParity:
    """Compare `compute_logits`, which takes the input of `network`, with the classifier in float32.

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
        actual = torch.cat([compute_logits(inputs[:1]), compute_logits(inputs[1:])])
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
            f"{parity.num_images} {parity.of}, more than {PARITY_TOLERANCE:g} "
            "(use another --format; nothing was written)"
        )


def _reference_logits(classifier: Classifier, images: Tensor) -> Tensor:
    # The classifier's own code, which the exported model does not share.
    model = copy.deepcopy(classifier.model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
    preprocessing = classifier.preprocessing
    transfer = DeviceTransfer(
        torch.device("cpu"), torch.float32, preprocessing.mean, preprocessing.std, torch.contiguous_format
    )
    with torch.inference_mode():
        logits: Tensor = model(transfer.normalize(images))
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


class ExportFormat(Protocol):
    """A kind of exported file or folder."""

    @property
    def suffix(self) -> str:
        """Return the file suffix; empty for a folder."""
        ...

    @property
    def library(self) -> str:
        """Return the library name for the Hugging Face Hub."""
        ...

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return facts about files of this format as (name, text)."""
        ...

    def write(self, network: ExportModel, classifier: Classifier, path: Path) -> None:
        """Write `network`, the export model of `classifier`, to `path`. Raise `PacelineError` if that is impossible."""
        ...

    def open(self, path: Path) -> LogitsFunction:
        """Return a function that computes logits with the file at `path`, loaded as users load it."""
        ...

    def usage(self, name: str) -> str:
        """Return Python code that loads the file `name` and computes logits."""
        ...


def example_inputs(classifier: Classifier, network: ExportModel) -> torch.Tensor:
    """Return two black images as the model's input; with one, torch.export would specialize the batch size to 1."""
    size, channels = classifier.preprocessing.image_size, classifier.preprocessing.channels
    return network.prepare_inputs(torch.zeros(2, channels, size, size, dtype=torch.uint8))


def trace_program(classifier: Classifier, network: ExportModel) -> torch.export.ExportedProgram:
    """Return `network` as a graph for any batch size, without source paths.

    Raise `PacelineError` if it cannot be traced.
    """
    try:
        batch = torch.export.Dim("batch", min=1)
        inputs = (example_inputs(classifier, network),)
        program = torch.export.export(network.module, inputs, dynamic_shapes={"images": {0: batch}})
    except Exception as error:  # the tracer raises anything that the model's Python code does
        first = " ".join(str(error).split())[:150]
        raise PacelineError(
            f"model.name: {classifier.recipe.model.name} cannot be traced for a batch of any size: {first} "
            "(use --format safetensors)"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has paths of this machine
    return program


def quote_python(text: str) -> str:
    """Return `text` as a Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def export_metadata(classifier: Classifier, network: ExportModel) -> dict[str, str]:
    """Return the metadata of a file as JSON by name: `classes` in the order of the logits, `preprocessing`, `paceline`.

    In `preprocessing`, `resize` is the short side before the center crop to `image_size` pixels squared (null without
    crop), and `mean` and `std` are of pixels in [0, 1].
    """
    preprocessing = classifier.preprocessing
    values = {
        "classes": [printable_class_name(each) for each in classifier.classes],
        "preprocessing": {
            "image_size": preprocessing.image_size,
            "resize": preprocessing.resize,
            "interpolation": "bilinear, antialiased",
            "channels": preprocessing.channels,
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "input": network.layout,
        },
        "paceline": {
            "version": paceline.__version__,
            "recipe": classifier.recipe.hash,
            "model": classifier.recipe.model.name,
            "checkpoint": classifier.checkpoint.name,
        },
    }
    return {name: json.dumps(value) for name, value in values.items()}
