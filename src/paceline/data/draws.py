"""The uniform draws of a batch, keyed by (seed, epoch, sample index): fresh in every epoch, or alternating."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.philox import Stream, uniform


def draw(seed: int, epoch: int, indices: NDArray[np.int64], is_alternating: Sequence[bool]) -> NDArray[np.float64]:
    """Return float64 [N, D] in [0, 1), D being the length of `is_alternating`.

    A fresh draw is another one in each epoch. An alternating draw belongs to the sample, and moves on by 1/2, past 1
    back to 0, with each epoch: what is below 1/2 in one epoch is above it in the next.
    """
    draws = uniform(seed, Stream.AUGMENT, epoch, indices, len(is_alternating))
    alternating = np.flatnonzero(is_alternating)
    if len(alternating):
        own = uniform(seed, Stream.SAMPLE, 0, indices, len(alternating))
        draws[:, alternating] = (own + 0.5 * (epoch % 2)) % 1.0
    return draws
