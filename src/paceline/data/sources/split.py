"""Select a validation split if a data set has none."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def select_validation(
    labels: NDArray[np.integer], names: Iterable[bytes], *, fraction: float, seed: int
) -> NDArray[np.bool_]:
    """Return a bool mask [N] of the validation samples: `fraction` of each class, rounded to the nearest number.

    `labels` is [N]; `names` yields N stable names. A class with at least two samples gets one in each split, a class
    with one keeps it for training.
    """
    # The samples with the smallest keyed hash of their name are held out, so the choice depends neither on the order of
    # the samples nor on other classes.
    key = hashlib.blake2b(str(seed).encode()).digest()
    digests = b"".join(hashlib.blake2b(name, key=key, digest_size=8).digest() for name in names)
    hashes = np.frombuffer(digests, dtype="<u8")
    assert len(hashes) == len(labels), f"{len(hashes)} names for {len(labels)} labels"

    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    quotas = np.clip(np.floor(sizes * fraction + 0.5).astype(np.int64), 1, np.maximum(sizes - 1, 1))
    quotas[sizes == 1] = 0
    order = np.lexsort((hashes, classes))
    starts = np.cumsum(sizes) - sizes
    rank_in_class = np.arange(len(labels)) - starts[classes[order]]
    mask = np.zeros(len(labels), dtype=np.bool_)
    mask[order] = rank_in_class < quotas[classes[order]]
    return mask
