"""Draw over images what the model looks at for a class, for reports and `paceline predict --explain`."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from paceline.core.dataset import Source, has_one_size
from paceline.core.results import MisclassifiedImage
from paceline.data.bad_images import BadImagePolicy
from paceline.data.loaders.reader import ImageReader
from paceline.data.resize import build_eval_resizer
from paceline.data.timing import BatchTimer
from paceline.data.transfer import DeviceTransfer
from paceline.measure.timer import now_s
from paceline.models.grad_cam import FeatureGrid, choose_layer, grad_cam, occlusion_maps
from paceline.recipe.plugins import describe_error
from paceline.recipe.schema.data import Data
from paceline.training.context import RunContext
from paceline.training.ema import WeightAverage
from paceline.training.precision import Precision
from paceline.training.thumbnails import to_visible

_TIME_LIMIT_S: Final = (0.3, 5.0)
"""Least and most seconds for the maps of a run's worst images, checked between images; those beyond have none."""
_TIME_SHARE: Final = 0.03
"""Share of the training time for them."""
_HEAT: Final = np.array([[190, 0, 0], [255, 120, 0], [255, 240, 80]], dtype=np.float64)  # red, orange, yellow
_MAX_OPACITY: Final = 0.8

Overlays = Mapping[str, Image.Image]
"""Images by what they explain: the `predicted` and the `true` class."""
ExplainMistakes = Callable[[Sequence[MisclassifiedImage]], dict[int, Overlays]]
"""Return the overlays of misclassified images by index; some may have none."""


class MapPainter:
    """Draw what `model` looks at, with the preprocessing and the number format of its evaluation.

    `layer` is the name of a layer for Grad-CAM. For `auto` it is the last with a grid of features; if these are tokens,
    parts of the image are covered instead.
    """

    def __init__(
        self,
        model: nn.Module,
        transfer: DeviceTransfer,
        precision: Precision,
        layer: str = "auto",
        *,
        is_multi_label: bool,
    ) -> None:
        self._model, self._transfer, self._precision, self._layer = model, transfer, precision, layer
        self._is_multi_label = is_multi_label
        self._chosen: tuple[str, FeatureGrid] | None = None

    def __call__(self, images: Tensor, classes: Tensor) -> list[list[Image.Image]]:
        """Return an image per class int64 [N, M], of `images` [N, C, H, W] before normalization.

        Raise `RecipeError` if the model has no layer to explain with.
        """
        normalized = self._transfer.normalize(images.to(self._transfer.device))
        with self._precision.autocast():
            if self._chosen is None:
                self._chosen = choose_layer(self._model, normalized[:2], self._layer)
            classes = classes.to(self._transfer.device)
            if self._layer == "auto" and self._chosen[1].layout == "tokens":
                maps = occlusion_maps(self._model, normalized, classes, is_multi_label=self._is_multi_label)
            else:
                maps = grad_cam(self._model, normalized, classes, self._chosen)
        return [
            [draw_heat(visible_pixels(image), values) for values in of_image]
            for image, of_image in zip(images.cpu(), maps.cpu().numpy(), strict=True)
        ]


def visible_pixels(image: Tensor) -> NDArray[np.uint8]:
    """Return an image [C, H, W] before normalization as uint8 [H, W, 3] or [H, W, 1].

    Unless it is 8-bit gray or RGB, it is what `to_visible` makes of it.
    """
    pixels: NDArray[Any] = image.permute(1, 2, 0).numpy()
    return pixels if pixels.dtype == np.uint8 and pixels.shape[2] in (1, 3) else to_visible(pixels)


def draw_heat(pixels: NDArray[np.uint8], values: NDArray[np.float32]) -> Image.Image:
    """Return pixels [H, W, C] in gray under a map [h, w], in the colors red to yellow, more opaque where it is higher.

    The map is scaled to its own maximum; a map of zeros leaves the image gray. NaN and infinity, of 16-bit gradients
    that overflow, count as zero.
    """
    height, width = pixels.shape[:2]
    values = np.nan_to_num(values, posinf=0.0)
    scaled = Image.fromarray(values / (float(values.max()) or 1.0)).resize((width, height), Image.Resampling.BILINEAR)
    strength = np.asarray(scaled, dtype=np.float64)
    colors = np.stack([np.interp(strength, np.linspace(0, 1, len(_HEAT)), channel) for channel in _HEAT.T], axis=-1)
    opacity = _MAX_OPACITY * strength[..., None]
    gray = pixels.mean(axis=2, keepdims=True)
    return Image.fromarray(((1 - opacity) * gray + opacity * colors).round().astype(np.uint8))


@dataclass(frozen=True)
class MistakeExplainer:
    """Explain misclassified images of `source` at `image_size` pixels, for 3 % of `trained_s`, but 0.3 to 5 s."""

    paint: MapPainter
    source: Source
    data: Data
    image_size: int
    trained_s: float
    now: Callable[[], float] = now_s

    def __call__(self, mistakes: Sequence[MisclassifiedImage]) -> Iterator[tuple[int, Overlays]]:
        """Yield the index of each image with its overlays, until the time is up."""
        least_s, most_s = _TIME_LIMIT_S
        end_s = self.now() + min(most_s, max(least_s, _TIME_SHARE * self.trained_s))
        resizer = build_eval_resizer(self.data, are_one_size=has_one_size(self.source))  # as the evaluation does
        reader = ImageReader(self.source, resizer, BadImagePolicy("drop"), BatchTimer(None))
        for each in mistakes:
            if self.now() >= end_s:
                return
            read = reader.read(np.array([each.index]), np.empty((1, reader.num_draws)), self.image_size)
            if len(read.images):
                (drawn,) = self.paint(read.images, torch.tensor([[each.predicted, each.label]]))
                yield each.index, dict(zip(("predicted", "true"), drawn, strict=True))


def explain_or_warn(
    explain: ExplainMistakes, mistakes: Sequence[MisclassifiedImage], warn: Callable[[str], None]
) -> dict[int, Overlays]:
    """Return the overlays of `explain`; failures are warnings."""
    try:
        return explain(mistakes)
    except Exception as error:  # a user's own model may raise anything, and a GPU may be full
        warn(f"log.explain: no maps were drawn: {describe_error(error)} (set log.explain=off)")
        return {}


def build_mistake_explainer(
    context: RunContext,
    model: nn.Module,
    precision: Precision,
    average: WeightAverage | None,
    trained_s: float = math.inf,
    *,
    is_sharded: bool = False,
) -> ExplainMistakes:
    """Return a function that draws the maps of `log.explain` with the weights that were evaluated, on this rank alone.

    It takes a small share of `trained_s`, the time of the run. It draws none of a sharded model, whose forward pass
    every rank would have to take part in.
    """
    recipe = context.recipe
    if recipe.log.explain == "off" or is_sharded:
        return lambda mistakes: {}
    painter = MapPainter(
        model, context.create_transfer(precision.dtype), precision, is_multi_label=context.is_multi_label
    )
    explainer = MistakeExplainer(painter, context.datasets.val, recipe.data, context.plan.eval_image_size, trained_s)

    def explain(mistakes: Sequence[MisclassifiedImage]) -> dict[int, Overlays]:
        with average.swapped() if average else contextlib.nullcontext():
            return dict(explainer(mistakes))

    return explain
