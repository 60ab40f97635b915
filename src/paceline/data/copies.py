"""Find duplicate images, byte for byte: across the splits, or under two labels. Torch-free."""

import hashlib
import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MAX_EXAMPLES: Final = 5
# Length of a digest: among a billion different images, two collide with a probability of 1e-21.
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True)
class DuplicatePair:
    """Two samples with equal content, by number, and whether such samples are in both splits or have two labels."""

    first: int
    second: int
    in_both_splits: bool
    in_two_classes: bool


@dataclass(frozen=True)
class Duplicates:
    """Count the images that occur more than once (`images`), and the samples that hold them (`samples`).

    `across_splits` of the images are in both splits, `in_two_classes` have two labels. `examples` shows examples.
    """

    images: int
    samples: int
    across_splits: int
    in_two_classes: int
    examples: tuple[DuplicatePair, ...]


class SampleDigests:
    """Digests and labels of `num` samples, in memory shared with processes that are forked later."""

    def __init__(self, num: int) -> None:
        shared = mmap.mmap(-1, max(1, num) * (_DIGEST_BYTES + 8))
        self._rows: NDArray[np.uint64] = np.frombuffer(shared, dtype=np.uint64).reshape(-1, 3)[:num]

    def add(self, number: int, content: bytes | NDArray[np.uint8], label: int) -> None:
        """Store the digest and label of sample `number`."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        if isinstance(content, bytes):
            digest.update(content)
        else:
            digest.update(f"{content.shape}".encode())
            digest.update(np.ascontiguousarray(content).data)
        self._rows[number, :2] = np.frombuffer(digest.digest(), dtype=np.uint64)
        self._rows[number, 2] = label + 1  # 0 marks a sample that was not read

    def find_duplicates(self, num_train: int) -> Duplicates:
        """Return the duplicates among the stored samples; the first `num_train` are the training split."""
        stored = np.flatnonzero(self._rows[:, 2])
        rows = self._rows[stored]
        order = np.lexsort((rows[:, 1], rows[:, 0]))  # stable: equal digests keep the order of their numbers
        rows, numbers = rows[order], stored[order]
        starts = np.flatnonzero(np.r_[True, (rows[1:, :2] != rows[:-1, :2]).any(1)][: len(rows)])
        sizes = np.diff(np.r_[starts, len(rows)])
        starts, sizes = starts[sizes > 1], sizes[sizes > 1]
        groups = [
            _choose_pair(numbers[start : start + size], rows[start : start + size, 2], num_train)
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        return Duplicates(
            len(groups),
            int(sizes.sum()),
            sum(each.in_both_splits for each in groups),
            sum(each.in_two_classes for each in groups),
            _choose_examples(groups),
        )


def _choose_pair(numbers: NDArray[np.int64], labels: NDArray[np.uint64], num_train: int) -> DuplicatePair:
    """Choose two of the equal samples: of two classes or both splits if there are such."""
    others, in_val = labels != labels[0], numbers >= num_train
    differs = others if others.any() else in_val if in_val[-1] and not in_val[0] else np.ones_like(others)
    second = int(np.flatnonzero(differs[1:])[0]) + 1
    return DuplicatePair(int(numbers[0]), int(numbers[second]), bool(in_val[-1] and not in_val[0]), bool(others.any()))


def _choose_examples(groups: list[DuplicatePair]) -> tuple[DuplicatePair, ...]:
    kinds: dict[tuple[bool, bool], list[DuplicatePair]] = {}
    for each in sorted(groups, key=lambda each: each.first):
        kinds.setdefault((not each.in_two_classes, not each.in_both_splits), []).append(each)
    return tuple(each for _, pairs in sorted(kinds.items()) for each in pairs[:_MAX_EXAMPLES])
