"""Class weights of the training loss."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.class_table import printable_class_name
from paceline.core.dataset import Source
from paceline.core.errors import RecipeError, suggest_similar
from paceline.data.labels import get_labels
from paceline.recipe.schema.section import Off


def compute_class_weights(
    setting: Off | Literal["balanced"] | dict[str, float], source: Source
) -> NDArray[np.float64] | None:
    """Return the class weights of the training split, float64 [C] with a mean of 1 over the images, or None if off.

    `balanced` is scikit-learn's N / (C n_c) for N images, n_c of them in class c, and C non-empty classes; an empty
    class has weight 1. Raise `RecipeError` for unknown classes, and for a split whose labels cannot be read without its
    images.
    """
    if setting == "off":
        return None
    labels = get_labels(source)
    if labels is None:
        raise RecipeError(
            f"train.class_weights: {source.info.name} has no labels apart from its images, so they cannot be counted "
            f"before training (set train.class_weights=off)"
        )
    names = source.info.class_names
    counts = np.bincount(labels, minlength=len(names))
    if setting == "balanced":
        weights = np.where(counts > 0, len(labels) / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)
        return np.asarray(weights, dtype=np.float64)
    unknown = [name for name in setting if name not in names]
    if unknown:
        some = ", ".join(printable_class_name(name) for name in names[:5])
        hint = suggest_similar(unknown[0], names) or f" (name some of {some}{', ...' if len(names) > 5 else ''})"
        raise RecipeError(f"train.class_weights: {unknown[0]!r} is not a class of the dataset{hint}")
    given = np.array([setting.get(name, 1.0) for name in names], dtype=np.float64)
    scaled: NDArray[np.float64] = given * (len(labels) / (given @ counts))
    return scaled


def describe_class_weights(weights: NDArray[np.float64], class_names: tuple[str, ...]) -> str:
    """Return the smallest and largest weight as text, such as `train.class_weights: from 0.444 (cat) to 5.33 (lynx),
    ...`.
    """
    least, most = int(weights.argmin()), int(weights.argmax())
    ends = (f"{weights[at]:.3g} ({printable_class_name(class_names[at])})" for at in (least, most))
    return f"train.class_weights: from {' to '.join(ends)}, with a mean of 1 over the training images"
