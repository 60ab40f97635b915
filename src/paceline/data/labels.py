"""Labels of a split, for sources that know them without reading images."""

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, Source
from paceline.data.pack.reader import PackSource
from paceline.data.sources.encoded import ImageFileSource
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.webdataset import WebDatasetSource


def get_labels(source: Source) -> NDArray[np.integer] | None:
    """Return all labels, integers [N], or None if they come only with the images."""
    match source:
        case (
            ArraySource(labels=labels)
            | ImageFileSource(labels=labels)
            | PackSource(labels=labels)
            | LmdbSource(labels=labels)
            | WebDatasetSource(labels=labels)
            | HuggingFaceSource(labels=labels)
        ):
            return np.asarray(labels)
    return None
