"""Load images and labels from WebDataset tars with random access, so that shuffling is exact."""

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Datasets, Sample, Split
from paceline.core.units import count
from paceline.data.bad import ImageError
from paceline.data.sources.encoded import build_files_info
from paceline.data.sources.open_files import RandomAccessFiles
from paceline.data.sources.places import printable
from paceline.data.sources.tar_labels import build_label_reader, read_class_list
from paceline.data.sources.tar_paths import expand_tar_paths
from paceline.data.sources.tar_samples import TarSamples, scan_tar_samples
from paceline.recipe.schema.source import WebDataset


# Opening reads the headers of all tars once, 10 us per sample (measured, local files). Memory holds 24 bytes and the
# name per sample.
@dataclass(frozen=True, eq=False)
class WebDatasetSource:
    """The images of a split in tars. `names` is the joined bytes of all N member names.

    Name i is `names[name_ends[i - 1]:name_ends[i]]`; tar t has the samples from `tar_ends[t - 1]` up to `tar_ends[t]`.
    `starts` is uint64 [N], `lengths` uint32 [N], `labels` int32 [N], `name_ends` and `tar_ends` int64.
    """

    info: DatasetInfo
    files: RandomAccessFiles
    tar_ends: NDArray[np.int64]
    starts: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    labels: NDArray[np.int32]
    names: bytes
    name_ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (encoded image bytes, label). Raise `ImageError` if the image is empty or cannot be read."""
        length = int(self.lengths[index])
        try:
            data = self.files.read(self._find_tar(index), int(self.starts[index]), length)
        except OSError as error:
            raise ImageError(self.name_of(index), f"cannot be read: {error.strerror}", "restore its tar") from error
        if not data:
            raise ImageError(self.name_of(index), "is empty (0 bytes)", "make its tar again")
        return data, int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return the path of the tar followed by the member's name."""
        start = int(self.name_ends[index - 1]) if index else 0
        name = os.fsdecode(self.names[start : int(self.name_ends[index])])
        return printable(f"{self.files.paths[self._find_tar(index)]}/{name}")

    def _find_tar(self, index: int) -> int:
        return int(np.searchsorted(self.tar_ends, index, side="right"))


def load_webdataset(section: WebDataset) -> Datasets:
    """Load the samples of the tars that `section` names.

    Raise `DataError` for tars that are missing, truncated or damaged, and for images without a label or with one that
    training does not have, before any image is read.
    """
    class_list = read_class_list(section)
    read_label = build_label_reader(section, class_list)
    train = scan_tar_samples(expand_tar_paths(section.train, "data.source.train"), read_label)
    val = scan_tar_samples(expand_tar_paths(section.val, "data.source.val"), read_label)
    class_names = class_list or tuple(str(label) for label in range(max(train.labels) + 1))
    for samples in (train, val):
        samples.check_labels(len(class_names))
    shared = len(set(train.paths) & set(val.paths))
    notes = [f"{count(shared, 'tar')} of validation are training tars too"] if shared else []
    return Datasets(
        _build_webdataset_source(
            train, "train", class_names, section, [*train.build_notes(), *_note_unseen_classes(train, class_names)]
        ),
        _build_webdataset_source(val, "val", class_names, section, [*val.build_notes(), *notes]),
    )


def _note_unseen_classes(train: TarSamples, class_names: tuple[str, ...]) -> list[str]:
    missing = np.flatnonzero(np.bincount(np.asarray(train.labels), minlength=len(class_names)) == 0)
    if not len(missing):
        return []
    return [
        f"{len(missing):,} of {len(class_names):,} classes have no training image, such as {class_names[missing[0]]}"
    ]


def _build_webdataset_source(
    samples: TarSamples, split: Split, class_names: tuple[str, ...], section: WebDataset, notes: list[str]
) -> WebDatasetSource:
    return WebDatasetSource(
        info=build_files_info("webdataset", split, len(samples.labels), class_names, section.channels, tuple(notes)),
        files=RandomAccessFiles(samples.paths, tuple(samples.sizes)),
        tar_ends=np.asarray(samples.tar_ends, dtype=np.int64),
        starts=np.asarray(samples.starts, dtype=np.uint64),
        lengths=np.asarray(samples.lengths, dtype=np.uint32),
        labels=np.asarray(samples.labels, dtype=np.int32),
        names=bytes(samples.names),
        name_ends=np.asarray(samples.name_ends, dtype=np.int64),
    )
