"""Select samples of a split, and join two splits. Pixels in memory, image files and packs keep their fast loaders."""

import os
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, JoinedNames, Sample, Source
from paceline.core.errors import DataError
from paceline.data.pack.reader import PackSource
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.image_files import FileSource, ImageFileSource, LocatedFiles
from paceline.data.sources.webdataset import WebDatasetSource


@dataclass(frozen=True, eq=False)
class SourceSubset:
    """Samples `indices`, int64 [K], in that order, of the samples of all `sources`, one source after the other."""

    info: DatasetInfo
    sources: tuple[Source, ...]
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        """Return a sample, as the source that has it does."""
        source, position = self._find(index)
        return source.read(position)

    def name_of(self, index: int) -> str:
        """Return the name of a sample, as the source that has it does."""
        source, position = self._find(index)
        return source.name_of(position)

    @property
    def file_root(self) -> str:
        """The folder that the files of all sources are in."""
        return os.path.commonpath([each.file_root for each in self._file_sources])

    def locate_files(self, indices: NDArray[np.int64]) -> LocatedFiles:
        """Return where images lie, int64 [N], as the sources that have them do."""
        positions, start = self.indices[indices], 0
        parts, rows = [], []
        for source in self._file_sources:
            rows.append(np.flatnonzero((positions >= start) & (positions < start + len(source))))
            parts.append(source.locate_files(positions[rows[-1]] - start))
            start += len(source)
        joined = LocatedFiles(
            [file for part in parts for file in part.files],
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            [name for part in parts for name in part.names],
        )
        return joined.take(np.concatenate(rows).argsort())

    @property
    def _file_sources(self) -> list[FileSource]:
        return [file_source for each in self.sources if (file_source := find_file_source(each)) is not None]

    def _find(self, index: int) -> tuple[Source, int]:
        position, number = int(self.indices[index]), 0
        while position >= len(self.sources[number]):
            position -= len(self.sources[number])
            number += 1
        return self.sources[number], position


def find_file_source(source: Source) -> FileSource | None:
    """Return `source` if the native extension can read its images as files, else None."""
    match source:
        case ImageFileSource() | WebDatasetSource() | HuggingFaceSource():
            return source
        case SourceSubset(sources=sources) if all(find_file_source(each) is not None for each in sources):
            return source
    return None


def select_samples(source: Source, indices: NDArray[np.int64], info: DatasetInfo | None = None) -> Source:
    """Return the samples `indices`, int64 [K], of `source` in that order, as a split with `info`, by default its own.

    Images of a selected array keep their position in the name.
    """
    if info is None and np.array_equal(indices, np.arange(len(source))):
        return source
    info = replace(info or source.info, num_images=len(indices))
    match source:
        case ArraySource(images=images, labels=labels, positions=positions):
            chosen = indices if positions is None else positions[indices]
            return ArraySource(info, images[indices], labels[indices], chosen)
        case ImageFileSource(root=root, paths=paths, labels=labels):
            return ImageFileSource(info, root, paths.take(indices), labels[indices])
        case PackSource():
            return source.select(info, indices)
    return SourceSubset(info, (source,), indices)


def join_samples(first: Source, second: Source) -> Source:
    """Return the samples of `first`, then those of `second`, both splits of one dataset.

    Raise `DataError` if their labels are rows of different tables of targets.
    """
    info = replace(first.info, num_images=len(first) + len(second))
    if first.info.targets != second.info.targets:
        raise DataError(
            "data.split.pool: all cannot join two splits whose soft labels are numbered differently (set "
            "data.split.pool=train)"
        )
    match first, second:
        case ArraySource(), ArraySource() if first.images.shape[1:] == second.images.shape[1:]:
            images = np.concatenate([first.images, second.images])
            return ArraySource(info, images, np.concatenate([first.labels, second.labels]))
        case ImageFileSource(), ImageFileSource():
            root = os.path.commonpath([first.root, second.root])
            paths = [path for each in (first, second) for path in _paths_below(root, each)]
            labels = np.concatenate([first.labels, second.labels])
            return ImageFileSource(info, root, JoinedNames.from_list(paths), labels)
        case PackSource(), PackSource():
            return first.join(info, second)
    return SourceSubset(info, (first, second), np.arange(info.num_images))


def _paths_below(root: str, source: ImageFileSource) -> list[bytes]:
    folder = os.fsencode(os.path.relpath(source.root, root))
    listed = [source.paths[index] for index in range(len(source))]
    return listed if folder == b"." else [os.path.join(folder, path) for path in listed]  # noqa: PTH118 - bytes
