"""Counter-based random numbers: each value is a function of (seed, stream, epoch, index, draw), of nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
vectorised in numpy. There is no state to save, to share or to advance, so the value of a sample's third draw is
the same in any process, in any order, after any interruption.
"""

from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10

Word = TypeVar("Word", int, NDArray[np.uint64])


class Stream(IntEnum):
    """What random numbers are for; numbers of different streams have nothing in common."""

    ORDER = 0
    AUGMENT = 1
    STEP = 2
    SAMPLE = 3


def philox(counter: tuple[Word, Word, Word, Word], seed: int) -> tuple[Word, Word, Word, Word]:
    """Return the four random 32-bit words of a counter of four 32-bit words, under the 64-bit key `seed`.

    The words are integers, or uint64 arrays of one shape for many counters at once.
    """
    words: Any = counter  # numpy's stubs lose the type of an array at `& int`
    c0, c1, c2, c3 = words
    key_0, key_1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product_1 >> 32) ^ c1 ^ key_0
        c1 = product_1 & _LOW
        c2 = (product_0 >> 32) ^ c3 ^ key_1
        c3 = product_0 & _LOW
        key_0, key_1 = (key_0 + _WEYL_0) & _LOW, (key_1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniform(seed: int, stream: Stream, epoch: int, indices: NDArray[np.integer], num_draws: int) -> NDArray[np.float64]:
    """Return float64 [N, num_draws] in [0, 1): the draws of each sample index in this epoch.

    Draw d of a sample does not depend on `num_draws`, nor on which other samples are asked for.
    """
    num_blocks = -(-num_draws // 4)
    shape = (len(indices), num_blocks)
    block = np.broadcast_to(np.arange(num_blocks, dtype=np.uint64), shape)
    index = np.broadcast_to(np.asarray(indices).astype(np.uint64)[:, None], shape)
    words = np.stack(philox((block, _filled(epoch, shape), index, _filled(stream, shape)), seed), axis=2)
    return words.reshape(len(indices), num_blocks * 4)[:, :num_draws].astype(np.float64) * 2.0**-32


def permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Return the order, int64 [n], in which epoch `epoch` visits n samples.

    The samples are sorted by a random 64-bit key each, so the order is defined by Philox alone and does not change
    with the version of a library's shuffle.
    """
    index = np.arange(n, dtype=np.uint64)
    high, low, _, _ = philox((_filled(0, (n,)), _filled(epoch, (n,)), index, _filled(Stream.ORDER, (n,))), seed)
    return np.argsort(high << np.uint64(32) | low, kind="stable")


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the 63-bit seed of what a rank draws inside one optimizer step (dropout, stochastic depth)."""
    high, low, _, _ = philox((step & _LOW, step >> 32, rank, int(Stream.STEP)), seed)
    return (high << 32 | low) >> 1


def _filled(word: int, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    return np.full(shape, word, dtype=np.uint64)
