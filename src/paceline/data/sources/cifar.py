"""Load CIFAR-10 and CIFAR-100 into memory (180 MB), from the authors' pickles or from class folders."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Split
from paceline.core.errors import DataError
from paceline.core.pixels import PixelFormat
from paceline.data.decode import decode
from paceline.data.files import expand_path, is_file, is_folder, printable
from paceline.data.sources.download import download_cifar
from paceline.data.sources.folder import scan_class_folders
from paceline.data.sources.image_files import ImageFileSource, build_files_info
from paceline.data.sources.restricted_pickle import RefusedPickleError, load_restricted_pickle
from paceline.recipe.schema.source import Cifar10, Cifar100

PixelArray = NDArray[np.uint8]
_ALLOWED_CONTENT = (
    "a CIFAR file may hold only text, numbers and arrays of uint8 (remove it and fetch the dataset again)"
)
_IMAGE_SIZE = (32, 32)
_SPLIT_FOLDERS: tuple[tuple[str, Split], ...] = (("train", "train"), ("test", "val"))


@dataclass(frozen=True)
class _CifarVariant:
    name: Literal["cifar10", "cifar100"]
    title: str
    num_classes: int
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    meta_file: str
    names_key: str
    labels_key: str
    # Over the training images, as in most published code.
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_CIFAR10 = _CifarVariant(
    name="cifar10",
    title="CIFAR-10",
    num_classes=10,
    folder="cifar-10-batches-py",
    train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test_file="test_batch",
    meta_file="batches.meta",
    names_key="label_names",
    labels_key="labels",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
_CIFAR100 = _CifarVariant(
    name="cifar100",
    title="CIFAR-100",
    num_classes=100,
    folder="cifar-100-python",
    train_files=("train",),
    test_file="test",
    meta_file="meta",
    names_key="fine_label_names",
    labels_key="fine_labels",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


# The files are pickles that numpy 1 and Python 2 wrote. Stand-ins that accept only uint8 bytes replace the globals of a
# pickled array, so that an untrusted file cannot run code or pass sizes to C code.
def read_cifar_batch(path: Path, *, labels_key: str, num_classes: int) -> tuple[PixelArray, NDArray[np.int64]]:
    """Return (uint8 [N, 32, 32, 3], int64 labels [N]) of one batch file. Raise `DataError` naming the file."""
    batch = _read_cifar_dict(path)
    array, labels = batch.get("data"), batch.get(labels_key)
    if not isinstance(array, _ArrayStandIn) or array.pixels is None or array.pixels.shape[1:] != (3072,):
        raise DataError(f"{printable(path)}: its 'data' is not uint8 [N, 3072]; {_ALLOWED_CONTENT}")
    if (
        not isinstance(labels, list)
        or len(labels) != len(array.pixels)
        or not all(type(label) is int and 0 <= label < num_classes for label in labels)
    ):
        raise DataError(
            f"{printable(path)}: its '{labels_key}' is not a list of {len(array.pixels)} numbers from 0 to "
            f"{num_classes - 1}; remove it and fetch the dataset again"
        )
    planes = array.pixels.reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, dtype=np.int64)


def read_cifar_class_names(path: Path, *, key: str, num_classes: int) -> tuple[str, ...]:
    """Return the class names in a `meta` file. Raise `DataError` naming the file."""
    names = _read_cifar_dict(path).get(key)
    if not isinstance(names, list) or len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise DataError(f"{printable(path)}: its '{key}' is not a list of {num_classes} names; {_ALLOWED_CONTENT}")
    return tuple(names)


def _read_cifar_dict(path: Path) -> dict[object, object]:
    content = load_restricted_pickle(
        path, allowed_globals=_build_array_globals(), hint=_ALLOWED_CONTENT, encoding="latin1"
    )
    if not isinstance(content, dict):
        raise DataError(f"{printable(path)}: holds a {type(content).__name__}, not a dict; {_ALLOWED_CONTENT}")
    return content


def _build_array_globals() -> dict[str, object]:
    # New objects per file, as a pickle can modify what it gets.
    def reconstruct(array_type: object, shape: object, typecode: object) -> _ArrayStandIn:
        return _ArrayStandIn()

    def dtype(code: object, align: object, copy: object) -> _DtypeStandIn:
        if code != "u1":
            raise RefusedPickleError(f"holds an array of {code!r}")
        return _DtypeStandIn()

    def encode(text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise RefusedPickleError(f"uses the text encoding {encoding!r}")
        return text.encode("latin1")

    return {
        "numpy.core.multiarray._reconstruct": reconstruct,
        "numpy._core.multiarray._reconstruct": reconstruct,
        "numpy.ndarray": "numpy.ndarray",
        "numpy.dtype": dtype,
        "_codecs.encode": encode,
    }


class _DtypeStandIn:
    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment do not matter for single bytes


@dataclass
class _ArrayStandIn:
    pixels: PixelArray | None = None  # until `__setstate__`

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes | str]) -> None:
        _, shape, dtype, is_fortran, content = state
        raw = content.encode("latin1") if isinstance(content, str) else content  # Python 2 had one type for both
        if not isinstance(dtype, _DtypeStandIn) or not isinstance(raw, bytes) or len(raw) != math.prod(shape):
            raise RefusedPickleError(f"holds an array of shape {shape} whose content does not fit")
        self.pixels = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")


def load_cifar(section: Cifar10 | Cifar100, *, may_download: bool) -> Datasets:
    """Load CIFAR as uint8 [N, 32, 32, 3], and download it if `may_download` and the recipe allow it.

    `root` holds the authors' files, their folder, or `train/` and `test/` with class folders. Raise `DataError` if none
    of them is present or a file is malformed.
    """
    folder, variant = _find_or_download(section, may_download=may_download)
    return _load_class_folders(folder, variant) if is_folder(folder / "train") else _load_batches(folder, variant)


def load_cifar_validation(section: Cifar10 | Cifar100) -> ArraySource:
    """Load only the validation split. Raise `DataError` as `load_cifar`."""
    folder, variant = _find_or_download(section, may_download=False)
    if is_folder(folder / "train"):
        return _decode_class_folders(folder / "test", "val", variant)
    return _build_cifar_source(
        variant, "val", _load_class_names(folder, variant), *_load_batch(folder, variant, variant.test_file)
    )


def _find_or_download(section: Cifar10 | Cifar100, *, may_download: bool) -> tuple[Path, _CifarVariant]:
    variant = _CIFAR10 if isinstance(section, Cifar10) else _CIFAR100
    root = expand_path(section.root)
    folder = _find_cifar_folder(root, variant)
    if folder is None and section.download and may_download:
        download_cifar(root, variant.name, (*variant.train_files, variant.test_file, variant.meta_file))
        folder = _find_cifar_folder(root, variant)
    if folder is None:
        fix = "" if section.download else ", or data.source.download=true"
        raise DataError(
            f"data.source.root: {printable(root)} has no {variant.title} (expected {variant.folder}/ or train/ and "
            f"test/ class folders; set data.source.root to the folder that has it{fix})"
        )
    return folder, variant


def _find_cifar_folder(root: Path, variant: _CifarVariant) -> Path | None:
    for folder in (root / variant.folder, root):
        if is_file(folder / variant.train_files[0]):
            return folder
    return root if is_folder(root / "train") and is_folder(root / "test") else None


def _load_batches(folder: Path, variant: _CifarVariant) -> Datasets:
    names = _load_class_names(folder, variant)
    batches = [_load_batch(folder, variant, name) for name in variant.train_files]
    train = np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])
    val = _load_batch(folder, variant, variant.test_file)
    return Datasets(
        _build_cifar_source(variant, "train", names, *train), _build_cifar_source(variant, "val", names, *val)
    )


def _load_class_names(folder: Path, variant: _CifarVariant) -> tuple[str, ...]:
    return read_cifar_class_names(folder / variant.meta_file, key=variant.names_key, num_classes=variant.num_classes)


def _load_batch(folder: Path, variant: _CifarVariant, name: str) -> tuple[PixelArray, NDArray[np.int64]]:
    return read_cifar_batch(folder / name, labels_key=variant.labels_key, num_classes=variant.num_classes)


def _load_class_folders(root: Path, variant: _CifarVariant) -> Datasets:
    train, val = (_decode_class_folders(root / name, split, variant) for name, split in _SPLIT_FOLDERS)
    different = set(train.info.class_names) ^ set(val.info.class_names)
    if different:
        raise DataError(
            f"{printable(root)}: train/ and test/ differ in class '{min(different)}'; give both the same folders"
        )
    return Datasets(train, val)


def _decode_class_folders(root: Path, split: Split, variant: _CifarVariant) -> ArraySource:
    tree = scan_class_folders(root, setting="data.source.root")
    if len(tree.class_names) != variant.num_classes:
        raise DataError(
            f"data.source.root: {printable(root)} has {len(tree.class_names)} class folders, but {variant.title} has "
            f"{variant.num_classes} classes (use data.source.name=folder for other images)"
        )
    names = tuple(printable(name) for name in tree.class_names)
    info = build_files_info(variant.name, split, len(tree.paths), names, PixelFormat(3))
    files = ImageFileSource.from_paths(info, str(tree.root), tree.paths, tree.labels)
    images = np.empty((len(files), *_IMAGE_SIZE, 3), dtype=np.uint8)
    for index in range(len(files)):
        image = decode(files.read_bytes(index), channels=3, name=files.name_of(index))
        if image.size != _IMAGE_SIZE:
            width, height = image.size
            raise DataError(f"{files.name_of(index)}: is {width}x{height}, not 32x32 (use data.source.name=folder)")
        images[index] = np.asarray(image)
    return _build_cifar_source(variant, split, names, images, tree.labels.astype(np.int64), tree.notes)


def _build_cifar_source(
    variant: _CifarVariant,
    split: Split,
    names: tuple[str, ...],
    images: PixelArray,
    labels: NDArray[np.int64],
    notes: tuple[str, ...] = (),
) -> ArraySource:
    info = DatasetInfo(
        name=variant.name,
        split=split,
        num_images=len(labels),
        class_names=names,
        channels=3,
        image_size=_IMAGE_SIZE,
        mean=variant.mean,
        std=variant.std,
        notes=notes,
    )
    return ArraySource(info, images, labels)
