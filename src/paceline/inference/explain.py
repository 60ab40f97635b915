"""Explain predictions: draw over each image what the model looks at for its classes."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from PIL import Image
from torch import Tensor

from paceline.data.decode_array import to_image
from paceline.inference.classifier import Classifier
from paceline.inference.images import UnreadableImage
from paceline.inference.predict import Guess, InputImage, Prediction
from paceline.training.explain import MapPainter, visible_pixels

_MAX_LABELS: Final = 3
"""Maps per image of a model with several labels per image; of others, only the first class has one."""


@dataclass(frozen=True)
class ExplainedImage:
    """A prediction, its image at the model's input size, and what the model looks at for the first of its classes."""

    prediction: Prediction
    image: Image.Image
    maps: tuple[tuple[Guess, Image.Image], ...]


class PredictionExplainer:
    """Explain the first `most` readable images of a stream with the layer named `layer`, or chosen for `auto`.

    Pass the images through `keep` on their way to `predict_images`, and each result in its order to `explain`.
    """

    def __init__(self, classifier: Classifier, most: int, layer: str = "auto") -> None:
        self._most = most
        self._num_labels = 1 if classifier.threshold is None else _MAX_LABELS
        self._kept: deque[InputImage] = deque()
        is_multi_label = classifier.threshold is not None
        self._paint = MapPainter(
            classifier.model, classifier.place, classifier.precision, layer, is_multi_label=is_multi_label
        )

    def keep(self, images: Iterable[InputImage | UnreadableImage]) -> Iterator[InputImage | UnreadableImage]:
        """Yield `images`, and keep the pixels of the first ones until they are explained."""
        num_kept = 0
        for each in images:
            if isinstance(each, InputImage) and num_kept < self._most:
                self._kept.append(each)
                num_kept += 1
            yield each

    def explain(self, result: Prediction | UnreadableImage) -> ExplainedImage | None:
        """Return the explained image; None if it was not kept, or has no prediction.

        Raise `RecipeError` for a layer that cannot be explained with.
        """
        if not self._kept or self._kept[0].path != result.path:
            return None
        pixels = self._kept.popleft().pixels
        if isinstance(result, UnreadableImage):  # its logits are NaN
            return None
        shown = result.guesses[: self._num_labels]
        maps = tuple(zip(shown, self._draw(pixels, shown), strict=True)) if shown else ()
        return ExplainedImage(result, to_image(visible_pixels(pixels)), maps)

    def _draw(self, pixels: Tensor, guesses: tuple[Guess, ...]) -> list[Image.Image]:
        (drawn,) = self._paint(pixels[None], torch.tensor([[each.index for each in guesses]]))
        return drawn
