"""What each class weighs in the training loss, where some have many more images than others."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.class_table import printable
from paceline.core.dataset import Source
from paceline.core.errors import RecipeError, near_miss
from paceline.data.labels import labels_of
from paceline.recipe.schema.section import Off


def class_weights(asked: Off | Literal["balanced"] | dict[str, float], source: Source) -> NDArray[np.float64] | None:
    """Return the weights of the classes of the training split, float64 [C], or None for weights that are off.

    Their mean over the images is 1. `balanced` is scikit-learn's N / (C n_c), of a split of N images, n_c of them in
    class c, where C counts the classes that have images; one that has none weighs 1. Raise `RecipeError` for names that
    no class has, and for a split that tells its labels with its images only.
    """
    if asked == "off":
        return None
    labels = labels_of(source)
    if labels is None:
        raise RecipeError(
            f"train.class_weights: {source.info.name} tells labels with its images only, so they cannot be counted "
            f"ahead (set train.class_weights=off)"
        )
    names = source.info.class_names
    counts = np.bincount(labels, minlength=len(names))
    if asked == "balanced":
        weights = np.where(counts > 0, len(labels) / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)
        return np.asarray(weights, dtype=np.float64)
    unknown = [name for name in asked if name not in names]
    if unknown:
        some = ", ".join(printable(name) for name in names[:5])
        hint = near_miss(unknown[0], names) or f" (name some of {some}{', ...' if len(names) > 5 else ''})"
        raise RecipeError(f"train.class_weights: {unknown[0]!r} is no class of the data{hint}")
    given = np.array([asked.get(name, 1.0) for name in names], dtype=np.float64)
    scaled: NDArray[np.float64] = given * (len(labels) / (given @ counts))
    return scaled


def weights_told(weights: NDArray[np.float64], class_names: tuple[str, ...]) -> str:
    """Return the least and the most, such as `train.class_weights: from 0.444 (cat) to 5.33 (lynx), ...`."""
    least, most = int(weights.argmin()), int(weights.argmax())
    ends = (f"{weights[at]:.3g} ({printable(class_names[at])})" for at in (least, most))
    return f"train.class_weights: from {' to '.join(ends)}, with a mean of 1 over the training images"
