"""Find images that are there more than once, byte for byte: in both splits, or under two labels. Torch-free."""

import hashlib
import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NUM_SHOWN: Final = 5
_BYTES: Final = 16
"""Of a digest: two of a billion different images have the same with a probability of 1e-21."""


@dataclass(frozen=True)
class Pair:
    """Two samples that hold the same, by their numbers, and whether such are in both splits and under two labels."""

    first: int
    second: int
    in_both_splits: bool
    in_two_classes: bool


@dataclass(frozen=True)
class Copies:
    """How many different images are there more than once, how many samples these are, and which the first are.

    Of those images `across_splits` are in training and in validation too, and `in_two_classes` have two labels.
    """

    images: int
    samples: int
    across_splits: int
    in_two_classes: int
    first: tuple[Pair, ...]


class Digests:
    """A digest and a label of each of `num` samples, in memory that is shared with processes forked later."""

    def __init__(self, num: int) -> None:
        shared = mmap.mmap(-1, max(1, num) * (_BYTES + 8))
        self._rows: NDArray[np.uint64] = np.frombuffer(shared, dtype=np.uint64).reshape(-1, 3)[:num]

    def note(self, number: int, content: bytes | NDArray[np.uint8], label: int) -> None:
        """Note what sample `number` holds."""
        found = hashlib.blake2b(digest_size=_BYTES)
        if isinstance(content, bytes):
            found.update(content)
        else:
            found.update(f"{content.shape}".encode())
            found.update(np.ascontiguousarray(content).data)
        self._rows[number, :2] = np.frombuffer(found.digest(), dtype=np.uint64)
        self._rows[number, 2] = label + 1  # 0 stays for what was not noted

    def copies(self, num_train: int) -> Copies:
        """Return which of the noted samples hold the same; the first `num_train` are those of training."""
        noted = np.flatnonzero(self._rows[:, 2])
        rows = self._rows[noted]
        order = np.lexsort((rows[:, 1], rows[:, 0]))  # stable: numbers rise among equals
        rows, numbers = rows[order], noted[order]
        starts = np.flatnonzero(np.r_[True, (rows[1:, :2] != rows[:-1, :2]).any(1)][: len(rows)])
        sizes = np.diff(np.r_[starts, len(rows)])
        starts, sizes = starts[sizes > 1], sizes[sizes > 1]
        groups = [
            _pair(numbers[start : start + size], rows[start : start + size, 2], num_train)
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        return Copies(
            len(groups),
            int(sizes.sum()),
            sum(each.in_both_splits for each in groups),
            sum(each.in_two_classes for each in groups),
            _shown(groups),
        )


def _pair(numbers: NDArray[np.int64], labels: NDArray[np.uint64], num_train: int) -> Pair:
    """Return two of the samples that hold the same, of two classes or else of both splits where there are such."""
    others, in_val = labels != labels[0], numbers >= num_train
    differs = others if others.any() else in_val if in_val[-1] and not in_val[0] else np.ones_like(others)
    second = int(np.flatnonzero(differs[1:])[0]) + 1
    return Pair(int(numbers[0]), int(numbers[second]), bool(in_val[-1] and not in_val[0]), bool(others.any()))


def _shown(groups: list[Pair]) -> tuple[Pair, ...]:
    """Return the first few of each kind, the worst kind first."""
    kinds: dict[tuple[bool, bool], list[Pair]] = {}
    for each in sorted(groups, key=lambda each: each.first):
        kinds.setdefault((not each.in_two_classes, not each.in_both_splits), []).append(each)
    return tuple(each for _, found in sorted(kinds.items()) for each in found[:_NUM_SHOWN])
