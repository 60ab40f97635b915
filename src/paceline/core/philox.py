"""Counter-based random numbers: each value is a function of (seed, stream, epoch, index, draw), of nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
vectorised in numpy. There is no state to save, to share or to advance, so the value of a sample's third draw is
the same in any process, in any order, after any interruption.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


class Stream(IntEnum):
    """What random numbers are for; numbers of different streams have nothing in common."""

    ORDER = 0
    AUGMENT = 1
    STEP = 2


def philox(counters: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return four random 32-bit words for each counter.

    `counters` is uint64 [4, N] holding 32-bit words; the result has the same shape. `seed` is the 64-bit key.
    """
    c0, c1, c2, c3 = counters
    key_0, key_1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product_1 >> _SHIFT) ^ c1 ^ np.uint64(key_0)
        c1 = product_1 & _LOW
        c2 = (product_0 >> _SHIFT) ^ c3 ^ np.uint64(key_1)
        c3 = product_0 & _LOW
        key_0, key_1 = (key_0 + _WEYL_0) & 0xFFFFFFFF, (key_1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def uniform(seed: int, stream: Stream, epoch: int, indices: NDArray[np.integer], num_draws: int) -> NDArray[np.float64]:
    """Return float64 [N, num_draws] in [0, 1): the draws of each sample index in this epoch.

    Draw d of a sample does not depend on `num_draws`, nor on which other samples are asked for.
    """
    num_blocks = -(-num_draws // 4)
    counters = np.empty((4, len(indices), num_blocks), dtype=np.uint64)
    counters[0] = np.arange(num_blocks, dtype=np.uint64)
    counters[1] = epoch
    counters[2] = np.asarray(indices).astype(np.uint64)[:, None]
    counters[3] = stream
    words = philox(counters.reshape(4, -1), seed).reshape(4, len(indices), num_blocks)
    draws = words.transpose(1, 2, 0).reshape(len(indices), num_blocks * 4)[:, :num_draws]
    return draws.astype(np.float64) * 2.0**-32


def permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Return the order, int64 [n], in which epoch `epoch` visits n samples.

    The samples are sorted by a random 64-bit key each, so the order is defined by Philox alone and does not change
    with the version of a library's shuffle.
    """
    counters = np.zeros((4, n), dtype=np.uint64)
    counters[1] = epoch
    counters[2] = np.arange(n, dtype=np.uint64)
    counters[3] = Stream.ORDER
    words = philox(counters, seed)
    return np.argsort(words[0] << _SHIFT | words[1], kind="stable")


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the 63-bit seed of what a rank draws inside one optimizer step (dropout, stochastic depth)."""
    counter = np.array([[step & 0xFFFFFFFF], [step >> 32], [rank], [Stream.STEP]], dtype=np.uint64)
    words = philox(counter, seed)
    return (int(words[0, 0]) << 32 | int(words[1, 0])) >> 1
