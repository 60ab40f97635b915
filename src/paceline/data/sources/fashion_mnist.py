"""Load Fashion-MNIST into memory (55 MB), from the authors' four IDX files."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Split
from paceline.core.errors import DataError
from paceline.core.files import open_to_read
from paceline.data.files import expand_path, is_file, printable
from paceline.data.sources.download import download_fashion_mnist
from paceline.recipe.schema.source import FashionMnist

_CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_FILE_PREFIXES: dict[Split, str] = {"train": "train", "val": "t10k"}
_FILE_SUFFIXES = ("images-idx3-ubyte", "labels-idx1-ubyte")
_IDX_UINT8 = 0x08
_MAX_IMAGES = 60_000
_FIX = "remove it and fetch the dataset again"


def load_fashion_mnist(section: FashionMnist, *, may_download: bool) -> Datasets:
    """Load Fashion-MNIST as uint8 [N, 28, 28, 1], and download it if `may_download` and the recipe allow it.

    The files are in `root`, `root/FashionMNIST/raw` or `root/raw`. Raise `DataError` if they are missing or malformed.
    """
    root = expand_path(section.root)
    folder = _find_idx_folder(root)
    if folder is None and section.download and may_download:
        download_fashion_mnist(root)
        folder = _find_idx_folder(root)
    if folder is None:
        fix = "" if section.download else ", or data.source.download=true"
        raise DataError(
            f"data.source.root: {printable(root)} has no Fashion-MNIST (expected train-images-idx3-ubyte, "
            f"train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, with or without .gz; "
            f"set data.source.root to the folder that has them{fix})"
        )
    return Datasets(_read_split(folder, "train"), _read_split(folder, "val"))


def read_idx(path: Path, shape: tuple[int | None, ...]) -> NDArray[np.uint8]:
    """Read the uint8 array of `shape` in an IDX file, gzipped if its name ends in `.gz`.

    None in `shape` is any length up to 60,000. Raise `DataError` naming a file of another type, shape or length.
    """
    try:
        with open_to_read(path) as file:
            return _parse_idx(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, shape)
    except (EOFError, zlib.error, OSError, ValueError) as error:
        raise DataError(f"{printable(path)}: cannot be read: {error}; {_FIX}") from error


def _parse_idx(file: BinaryIO | gzip.GzipFile, shape: tuple[int | None, ...]) -> NDArray[np.uint8]:
    header = file.read(4 + 4 * len(shape))
    if len(header) < 4 + 4 * len(shape):
        raise ValueError(f"its header ends after {len(header)} bytes")
    magic, *sizes = struct.unpack(f">{1 + len(shape)}I", header)
    if magic != _IDX_UINT8 << 8 | len(shape):
        raise ValueError(f"it is not an IDX file of {len(shape)}-dimensional uint8 (its magic number is {magic:#010x})")
    for size, expected in zip(sizes, shape, strict=True):
        if size > _MAX_IMAGES if expected is None else size != expected:
            raise ValueError(f"its header says {'x'.join(map(str, sizes))}, which is not Fashion-MNIST's")
    content = file.read(math.prod(sizes) + 1)  # never decompress more than the header announces
    if len(content) != math.prod(sizes):
        actual = "more" if len(content) > math.prod(sizes) else f"only {len(content):,}"
        raise ValueError(f"its header says {math.prod(sizes):,} bytes, and it holds {actual}")
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(sizes)  # torch needs writable memory


def _candidate_files(folder: Path, split: Split, kind: str) -> tuple[Path, Path]:
    plain = folder / f"{_FILE_PREFIXES[split]}-{kind}"
    return plain, plain.with_name(f"{plain.name}.gz")


def _find_idx_folder(root: Path) -> Path | None:
    for folder in (root, root / "FashionMNIST" / "raw", root / "raw"):
        if all(
            any(map(is_file, _candidate_files(folder, split, kind)))
            for split in _FILE_PREFIXES
            for kind in _FILE_SUFFIXES
        ):
            return folder
    return None


def _read_split(folder: Path, split: Split) -> ArraySource:
    image_file, label_file = (next(filter(is_file, _candidate_files(folder, split, kind))) for kind in _FILE_SUFFIXES)
    images, labels = read_idx(image_file, (None, 28, 28)), read_idx(label_file, (None,))
    if len(images) != len(labels):
        raise DataError(f"{printable(label_file)}: has {len(labels)} labels for {len(images)} images; {_FIX}")
    if len(labels) == 0 or labels.max() >= len(_CLASS_NAMES):
        problem = f"label {labels.max()} is not one of 0 to 9" if len(labels) else "has no labels"
        raise DataError(f"{printable(label_file)}: {problem}; {_FIX}")
    info = DatasetInfo(
        name="fashion_mnist",
        split=split,
        num_images=len(labels),
        class_names=_CLASS_NAMES,
        channels=1,
        image_size=(28, 28),
        mean=(0.2860,),
        std=(0.3530,),
    )
    return ArraySource(info, images[..., None], labels.astype(np.int64))
