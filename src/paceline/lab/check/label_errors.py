"""Find images whose label is likely wrong, from the probabilities of a trained model. Torch-free."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LabelError:
    """An image by position, its label, the likely class, and the margin: probability of its label minus the other's."""

    position: int
    label: int
    likely: int
    margin: float


def find_label_errors(probabilities: NDArray[np.floating], labels: NDArray[np.integer]) -> list[LabelError]:
    """Return the likely label errors, the most certain first, by confident learning.

    `probabilities` [N, C] are of a model that was not trained on these images, `labels` [N] their classes. An image
    counts for a class if its probability is at least the mean of that class over the images labeled so; those that
    count for another class than their label, and most for that, are off the diagonal of the confident joint (Northcutt
    et al. 2021, arXiv 1911.00068, section 3.1). Images are ranked by normalized margin.
    """
    if not len(labels):
        return []
    rows = np.arange(len(labels))
    of_label = probabilities[rows, labels]
    images = np.bincount(labels, minlength=probabilities.shape[1])
    sums = np.bincount(labels, weights=of_label, minlength=probabilities.shape[1])
    thresholds = np.where(images > 0, sums / np.maximum(images, 1), np.inf)  # no image counts for an absent class
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    likely = confident.argmax(axis=1)
    is_wrong = (confident[rows, likely] >= 0) & (likely != labels) & (probabilities[rows, likely] > of_label)
    found = [
        LabelError(int(at), int(labels[at]), int(likely[at]), float(of_label[at] - probabilities[at, likely[at]]))
        for at in np.flatnonzero(is_wrong)
    ]
    return sorted(found, key=lambda error: error.margin)
