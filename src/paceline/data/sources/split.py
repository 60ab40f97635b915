"""Which samples are held out for validation when a data set does not say so: a pure function of names and a seed."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def held_out(labels: NDArray[np.integer], names: Iterable[bytes], *, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return which samples, bool [N], are held out: `fraction` of each class, to the nearest.

    `labels` is [N] and `names` gives N stable names. A class of two or more has a sample on either side; a class
    of one keeps it for training. Within a class, those with the smallest keyed hash (BLAKE2b) of their name go:
    the choice depends neither on the order of the samples nor on the other classes.
    """
    key = hashlib.blake2b(str(seed).encode()).digest()
    digests = b"".join(hashlib.blake2b(name, key=key, digest_size=8).digest() for name in names)
    hashes = np.frombuffer(digests, dtype="<u8")
    assert len(hashes) == len(labels), f"{len(hashes)} names for {len(labels)} labels"

    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    quotas = np.clip(np.floor(sizes * fraction + 0.5).astype(np.int64), 1, np.maximum(sizes - 1, 1))
    quotas[sizes == 1] = 0
    order = np.lexsort((hashes, classes))
    starts = np.cumsum(sizes) - sizes
    place_in_class = np.arange(len(labels)) - starts[classes[order]]
    mask = np.zeros(len(labels), dtype=np.bool_)
    mask[order] = place_in_class < quotas[classes[order]]
    return mask
