"""Counter-based random numbers: stateless functions of (seed, stream, epoch, index, draw).

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), vectorized in
numpy. Without state to save, a draw is the same in any process, in any order, and after a resume.
"""

import math
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_BLOCK_SIZE = 1 << 13
"""Counters per chunk: they stay in the CPU cache, which halves the time (measured on 10 M)."""
_FEISTEL_ROUNDS = 6
"""Four make a random permutation (Luby and Rackoff 1988, doi:10.1137/0217022), and two more are a margin."""
_LOG_TERMS = 11
"""Terms of the series of the logarithm, for arguments from sqrt(1/2) to sqrt(2); the next is below 1e-17."""

Uint64 = TypeVar("Uint64", int, NDArray[np.uint64])


class Stream(IntEnum):
    """Purpose of a random number; streams are independent of one another."""

    ORDER = 0
    AUGMENT = 1
    STEP = 2
    SAMPLE = 3
    SEARCH = 4
    ADAPTERS = 5
    SAMPLER = 6
    PERMUTATION = 7
    SUBSET = 8


def philox(counter: tuple[Uint64, Uint64, Uint64, Uint64], seed: int) -> tuple[Uint64, Uint64, Uint64, Uint64]:
    """Return the four random 32-bit words for a counter of four 32-bit words and the 64-bit key `seed`.

    Words are ints, or uint64 arrays of one shape for many counters at once.
    """
    numbers: Any = counter  # numpy's stubs lose the type of an array at `& int`
    c0, c1, c2, c3 = numbers
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
    """Return float64 [N, num_draws] in [0, 1): the draws of each sample index in an epoch.

    A draw depends neither on `num_draws` nor on the other samples.
    """
    num_blocks = -(-num_draws // 4)  # a counter gives four words
    draws = np.empty((len(indices), num_draws))
    rows = max(1, _BLOCK_SIZE // max(1, num_blocks))
    for start in range(0, len(indices) if num_blocks else 0, rows):
        index = np.asarray(indices[start : start + rows]).astype(np.uint64)
        block = np.tile(np.arange(num_blocks, dtype=np.uint64), len(index))
        for number, word in enumerate(_philox_arrays(block, epoch, np.repeat(index, num_blocks), stream, seed)):
            part = draws[start : start + rows, number::4]  # word `number` of every block
            np.multiply(word.reshape(len(index), num_blocks)[:, : part.shape[1]], 2.0**-32, out=part)
    return draws


def uniform_pairs(seed: int, stream: Stream, epoch: int, indices: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return float64 [N, 2] in [0, 1), multiples of 2**-53: two draws of each sample index in an epoch."""
    draws = np.empty((len(indices), 2))
    for start in range(0, len(indices), _BLOCK_SIZE):
        index = np.asarray(indices[start : start + _BLOCK_SIZE]).astype(np.uint64)
        blocks = _philox_arrays(np.zeros_like(index), epoch, index, stream, seed)
        for number in range(2):
            draws[start : start + _BLOCK_SIZE, number] = _join(*blocks[2 * number : 2 * number + 2]) >> np.uint64(11)
    draws *= 2.0**-53
    return draws


def exponential(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -log(1 - u), float64 [N], for `uniforms` float64 [N] in [0, 1): draws of the exponential distribution."""
    # `np.log` rounds differently from one processor to the next, and ranks must agree. These operations do not.
    mantissa, exponent = np.frexp(1 - uniforms)
    is_low = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(is_low, 2 * mantissa, mantissa), exponent - is_low
    # log(m) = 2 artanh(z) with z = (m - 1) / (m + 1).
    z = (mantissa - 1) / (mantissa + 1)
    series = np.zeros_like(z)
    for power in reversed(range(1, 2 * _LOG_TERMS, 2)):
        series = series * (z * z) + 1 / power
    negative: NDArray[np.float64] = exponent * -math.log(2) - 2 * z * series
    return negative


def permutation(seed: int, epoch: int, n: int, stream: Stream = Stream.ORDER) -> NDArray[np.int64]:
    """Return the order, int64 [n], in which epoch `epoch` visits n samples."""
    # Sorting by random 64-bit keys, unlike a library's shuffle, gives the same order in every version of numpy. The
    # sort is stable, so equal keys are defined too.
    keys = np.empty(n, dtype=np.uint64)
    for start in range(0, n, _BLOCK_SIZE):
        index = np.arange(start, min(start + _BLOCK_SIZE, n), dtype=np.uint64)
        high, low, _, _ = _philox_arrays(np.zeros_like(index), epoch, index, stream, seed)
        keys[start : start + _BLOCK_SIZE] = _join(high, low)
    return stable_argsort(keys)


def permute(seed: int, epoch: int, positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return the samples, int64 [N], at `positions` int64 [N] of a random order of n samples, without that order.

    A generalized Feistel network on pairs of numbers with cycle walking (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains", doi:10.1007/3-540-45760-7_9).
    """
    # The samples are pairs (left < height, right < width); a few pairs beyond n are permuted again until they are not.
    height = math.isqrt(n - 1) + 1
    width = -(-n // height)
    samples = positions.astype(np.uint64)
    outside = np.arange(len(samples))
    while len(outside):
        left, right = np.divmod(samples[outside], np.uint64(width))
        for number in range(0, _FEISTEL_ROUNDS, 2):
            left = (left + _feistel_round(seed, epoch, number, right, height)) % np.uint64(height)
            right = (right + _feistel_round(seed, epoch, number + 1, left, width)) % np.uint64(width)
        samples[outside] = left * np.uint64(width) + right
        outside = outside[samples[outside] >= n]
    return samples.astype(np.int64)


def _feistel_round(seed: int, epoch: int, number: int, half: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Return uint64 [N] below `size`: the function of round `number` of `half`, uint64 [N]."""
    high, low, _, _ = _philox_arrays(np.full_like(half, number), epoch, half.copy(), Stream.PERMUTATION, seed)
    return _join(high, low) % np.uint64(size)


def _join(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the 64-bit words of two 32-bit words each, in place of `high`."""
    high <<= np.uint64(32)
    high |= low
    return high


def stable_argsort(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return `np.argsort(keys, kind="stable")`, int64 [n], in half its time."""
    # Sorting values is faster than an argsort. Pack the upper bits of each key with its index in the lower bits, sort,
    # and then sort runs of equal upper bits by whole keys.
    bits = np.uint64(max(1, len(keys) - 1).bit_length())
    packed = keys >> bits
    packed <<= bits
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    packed >>= bits
    tied = np.flatnonzero(packed[1:] == packed[:-1])
    positions = np.union1d(tied, tied + 1)
    samples = np.sort(order[positions])
    order[positions] = samples[np.argsort(keys[samples], kind="stable")]
    return order


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the 63-bit seed of a rank's random numbers in one optimizer step (dropout, stochastic depth)."""
    high, low, _, _ = philox((step & _LOW, step >> 32, rank, int(Stream.STEP)), seed)
    return (high << 32 | low) >> 1


def adapter_seed(seed: int) -> int:
    """Return the 63-bit seed of the initial weights of adapters."""
    high, low, _, _ = philox((0, 0, 0, int(Stream.ADAPTERS)), seed)
    return (high << 32 | low) >> 1


def _philox_arrays(
    block: NDArray[np.uint64], epoch: int, index: NDArray[np.uint64], stream: Stream, seed: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Return `philox((block, epoch, index, stream), seed)` for arrays of counters, in place."""
    # The same rounds as in `philox`, without temporary arrays.
    shift, low = np.uint64(32), np.uint64(_LOW)
    c0, c1, c2, c3 = block, np.full_like(index, epoch), index, np.full_like(index, stream)
    product_0, product_1 = np.empty_like(c0), np.empty_like(c0)
    key_0, key_1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(_ROUNDS):
        np.multiply(c0, np.uint64(_MULTIPLIER_0), out=product_0)
        np.multiply(c2, np.uint64(_MULTIPLIER_1), out=product_1)
        for word, other, product, key in ((c0, c1, product_1, key_0), (c2, c3, product_0, key_1)):
            np.right_shift(product, shift, out=word)
            word ^= other
            word ^= np.uint64(key)
            np.bitwise_and(product, low, out=other)
        key_0, key_1 = (key_0 + _WEYL_0) & _LOW, (key_1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3
