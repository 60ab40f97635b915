"""Load scikit-learn's handwritten digits, which need no download."""

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Split
from paceline.data.sources.split import select_validation

# Measured on the training split:
# python -c "from paceline.data.sources.digits import *; x = load_digits().train.images / 255; print(x.mean(), x.std())"
_DIGITS_MEAN, _DIGITS_STD = (0.3047,), (0.3756,)
_DIGITS_SPLIT_SEED = 0


def load_digits() -> Datasets:
    """Load the 1,797 digits as uint8 [N, 8, 8, 1]; a fixed fifth of each class is the validation split."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    names = (f"{label}/{position}".encode() for position, label in enumerate(labels))
    val = select_validation(labels, names, fraction=0.2, seed=_DIGITS_SPLIT_SEED)
    return Datasets(
        _build_digits_split("train", images[~val], labels[~val]), _build_digits_split("val", images[val], labels[val])
    )


def _build_digits_split(split: Split, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> ArraySource:
    info = DatasetInfo(
        name="digits",
        split=split,
        num_images=len(labels),
        class_names=tuple("0123456789"),
        channels=1,
        image_size=(8, 8),
        mean=_DIGITS_MEAN,
        std=_DIGITS_STD,
    )
    return ArraySource(info, images, labels)
