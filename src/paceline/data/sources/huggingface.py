"""Data sets on this machine that the `datasets` library reads: parquet, Arrow (`save_to_disk`) and `imagefolder`.

Nothing is fetched, and no script of a data set is run: the library is asked for the readers that it brings along. It
keeps what it makes of parquet files and image folders in its own cache (`HF_HOME`), once for a machine; for parquet
that is another copy of the images, without which none could be read by its place. Columns other than the image's and
the label's are not read, and images are handed on encoded, as they are. Parquet and Arrow are read by C++ code that is
not guarded here: a file that was made to do harm is for pyarrow to withstand.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import fsencode
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Datasets, Sample, Source, Split
from paceline.core.errors import DataError, near_miss
from paceline.data.bad import ImageError
from paceline.data.sources.encoded import EncodedSource, files_info
from paceline.data.sources.huggingface_labels import Labels, read_labels
from paceline.data.sources.places import expanded, is_file, is_folder, printable
from paceline.recipe.schema.source import HuggingFace

if TYPE_CHECKING:
    from datasets import Dataset

_VAL_SPLITS = ("validation", "val", "valid", "test")
_BATCH = 10_000


@dataclass(frozen=True, eq=False)
class HuggingFaceSource:
    """One split whose images are in Arrow files, which are mapped: `images` has one column; `labels` is int32 [N]."""

    info: DatasetInfo
    root: str
    images: "Dataset"
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (the bytes of the image, label). Raise `ImageError` naming an image that is missing."""
        stored = self.images[int(index)].column(0)[0].as_py()
        data = stored.get("bytes") if isinstance(stored, dict) else stored
        if not data:
            raise ImageError(self.name_of(index), "has no bytes", "remove it from the data set")
        return data, int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return `root/split[index]`."""
        return f"{printable(self.root)}/{self.info.split}[{index}]"

    def names(self) -> Iterator[str]:
        """Give what the data set itself calls its images; nothing for those that it does not name."""
        return _paths(self.images)


def load_huggingface(section: HuggingFace) -> Datasets:
    """Return the two splits that `section` names. Raise `DataError` where they, or the library, are not there.

    Where all images are files of their own, as in an `imagefolder`, they are read as such.
    """
    root = expanded(section.root).absolute()
    if not is_folder(root):
        raise DataError(
            f"data.source.root: {printable(section.root)} is no folder on this machine, and nothing is fetched "
            f"(download the data set first, for instance with hf download)"
        )
    splits = _open(root)
    train = _split(splits, section.train, "data.source.train", root)
    val_name = section.val
    if val_name == "auto":
        val_name = next((name for name in _VAL_SPLITS if name in splits), _VAL_SPLITS[0])
    val = _split(splits, val_name, "data.source.val", root)
    image = _image_column(train, section, root)
    labels = read_labels({section.train: train, val_name: val}, section, printable(root))
    return Datasets(
        _source(train, image, labels, section, "train", section.train),
        _source(val, image, labels, section, "val", val_name),
    )


@contextmanager
def _reading(root: Path) -> Iterator[None]:
    """Turn whatever the library raises into one line; it raises nearly anything about files that it cannot use."""
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


def _open(root: Path) -> "Mapping[str, Dataset]":
    """Return the splits in a folder, by the reader that its files ask for."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "data.source.name: huggingface needs the package datasets, which is not installed (pip install "
            "'paceline[huggingface]')"
        ) from error
    with _reading(root), _silent():
        if is_file(root / "dataset_dict.json"):
            return dict(datasets.DatasetDict.load_from_disk(str(root)))
        if is_file(root / "state.json"):
            return {"train": datasets.Dataset.load_from_disk(str(root))}
        kind = "parquet" if next(root.rglob("*.parquet"), None) else "imagefolder"
        return dict(datasets.load_dataset(kind, data_dir=str(root)))


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the library's progress bars off the terminal, which has our own."""
    import datasets

    was_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()


def _split(splits: "Mapping[str, Dataset]", name: str, setting: str, root: Path) -> "Dataset":
    if name not in splits:
        there = ", ".join(map(printable, splits))
        raise DataError(
            f"{setting}: {printable(root)} has no split '{printable(name)}'{near_miss(name, splits)} (it has {there})"
        )
    if not len(splits[name]):
        raise DataError(f"{setting}: split '{printable(name)}' of {printable(root)} has no images (choose another)")
    return splits[name]


def _image_column(train: "Dataset", section: HuggingFace, root: Path) -> str:
    from datasets import Image

    found = [name for name, feature in train.features.items() if isinstance(feature, Image)]
    name = section.image
    if name == "auto" and len(found) == 1:
        return str(found[0])
    if name == "auto" or name not in train.features:
        there = ", ".join(
            f"{printable(name)}: {printable(type(kind).__name__)}" for name, kind in train.features.items()
        )
        raise DataError(
            f"data.source.image: {printable(name)} names no one column of images in {printable(root)} "
            f"(set it to one of {there[:300]})"
        )
    return name


def _source(split: "Dataset", image: str, labels: Labels, section: HuggingFace, ours: Split, theirs: str) -> Source:
    """Return a split: as files where all of its images are paths, else as it is."""
    root = str(expanded(section.root).absolute())
    with _reading(Path(root)):
        images = split.select_columns([image]).with_format("arrow")
        info = files_info("huggingface", ours, len(images), labels.class_names, section.channels)
        if _num_stored(images):
            return HuggingFaceSource(info, root, images, labels.numbers[theirs])
        paths = [fsencode(path.removeprefix(f"{root}/")) for path in _paths(images)]
    return EncodedSource.pack(info, root, paths, labels.numbers[theirs])


def _chunks(images: "Dataset") -> Iterator[Any]:
    """Give the images' column as Arrow arrays, some thousands at a time; nothing of the images is copied."""
    for batch in images.iter(batch_size=_BATCH):
        yield from batch.column(0).chunks


def _stored(chunk: Any) -> tuple[Any, Any]:
    """Return (bytes, paths) of an Arrow array of images, None for what it does not have."""
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
    raise DataError(f"data.source.image: a column of {kind} holds no images (name another one)")


def _num_stored(images: "Dataset") -> int:
    """Return how many images are in the data set itself."""
    stored = (_stored(chunk)[0] for chunk in _chunks(images))
    return sum(len(data) - data.null_count for data in stored if data is not None)


def _paths(images: "Dataset") -> Iterator[str]:
    """Give the paths of the images as they are stored, empty where there is none."""
    for chunk in _chunks(images):
        _, paths = _stored(chunk)
        found = paths.to_pylist() if paths is not None else [""] * len(chunk)
        yield from ((path or "").replace("\0", "") for path in found)
