"""Extrapolate the accuracy of a linear probe to more labeled images."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.random import Stream, permutation, uniform
from paceline.core.statistics import CONFIDENCE, Interval, wilson_interval
from paceline.inference.probe.classify import Floats, Labels, LinearProbe

_Floats = NDArray[np.float64]
_SEED: Final = 0
_SHARES: Final = (0.05, 0.1, 0.2, 0.4)
"""Of the training images of a fold; all of them are the last point, which cross-validation has measured."""
_NUM_DRAWS: Final = 100
_MIN_IMAGES_PER_CLASS: Final = 2


def measure_curve(
    probe: LinearProbe, features: Floats, labels: Labels, folds: NDArray[np.int64], is_correct: NDArray[np.bool_]
) -> dict[int, NDArray[np.bool_]]:
    """Return which samples are classified correctly, bool [N], by the mean number of training samples.

    `is_correct` are those of cross-validation with all training samples. Sizes with fewer than two images per class are
    left out.
    """
    num_folds = len(np.unique(folds))
    largest = len(labels) * (num_folds - 1) // num_folds
    sizes = [round(share * largest) for share in _SHARES]
    curve = {}
    for size in (size for size in sizes if size >= _MIN_IMAGES_PER_CLASS * probe.num_classes):
        correct = np.empty(len(labels), dtype=bool)
        for fold in np.unique(folds):
            train, tested = np.flatnonzero(folds != fold), folds == fold
            subset = train[permutation(size, int(fold), len(train))[:size]]
            shares = probe.predict(features[subset], labels[subset], features[tested])
            correct[tested] = shares.argmax(axis=1) == labels[tested]
        curve[size] = correct
    return curve | {largest: is_correct}


def extrapolate(curve: dict[int, NDArray[np.bool_]], sizes: Sequence[int]) -> list[Interval] | None:
    """Return the accuracy that a power law through `curve` reaches with each of `sizes` training samples.

    The law is error = a + b * n ** -c with a >= 0 (Hestness et al. 2017, arXiv 1712.00409); the intervals are those of
    a bootstrap of the images. None with fewer than four points.
    """
    if len(curve) < 4:
        return None
    ratios = np.array(list(curve), dtype=np.float64) / max(curve)
    wanted = np.array(sizes, dtype=np.float64) / max(curve)
    correct = np.stack(list(curve.values()))
    num = correct.shape[1]
    draws = np.floor(uniform(_SEED, Stream.SAMPLE, 0, np.arange(_NUM_DRAWS), num) * num).astype(np.int64)
    values = _extrapolate_law(ratios, 1 - correct.mean(axis=1), wanted)
    sampled = [_extrapolate_law(ratios, 1 - correct[:, draw].mean(axis=1), wanted) for draw in draws]
    tail = (1 - CONFIDENCE) / 2
    bounds = np.quantile(sampled, [tail, 1 - tail], axis=0)
    return [
        Interval(value=value, low=min(low, value), high=max(high, value), n=num)
        for value, low, high in zip(values.tolist(), *bounds.tolist(), strict=True)
    ]


def _extrapolate_law(ratios: _Floats, errors: _Floats, wanted: _Floats) -> _Floats:
    """Return the accuracies at `wanted` of the power law that fits `errors` at `ratios` best."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    def residuals(law: _Floats) -> _Floats:
        floor, scale, power = law
        return np.asarray(floor + scale * ratios**-power - errors)

    start = (errors[-1] / 2, errors[-1] / 2, 0.5)
    floor, scale, power = least_squares(residuals, start, bounds=([0, 0, 0], [1, 1, 2])).x
    return np.asarray(1 - floor - scale * wanted**-power)


def curve_points(curve: dict[int, NDArray[np.bool_]]) -> list[tuple[int, Interval]]:
    """Return the accuracy of each size with Wilson's interval."""
    return [(size, wilson_interval(int(correct.sum()), len(correct))) for size, correct in curve.items()]
