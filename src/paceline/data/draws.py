"""Random draws of a batch, keyed by (seed, epoch, sample index): fresh in every epoch, or alternating."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.philox import Stream, uniform


def draw_uniform(
    seed: int, epoch: int, indices: NDArray[np.int64], is_alternating: Sequence[bool]
) -> NDArray[np.float64]:
    """Draw float64 [N, D] in [0, 1), with D the length of `is_alternating`.

    A fresh draw changes every epoch. An alternating draw belongs to the sample and advances by 1/2 (mod 1) per epoch:
    below 1/2 in one epoch, above it in the next.
    """
    draws = uniform(seed, Stream.AUGMENT, epoch, indices, len(is_alternating))
    alternating = np.flatnonzero(is_alternating)
    if len(alternating):
        per_sample = uniform(seed, Stream.SAMPLE, 0, indices, len(alternating))
        draws[:, alternating] = (per_sample + 0.5 * (epoch % 2)) % 1.0
    return draws
