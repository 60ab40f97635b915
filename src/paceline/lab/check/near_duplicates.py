"""Find images that occur more than once in a dataset, re-saved or resized, by a perceptual hash. Torch-free."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.dataset import Datasets, PixelArray, Source, Split
from paceline.core.errors import DataError
from paceline.core.pixels import PixelFormat
from paceline.core.random import permutation
from paceline.data.bad_images import BadImage, get_reason
from paceline.data.decode import NPY_SIGNATURE, decode
from paceline.data.decode_array import decode_pixels

_SIDE: Final = 32
_LOW: Final = 8
_SMALLEST: Final = 2 * _SIDE
"""Pixels to which a JPEG may be reduced while it is decoded."""
_CHUNK: Final = 512
MAX_DISTANCE: Final = 6
"""Most bits of the hash in which two copies of an image differ."""
MAX_DIFFERENCE: Final = 0.1
"""Largest root mean square difference of two copies at 16 x 16 pixels, with a mean of 0 and a standard deviation of 1.

With both limits, of all pairs of different images none of 1,797 digits, 6 of 10,000 of Fashion-MNIST and none of 500
photographs count as copies, by the hash alone 13, 5,914 and none. Photographs that are saved again with a quality of 40
or at half their size are all found, of images of 32 pixels 82 and 5 %. Measured by benchmarks/near_duplicates.py.
"""
_MIN_CONTRAST: Final = 4.0
"""Standard deviation in gray levels below which an image is flat; its hash is noise."""
_MAX_GROUP: Final = 4096


@dataclass(frozen=True)
class ImageRef:
    """An image: its split, index, name and class number; with several labels, its row of targets."""

    split: Split
    index: int
    name: str
    label: int


@dataclass(frozen=True)
class CopyGroup:
    """An image that occurs `images` times: `first`, and `second`, which has another label or split if any has.

    `is_exact` if these two have the same bytes or pixels.
    """

    first: ImageRef
    second: ImageRef
    images: int
    is_exact: bool
    in_two_classes: bool
    in_both_splits: bool


@dataclass(frozen=True)
class DuplicateScan:
    """What was found in `images` of `total` images: groups of copies, the most harmful first, and unreadable images.

    `leaked` validation images are in the training split, too. `flat` images, of one gray level, were compared by
    content only.
    """

    images: int
    total: int
    groups: tuple[CopyGroup, ...]
    leaked: int
    flat: int
    bad: tuple[BadImage, ...]


def find_near_duplicates(
    datasets: Datasets, *, most: int, threads: int, progress: Callable[[int, int], None] = lambda done, of: None
) -> DuplicateScan:
    """Compare up to `most` images of both splits, a keyed random sample of larger datasets, with each other.

    Two images are copies if their content is the same, or if their hashes differ in at most `MAX_DISTANCE` of 64 bits
    and the images themselves in at most `MAX_DIFFERENCE`. The hash is the sign of the 8 x 8 lowest frequencies
    of the DCT without the mean, against their median (Zauner 2010, "Implementation and benchmarking of perceptual
    image hash functions"; pHash).
    """
    num_train, total = len(datasets.train), len(datasets.train) + len(datasets.val)
    numbers = np.sort(permutation(0, 0, total)[:most]) if total > most else np.arange(total)
    scanned = _scan(datasets, numbers, threads, progress)
    is_read = scanned.labels >= 0
    hashes, is_flat = _hash(scanned.small[is_read])
    numbers, labels = numbers[is_read], scanned.labels[is_read]
    roots = _join(
        _pairs_of_equal(scanned.digests[is_read]),
        _pairs_of_copies(hashes, scanned.small[is_read], is_flat),
        len(labels),
    )
    groups, leaked = [], 0
    for members in _groups_of(roots):
        chosen = _choose_pair(numbers[members], labels[members], num_train)
        first, second = (_refer(datasets, int(numbers[members[at]]), int(labels[members[at]])) for at in chosen)
        in_val = numbers[members] >= num_train
        is_leak = bool(in_val.any() and not in_val.all())
        leaked += int(in_val.sum()) if is_leak else 0
        one, two = (scanned.digests[is_read][members[at]] for at in chosen)
        is_exact, in_two = bool((one == two).all()), bool((labels[members] != labels[members[0]]).any())
        groups.append(CopyGroup(first, second, len(members), is_exact, in_two, is_leak))
    groups.sort(key=lambda group: (not (group.in_two_classes and group.in_both_splits), not group.in_both_splits,
                                   not group.in_two_classes, group.first.split, group.first.index))  # fmt: skip
    return DuplicateScan(len(scanned.labels), total, tuple(groups), leaked, int(is_flat.sum()), tuple(scanned.bad))


@dataclass(frozen=True)
class _Scanned:
    """Gray images uint8 [N, 32, 32], digests of the content uint64 [N, 2], and labels int64 [N], -1 if unreadable."""

    small: NDArray[np.uint8]
    digests: NDArray[np.uint64]
    labels: NDArray[np.int64]
    bad: list[BadImage]


def _scan(
    datasets: Datasets, numbers: NDArray[np.int64], threads: int, progress: Callable[[int, int], None]
) -> _Scanned:
    count = len(numbers)
    found = _Scanned(
        np.zeros((count, _SIDE, _SIDE), np.uint8), np.zeros((count, 2), np.uint64), np.full(count, -1, np.int64), []
    )

    def read(at: int) -> BadImage | None:
        source, _, index = _locate(datasets, int(numbers[at]))
        try:
            content, label = source.read(index)
            found.small[at] = _shrink(content, source.info.pixel_format, source.name_of(index))
        except DataError as error:
            return BadImage(index, source.name_of(index), get_reason(error))
        pixels = content if isinstance(content, bytes) else np.ascontiguousarray(content).data
        digest = hashlib.blake2b(pixels, digest_size=16)
        found.digests[at] = np.frombuffer(digest.digest(), np.uint64)
        found.labels[at] = label
        return None

    with ThreadPoolExecutor(threads, thread_name_prefix="check") as pool:
        for start in range(0, count, _CHUNK):
            end = min(start + _CHUNK, count)
            # In the order of the images, whichever thread is first.
            found.bad.extend(bad for bad in pool.map(read, range(start, end)) if bad is not None)
            progress(end, count)
    return found


def _shrink(content: bytes | PixelArray, form: PixelFormat, name: str) -> NDArray[np.uint8]:
    """Return an image in gray, uint8 [32, 32]."""
    if isinstance(content, bytes) and form.is_photo and not content.startswith(NPY_SIGNATURE):
        image = decode(content, channels=1, name=name, smallest=_SMALLEST)
    else:
        gray = decode_pixels(content, form, name=name).astype(np.float32).mean(axis=2)
        low, high = (0.0, 255.0) if form.pixels == "uint8" else (float(gray.min()), float(gray.max()))
        image = Image.fromarray(255.0 / max(high - low, 1e-9) * (gray - low))
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)).astype(np.uint8)


def _hash(small: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the hash of each image, uint64 [N], and whether it is flat."""
    from scipy.fft import dctn  # type: ignore[import-untyped]  # importing it takes a tenth of a second

    hashes, flat = [np.zeros(0, np.uint64)], [np.zeros(0, np.bool_)]
    for start in range(0, len(small), _CHUNK):
        pixels = small[start : start + _CHUNK].astype(np.float32)
        low = dctn(pixels, axes=(1, 2))[:, 1 : _LOW + 1, 1 : _LOW + 1].reshape(len(pixels), -1)
        hashes.append(np.packbits(low > np.median(low, axis=1, keepdims=True), axis=1).view(np.uint64)[:, 0])
        flat.append(pixels.std(axis=(1, 2)) < _MIN_CONTRAST)
    return np.concatenate(hashes), np.concatenate(flat)


Pairs = NDArray[np.int64]
"""Positions of pairs of images, [P, 2]."""


def _pairs_of_equal(digests: NDArray[np.uint64]) -> Pairs:
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    same = (digests[order][1:] == digests[order][:-1]).all(axis=1)
    return np.stack([order[:-1][same], order[1:][same]], axis=1)


def _pairs_of_copies(hashes: NDArray[np.uint64], small: NDArray[np.uint8], is_flat: NDArray[np.bool_]) -> Pairs:
    """Return the pairs that are near by hash and by pixels.

    Hashes that differ in at most d bits are equal in one of d + 1 bands of bits (multi-index hashing, Norouzi et al.
    2012, arXiv 1307.2982), so only those in the same bucket of a band are compared.
    """
    where = np.flatnonzero(~is_flat)
    found = [np.zeros((0, 2), np.int64)]
    edges = np.linspace(0, 64, MAX_DISTANCE + 2).astype(int)
    for low, high in pairwise(edges.tolist()):
        keys = (hashes[where] >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.r_[True, keys[order][1:] != keys[order][:-1]])
        for bucket in np.split(where[order], starts[1:]):
            for start in range(0, len(bucket) if len(bucket) > 1 else 0, _MAX_GROUP):
                rows = bucket[start : start + _MAX_GROUP]
                near = _count_bits(hashes[rows, None] ^ hashes[None, bucket]) <= MAX_DISTANCE
                one, two = np.nonzero(near)
                pairs = np.stack([rows[one], bucket[two]], axis=1)
                found.append(pairs[pairs[:, 0] < pairs[:, 1]])
    pairs = np.unique(np.concatenate(found), axis=0)
    keep = [_are_near(small, each) for each in np.array_split(pairs, len(pairs) // _MAX_GROUP + 1)]
    return pairs[np.concatenate(keep)]


def _count_bits(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return the number of bits set, of the shape of `values`."""
    if hasattr(np, "bitwise_count"):  # since NumPy 2.0
        return np.asarray(np.bitwise_count(values))
    return np.asarray(np.unpackbits(values[..., None].view(np.uint8), axis=-1).sum(axis=-1, dtype=np.uint8))


def _are_near(small: NDArray[np.uint8], pairs: Pairs) -> NDArray[np.bool_]:
    one, two = (_normalize(small[pairs[:, side]]) for side in (0, 1))
    return np.asarray(np.square(one - two).mean(axis=1) <= MAX_DIFFERENCE**2)


def _normalize(small: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return images [N, 32, 32] at half their size, float32 [N, 256], of mean 0 and standard deviation 1."""
    # At half the size, fine detail that a copy loses counts less; and a copy may be brighter.
    half = small.reshape(len(small), _SIDE // 2, 2, _SIDE // 2, 2).mean(axis=(2, 4), dtype=np.float32)
    rows = half.reshape(len(small), (_SIDE // 2) ** 2)
    rows -= rows.mean(axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(rows.std(axis=1, keepdims=True), 1e-3))


def _join(equal: Pairs, near: Pairs, count: int) -> NDArray[np.int64]:
    """Return the number of the group of each of `count` images."""
    from scipy.sparse import coo_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

    pairs = np.concatenate([equal, near])
    graph = coo_array((np.ones(len(pairs), np.int8), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    return np.asarray(connected_components(graph, directed=False)[1], dtype=np.int64)


def _groups_of(roots: NDArray[np.int64]) -> Sequence[NDArray[np.int64]]:
    """Return the positions of the images of each group of two or more, ascending."""
    order = np.argsort(roots, kind="stable")
    starts = np.flatnonzero(np.r_[True, roots[order][1:] != roots[order][:-1]])
    return [group for group in np.split(order, starts[1:]) if len(group) > 1]


def _choose_pair(numbers: NDArray[np.int64], labels: NDArray[np.int64], num_train: int) -> tuple[int, int]:
    """Return the first image of a group, and one with another label and split, else either, else any."""
    differs = (labels != labels[0]) * 1 + ((numbers >= num_train) != (numbers[0] >= num_train)) * 1
    return 0, int(differs[1:].argmax()) + 1


def _locate(datasets: Datasets, number: int) -> tuple[Source, Split, int]:
    num_train = len(datasets.train)
    if number < num_train:
        return datasets.train, "train", number
    return datasets.val, "val", number - num_train


def _refer(datasets: Datasets, number: int, label: int) -> ImageRef:
    source, split, index = _locate(datasets, number)
    return ImageRef(split, index, source.name_of(index), label)
