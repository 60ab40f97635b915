"""Find near duplicates: images that are the same but for a crop, a flip, a change of size or of compression."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.inference.probe.classify import Floats, top_neighbors, unit_rows

_SIDE: Final = 24
"""Side of the windows that are compared, in pixels."""
_SCALES: Final = ((1.0, 1), (0.95, 3), (0.9, 5))
"""Sides of windows as shares of an image's, and positions along each side: for crops of 80 % of the area and more."""
_NUM_CANDIDATES: Final = 5
_CHUNK: Final = 256
_THRESHOLD: Final = 0.92
_OUTLIER: Final = 0.25
"""A pair is near duplicates from this correlation on, if its distance from 1 is also below this share of the distance
of an image's median candidate: all images of some datasets are alike. benchmarks/probe.py measures both on CIFAR-10 and
photographs: they find over 95 % of crops, flips and re-compressed images, and flag under 1 % of the others."""


def find_near_duplicates(features: Floats, thumbnails: NDArray[np.uint8]) -> tuple[NDArray[np.int64], Floats]:
    """Return pairs of images, int64 [P, 2] with the lower number first, and their similarities, highest first.

    `features` are float32 [N, D] and `thumbnails` gray, uint8 [N, S, S]. A similarity is the largest correlation of
    both thumbnails over crops of one of them and mirror images.
    """
    pairs = _find_candidates(features, thumbnails)
    if not len(pairs):
        return pairs, np.empty(0, dtype=np.float32)
    scores = _match_thumbnails(thumbnails, pairs)
    images, of_images = pairs.reshape(-1), scores.repeat(2)
    order = np.argsort(images, kind="stable")
    groups = np.split(of_images[order], np.flatnonzero(np.diff(images[order])) + 1)
    medians = np.zeros(len(features))
    medians[np.unique(images)] = [np.median(group) for group in groups]
    is_outlier = (1 - scores[:, None] <= _OUTLIER * (1 - medians[pairs])).all(axis=1)
    chosen = np.flatnonzero((scores >= _THRESHOLD) & is_outlier)
    chosen = chosen[np.argsort(-scores[chosen], kind="stable")]
    return pairs[chosen], scores[chosen]


def _find_candidates(features: Floats, thumbnails: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return pairs to compare, int64 [P, 2]: the nearest neighbors by features, thumbnails and mirrored thumbnails."""
    # Either may miss a duplicate: features of a weak model, and thumbnails of a crop.
    pixels, units = torch.from_numpy(thumbnails), unit_rows(features)
    straight, mirrored = (_centered(each).flatten(1).numpy() for each in (pixels, pixels.flip(2)))
    pairs: set[tuple[int, int]] = set()
    for queries, references in ((units, units), (straight, straight), (mirrored, straight)):
        _, numbers = top_neighbors(queries, references, min(_NUM_CANDIDATES + 1, len(references)))
        for first, row in enumerate(numbers.tolist()):
            pairs.update((min(first, each), max(first, each)) for each in row if each != first)
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


def _match_thumbnails(thumbnails: NDArray[np.uint8], pairs: NDArray[np.int64]) -> Floats:
    """Return the similarity of each pair, float32 [P]."""
    images = torch.from_numpy(thumbnails).float()[:, None]
    whole = _shrink(images)
    targets = torch.stack([whole, whole.flip(2)], dim=1).flatten(2)
    scores = torch.full((len(pairs),), -1.0)
    # Both directions: crops of the first image in the second, and the reverse.
    cropped, others = torch.from_numpy(np.concatenate([pairs, pairs[:, ::-1]])).unbind(1)
    numbers = torch.arange(len(pairs)).repeat(2)
    order = torch.argsort(cropped, stable=True)
    starts = torch.searchsorted(cropped[order], torch.arange(len(images) + 1)).tolist()
    for start in range(0, len(images), _CHUNK):
        for offset, windows in enumerate(_crop_windows(images[start : start + _CHUNK])):
            rows = order[starts[start + offset] : starts[start + offset + 1]]
            best = (windows @ targets[others[rows]].transpose(1, 2)).amax(dim=(1, 2))
            scores[numbers[rows]] = torch.maximum(scores[numbers[rows]], best)
    return scores.numpy()


def _shrink(images: Tensor) -> Tensor:
    """Return whole images [N, 1, S, S], float32 [N, 24, 24], centered and of length 1."""
    return _centered(functional.interpolate(images, (_SIDE, _SIDE), mode="area")[:, 0])


def _crop_windows(images: Tensor) -> Tensor:
    """Return crops of images [N, 1, S, S], float32 [N, W, 576], centered and of length 1."""
    windows = [_shrink(images).flatten(1)]  # of whole images, as of those in which windows are looked for
    for scale, num_positions in _SCALES:
        offsets = torch.linspace(scale - 1, 1 - scale, num_positions).tolist()
        for top, left in ((top, left) for top in offsets for left in offsets):
            affine = torch.tensor([[scale, 0.0, left], [0.0, scale, top]]).expand(len(images), 2, 3)
            grid = functional.affine_grid(affine, [len(images), 1, _SIDE, _SIDE], align_corners=False)
            windows.append(_centered(functional.grid_sample(images, grid, align_corners=False)[:, 0]).flatten(1))
    return torch.stack(windows, dim=1)


def _centered(images: Tensor) -> Tensor:
    """Return images [N, S, S], minus their means, each of length 1, float32: their products are correlations."""
    centered = images.float() - images.float().mean(dim=(1, 2), keepdim=True)
    lengths: Tensor = torch.linalg.vector_norm(centered, dim=(1, 2), keepdim=True)
    return centered / lengths.clamp_min(1e-6)
