"""Datasets that need no files: scikit-learn's digits and synthetic images."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Split
from paceline.core.errors import DataError
from paceline.data.sources.image_files import select_validation
from paceline.recipe.schema.source import Synthetic

# Measured on the training split: python -c "from paceline.data.sources.builtin import *; x = load_digits().train.images
# / 255; print(x.mean(), x.std())"
_DIGITS_MEAN, _DIGITS_STD = (0.3047,), (0.3756,)
_DIGITS_SPLIT_SEED = 0
# Limit for the pixels of both splits, per process.
MAX_SYNTHETIC_BYTES = 4 * 2**30
_CHUNK_BYTES = 2**24
_PATTERN_GRID = 4  # blocks per side
# Keys of the random streams.
_PATTERN_STREAM = 0
_SPLIT_STREAMS: dict[Split, int] = {"train": 1, "val": 2}
# Pattern and noise are uniform over 0..127 each, so the sum has mean 127 and variance 2 (128^2 - 1) / 12.
_SYNTHETIC_MEAN = 127 / 255
_SYNTHETIC_STD = (2 * (128**2 - 1) / 12) ** 0.5 / 255


def load_digits() -> Datasets:
    """Load scikit-learn's 1,797 digits as uint8 [N, 8, 8, 1]; a fixed fifth of each class is for validation."""
    pixels, labels = _read_digits()
    images = np.rint(pixels * (255 / 16)).astype(np.uint8)[..., None]  # from 0..16
    names = (f"{label}/{position}".encode() for position, label in enumerate(labels))
    val = select_validation(labels, names, fraction=0.2, seed=_DIGITS_SPLIT_SEED)
    return Datasets(
        _build_digits_split("train", images[~val], labels[~val]), _build_digits_split("val", images[val], labels[val])
    )


def _read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return scikit-learn's pixels, 0 to 16, float64 [N, 8, 8], and labels, int64 [N]."""
    # Its file is read directly, as importing scikit-learn with scipy and pandas takes a second.
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    from sklearn import datasets

    digits = datasets.load_digits()
    return digits.images, digits.target.astype(np.int64)


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


def load_synthetic(section: Synthetic) -> Datasets:
    """Generate uint8 [N, size, size, channels]: a pattern of 4x4 blocks per class plus noise of equal variance.

    Labels cycle through the classes. Raise `DataError` if the pixels exceed `MAX_SYNTHETIC_BYTES`.
    """
    image_bytes = section.image_size**2 * section.channels
    needed = (section.num_images + section.num_val_images) * image_bytes
    if needed > MAX_SYNTHETIC_BYTES:
        max_images = max(MAX_SYNTHETIC_BYTES // image_bytes - section.num_val_images, 0)
        raise DataError(
            f"data.source.num_images: {section.num_images} of {section.image_size}x{section.image_size} would take "
            f"{needed / 2**30:.1f} GiB in each process "
            f"(the limit is {MAX_SYNTHETIC_BYTES / 2**30:g}; at most {max_images} fit)"
        )
    return Datasets(
        _build_synthetic_split(section, "train", section.num_images),
        _build_synthetic_split(section, "val", section.num_val_images),
    )


def _random_bytes(stream: int, count: int, skip: int = 0) -> NDArray[np.uint8]:
    # uint8 [count] of a random stream from byte `skip` on, a multiple of 32.
    # Philox's raw integers do not depend on the numpy version, `Generator`'s distributions do (NEP 19).
    generator = np.random.Philox(key=stream, counter=skip // 32)  # each counter value gives four 64-bit integers
    integers = generator.random_raw(-(-count // 8)).astype("<u8", copy=False)
    return integers.view(np.uint8)[:count]


def _build_synthetic_split(section: Synthetic, split: Split, num_images: int) -> ArraySource:
    size, channels = section.image_size, section.channels
    blocks = _random_bytes(_PATTERN_STREAM, section.num_classes * _PATTERN_GRID**2 * channels) >> 1  # 0..127
    patterns = blocks.reshape(section.num_classes, _PATTERN_GRID, _PATTERN_GRID, channels)
    block_of = np.arange(size) * _PATTERN_GRID // size
    labels = np.arange(num_images, dtype=np.int64) % section.num_classes
    images = np.empty((num_images, size, size, channels), dtype=np.uint8)
    pixels = images.reshape(-1)
    # In chunks, so that no second copy of the images is needed.
    for start in range(0, pixels.size, _CHUNK_BYTES):
        chunk = pixels[start : start + _CHUNK_BYTES]
        chunk[:] = _random_bytes(_SPLIT_STREAMS[split], chunk.size, skip=start) >> 1
    rows = max(1, _CHUNK_BYTES // images[0].size)
    for start in range(0, num_images, rows):
        images[start : start + rows] += patterns[labels[start : start + rows]][:, block_of[:, None], block_of]
    info = DatasetInfo(
        name="synthetic",
        split=split,
        num_images=num_images,
        class_names=tuple(str(label) for label in range(section.num_classes)),
        channels=channels,
        image_size=(size, size),
        mean=(_SYNTHETIC_MEAN,) * channels,
        std=(_SYNTHETIC_STD,) * channels,
    )
    return ArraySource(info, images, labels)
