"""Load local datasets through the `datasets` library: parquet, Arrow (`save_to_disk`) and `imagefolder`."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import fsencode
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Datasets, Sample, Source, Split
from paceline.core.errors import DataError, suggest_similar
from paceline.core.pixels import PixelFormat
from paceline.data.bad_images import ImageError
from paceline.data.files import expand_path, is_file, is_folder, printable
from paceline.data.sources.image_files import ImageFileSource, LocatedFiles, build_files_info
from paceline.recipe.schema.source import HuggingFace

if TYPE_CHECKING:
    from datasets import Dataset

_VAL_SPLIT_NAMES = ("validation", "val", "valid", "test")
_ARROW_BATCH_ROWS = 10_000


@dataclass(frozen=True)
class SplitLabels:
    """Class names, and the labels of each split, int32 [N]."""

    class_names: tuple[str, ...]
    by_split: dict[str, NDArray[np.int32]]


def read_label_column(splits: "Mapping[str, Dataset]", section: HuggingFace, root: str) -> SplitLabels:
    """Read the labels of `splits`, of which the first is the training split.

    The classes are those of a `ClassLabel` column, else the training labels, integers or strings, sorted. Raise
    `DataError` for a column of another type, and for a missing or unknown label.
    """
    train, *_ = splits.values()
    column = _find_label_column(train, section, root)
    class_names = _get_class_names(train, column)
    values = {name: _read_label_values(split, column, f"{root}/{name}") for name, split in splits.items()}
    if class_names is not None:
        for name, split in splits.items():
            if _get_class_names(split, column) != class_names:
                raise DataError(
                    f"{root}: the classes of {column} differ in '{name}' (save the splits with the same ones)"
                )
            _check_known_labels(values[name], range(len(class_names)), f"{root}/{name}")
        return SplitLabels(class_names, {name: np.asarray(labels, dtype=np.int32) for name, labels in values.items()})
    classes = sorted(set(next(iter(values.values()))))
    numbers = {value: number for number, value in enumerate(classes)}
    for name, labels in values.items():
        _check_known_labels(labels, numbers, f"{root}/{name}")
    return SplitLabels(
        tuple(printable(str(value)) for value in classes),
        {name: np.array([numbers[label] for label in labels], dtype=np.int32) for name, labels in values.items()},
    )


def _find_label_column(train: "Dataset", section: HuggingFace, root: str) -> str:
    from datasets import ClassLabel

    label_columns = [name for name, feature in train.features.items() if isinstance(feature, ClassLabel)]
    name = section.label
    if name == "auto":
        name = label_columns[0] if len(label_columns) == 1 else "label"
    if name not in train.features:
        columns = ", ".join(map(printable, train.features))
        raise DataError(
            f"data.source.label: {root} has no column '{printable(name)}' (set it to one of {columns[:300]})"
        )
    return name


def _get_class_names(split: "Dataset", column: str) -> tuple[str, ...] | None:
    from datasets import ClassLabel

    feature = split.features.get(column)
    return tuple(map(printable, feature.names)) if isinstance(feature, ClassLabel) else None


def _read_label_values(split: "Dataset", column: str, root: str) -> list[Any]:
    import pyarrow as pa

    if column not in split.features:
        raise DataError(f"data.source.label: {root} has no column '{printable(column)}' (choose another split)")
    stored = split.select_columns([column]).with_format("arrow")[:].column(0)
    kind = stored.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"data.source.label: '{printable(column)}' of {root} holds {kind}, not labels (choose another column)"
        )
    if stored.null_count:
        raise DataError(f"{root}: {stored.null_count:,} images have no label in '{printable(column)}' (remove them)")
    return list(stored.to_pylist())


def _check_known_labels(labels: list[Any], known: Any, root: str) -> None:
    unknown = set(labels).difference(known)
    if unknown:
        index = next(index for index, label in enumerate(labels) if label in unknown)
        raise DataError(
            f"{root}[{index}]: has the label {printable(str(labels[index]))[:80]}, which is not a class of the "
            f"training split (correct it, or choose another split)"
        )


# Nothing is downloaded and no dataset script runs. The library caches converted files in `HF_HOME`, for parquet a
# second copy of the images. Parquet and Arrow files are parsed by pyarrow without further checks.
@dataclass(frozen=True, eq=False)
class HuggingFaceSource:
    """A split whose images are in memory-mapped Arrow files: one column `images`, `labels` int32 [N]."""

    info: DatasetInfo
    root: str
    images: "Dataset"
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (encoded image bytes, label). Raise `ImageError` if the image is missing."""
        stored = self.images[int(index)].column(0)[0].as_py()
        data = stored.get("bytes") if isinstance(stored, dict) else stored
        if not data:
            raise ImageError(self.name_of(index), "has no bytes", "remove it from the dataset")
        return data, int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return `root/split[index]`."""
        return f"{printable(self.root)}/{self.info.split}[{index}]"

    @property
    def file_root(self) -> str:
        """The root."""
        return self.root

    def locate_files(self, indices: NDArray[np.int64]) -> LocatedFiles:
        """Return the content of images, int64 [N], in mapped memory; None for a missing one."""
        chunks, ends = self._chunks
        numbers = np.searchsorted(ends, indices, side="right")
        starts = np.append(0, ends)[numbers]
        values = [
            chunks[number][row] for number, row in zip(numbers.tolist(), (indices - starts).tolist(), strict=True)
        ]
        names = [fsencode(f"{self.root}/{self.info.split}[{index}]") for index in indices.tolist()]
        located = LocatedFiles.from_paths(names)
        return located._replace(files=[memoryview(value.as_buffer()) if value.is_valid else None for value in values])

    @cached_property
    def _chunks(self) -> tuple[list[Any], NDArray[np.int64]]:
        # Arrow arrays of bytes, and the number of images up to the end of each.
        chunks = [_get_bytes_and_paths(chunk)[0] for chunk in _iter_arrow_chunks(self.images)]
        return chunks, np.cumsum([len(chunk) for chunk in chunks])

    def names(self) -> Iterator[str]:
        """Yield the stored image names, "" for an image without one."""
        return _iter_image_paths(self.images)


def load_huggingface(section: HuggingFace) -> Datasets:
    """Load both splits; images that are separate files, as in an `imagefolder`, become `ImageFileSource`s.

    Raise `DataError` if the library, a split or a column is missing, or labels cannot be used.
    """
    root = expand_path(section.root).absolute()
    if not is_folder(root):
        raise DataError(
            f"data.source.root: {printable(section.root)} is not a local folder, and nothing is downloaded "
            f"(download the dataset first, for instance with hf download)"
        )
    splits = _load_splits(root)
    train = _get_split(splits, section.train, "data.source.train", root)
    val_name = section.val
    if val_name == "auto":
        val_name = next((name for name in _VAL_SPLIT_NAMES if name in splits), _VAL_SPLIT_NAMES[0])
    val = _get_split(splits, val_name, "data.source.val", root)
    image = _find_image_column(train, section, root)
    labels = read_label_column({section.train: train, val_name: val}, section, printable(root))
    return Datasets(
        _build_huggingface_source(train, image, labels, section, "train", section.train),
        _build_huggingface_source(val, image, labels, section, "val", val_name),
    )


def read_text_column(section: HuggingFace, column: str, field: str) -> list[str]:
    """Return the values of `column` of the training split as text, "" for a missing one.

    Raise `DataError` naming the recipe's `field` if there is no such column.
    """
    root = expand_path(section.root).absolute()
    train = _get_split(_load_splits(root), section.train, "data.source.train", root)
    if column not in train.features:
        hint = suggest_column(column, train.features)
        raise DataError(f"{field}: {printable(root)} has no column '{printable(column)}'{hint}")
    stored = train.select_columns([column]).with_format("arrow")[:].column(0)
    return ["" if value is None else str(value) for value in stored.to_pylist()]


def suggest_column(column: str, columns: Collection[str]) -> str:
    """Return the fix for an unknown `column`: one with a similar name, or all `columns`."""
    return suggest_similar(column, columns) or f" (it has {', '.join(map(printable, columns))[:300]})"


@contextmanager
def _wrap_library_errors(root: Path) -> Iterator[None]:
    # The library raises many types of errors, often of several lines.
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = printable(" ".join(str(error).split()))[:200] or type(error).__name__
        raise DataError(
            f"data.source.root: {printable(root)} cannot be read by the datasets library: {reason} (set it to a folder "
            f"of parquet files, an imagefolder, or what save_to_disk has written)"
        ) from error


def _load_splits(root: Path) -> "Mapping[str, Dataset]":
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "data.source.name: huggingface needs the package datasets, which is not installed (pip install "
            "'paceline[huggingface]')"
        ) from error
    with _wrap_library_errors(root), _hide_progress_bars():
        if is_file(root / "dataset_dict.json"):
            return dict(datasets.DatasetDict.load_from_disk(str(root)))
        if is_file(root / "state.json"):
            return {"train": datasets.Dataset.load_from_disk(str(root))}
        kind = "parquet" if next(root.rglob("*.parquet"), None) else "imagefolder"
        return dict(datasets.load_dataset(kind, data_dir=str(root)))


@contextmanager
def _hide_progress_bars() -> Iterator[None]:  # paceline shows its own progress
    import datasets

    was_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()


def _get_split(splits: "Mapping[str, Dataset]", name: str, setting: str, root: Path) -> "Dataset":
    if name not in splits:
        names = ", ".join(map(printable, splits))
        raise DataError(
            f"{setting}: {printable(root)} has no split '{printable(name)}'{suggest_similar(name, splits)} "
            f"(it has {names})"
        )
    if not len(splits[name]):
        raise DataError(f"{setting}: split '{printable(name)}' of {printable(root)} has no images (choose another)")
    return splits[name]


def _find_image_column(train: "Dataset", section: HuggingFace, root: Path) -> str:
    from datasets import Image

    image_columns = [name for name, feature in train.features.items() if isinstance(feature, Image)]
    name = section.image
    if name == "auto" and len(image_columns) == 1:
        return str(image_columns[0])
    if name == "auto" or name not in train.features:
        columns = ", ".join(
            f"{printable(name)}: {printable(type(kind).__name__)}" for name, kind in train.features.items()
        )
        raise DataError(
            f"data.source.image: {printable(name)} does not name one image column of {printable(root)} "
            f"(set it to one of {columns[:300]})"
        )
    return name


def _build_huggingface_source(
    split: "Dataset", image: str, labels: SplitLabels, section: HuggingFace, split_name: Split, stored_name: str
) -> Source:
    root = str(expand_path(section.root).absolute())
    with _wrap_library_errors(Path(root)):
        images = split.select_columns([image]).with_format("arrow")
        info = build_files_info(
            "huggingface", split_name, len(images), labels.class_names, PixelFormat(section.channels)
        )
        if _count_embedded_images(images):
            return HuggingFaceSource(info, root, images, labels.by_split[stored_name])
        paths = [fsencode(path.removeprefix(f"{root}/")) for path in _iter_image_paths(images)]
    return ImageFileSource.from_paths(info, root, paths, labels.by_split[stored_name])


def _iter_arrow_chunks(images: "Dataset") -> Iterator[Any]:
    for batch in images.iter(batch_size=_ARROW_BATCH_ROWS):
        yield from batch.column(0).chunks


def _get_bytes_and_paths(chunk: Any) -> tuple[Any, Any]:
    # Each None if absent: the library stores bytes, a path or both.
    import pyarrow as pa

    kind = chunk.type
    if pa.types.is_struct(kind):
        fields = {kind.field(number).name for number in range(kind.num_fields)}
        data, paths = (chunk.field(name) if name in fields else None for name in ("bytes", "path"))
        return data, paths
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return chunk, None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return None, chunk
    raise DataError(f"data.source.image: a column of {kind} holds no images (choose another column)")


def _count_embedded_images(images: "Dataset") -> int:
    stored = (_get_bytes_and_paths(chunk)[0] for chunk in _iter_arrow_chunks(images))
    return sum(len(data) - data.null_count for data in stored if data is not None)


def _iter_image_paths(images: "Dataset") -> Iterator[str]:
    for chunk in _iter_arrow_chunks(images):
        _, paths = _get_bytes_and_paths(chunk)
        values = paths.to_pylist() if paths is not None else [""] * len(chunk)
        yield from ((path or "").replace("\0", "") for path in values)
