"""Use a subset of a source as a source, so that all loaders are measured on the same samples."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Sample, Source


@dataclass(frozen=True, eq=False)
class SourceSubset:
    """Samples `indices`, int64 [K], of `source`, in that order."""

    source: Source
    indices: NDArray[np.int64]

    @property
    def info(self) -> DatasetInfo:
        """Facts of the split, with the number of images of the subset."""
        return replace(self.source.info, num_images=len(self))

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        """Return a sample, as `source.read` does."""
        return self.source.read(int(self.indices[index]))

    def name_of(self, index: int) -> str:
        """Return the name of a sample, as `source.name_of` does."""
        return self.source.name_of(int(self.indices[index]))


def select_samples(source: Source, indices: NDArray[np.int64]) -> Source:
    """Return the samples `indices` of `source`; in-memory pixels stay in-memory pixels."""
    if len(indices) == len(source):
        return source
    if isinstance(source, ArraySource):
        info = replace(source.info, num_images=len(indices))
        return ArraySource(info, source.images[indices], source.labels[indices])
    return SourceSubset(source, indices)
