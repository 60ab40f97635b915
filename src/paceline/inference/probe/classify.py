"""Classify features by a linear probe and by nearest neighbors, with cross-validation."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.random import permutation

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
NUM_FOLDS: Final = 5
NUM_NEIGHBORS: Final = 20
_TEMPERATURE: Final = 0.07
"""Both of DINO's k-NN classifier (Caron et al. 2021, arXiv 2104.14294)."""
_MAX_DIMENSIONS: Final = 256
_PENALTIES: Final = (1e-3, 1e-2, 1e-1)
"""Inverse strengths C of the linear probe's L2 penalty that are tried, for standardized features."""
_MAX_ITERATIONS: Final = 300
_NUM_TESTED: Final = 1000
_CHUNK: Final = 1024


def assign_folds(labels: Labels, seed: int, num_folds: int = NUM_FOLDS) -> NDArray[np.int64]:
    """Return the fold of each sample, int64 [N], so that the samples of each class are spread evenly over folds."""
    order = permutation(seed, 0, len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    folds = np.empty(len(labels), dtype=np.int64)
    folds[by_class] = np.arange(len(labels)) % num_folds
    return folds


def unit_rows(features: Floats) -> Floats:
    """Return features with rows of length 1, as k-NN compares them."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(norms, np.finfo(np.float32).tiny))


def top_neighbors(queries: Floats, references: Floats, k: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the `k` largest cosines of each query, float32 [N, k] in descending order, and the references' numbers.

    All rows have length 1. Exact, by matrix products.
    """
    parts = [torch.topk(torch.from_numpy(part @ references.T), k) for part in np.split(queries, _cuts(len(queries)))]
    values, numbers = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    return values, numbers


def _cuts(length: int) -> list[int]:
    return list(range(_CHUNK, length, _CHUNK))


def knn_probabilities(queries: Floats, references: Floats, labels: Labels, num_classes: int) -> NDArray[np.float64]:
    """Return float64 [N, num_classes]: votes of the nearest references, weighted by exp(cosine / 0.07) as in DINO."""
    cosines, numbers = top_neighbors(queries, references, min(NUM_NEIGHBORS, len(references)))
    weights = np.exp((cosines - cosines[:, :1]) / _TEMPERATURE, dtype=np.float64)
    votes = np.zeros((len(queries), num_classes))
    np.add.at(votes, (np.arange(len(queries))[:, None], labels[numbers]), weights)
    return np.asarray(votes / votes.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class LinearProbe:
    """Multinomial logistic regression on `num_classes` classes with L2 penalty 1 / `c`, of standardized features."""

    num_classes: int
    c: float

    def predict(self, train: Floats, labels: Labels, queries: Floats) -> NDArray[np.float64]:
        """Fit to `train` and return the probabilities of `queries`, float64 [N, num_classes]."""
        from sklearn.linear_model import LogisticRegression

        probabilities = np.zeros((len(queries), self.num_classes))
        present = np.unique(labels)
        if len(present) == 1:  # of a small subset
            probabilities[:, present] = 1
            return probabilities
        model = LogisticRegression(C=self.c, max_iter=_MAX_ITERATIONS, tol=1e-3)
        model.fit(train, labels)
        probabilities[:, present] = model.predict_proba(queries)
        return probabilities

    def cross_validate(self, features: Floats, labels: Labels, folds: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64 [N, num_classes]: each fold is classified by the probe of the others, -1 is left out (0)."""
        probabilities = np.zeros((len(labels), self.num_classes))
        for fold in np.unique(folds[folds >= 0]):
            is_tested = folds == fold
            fitted = self.predict(features[~is_tested], labels[~is_tested], features[is_tested])
            probabilities[is_tested] = fitted
        return probabilities


def build_probe(features: Floats, labels: Labels, folds: NDArray[np.int64], num_classes: int) -> LinearProbe:
    """Return the linear probe with the strongest penalty whose cross-entropy is within a standard error of the least.

    It is measured on the first folds of 1,000 images (Hastie et al. 2009, The Elements of Statistical Learning, 7.10).
    """
    is_tested = folds * len(folds) < _NUM_TESTED * NUM_FOLDS
    probes = [LinearProbe(num_classes, c) for c in _PENALTIES]
    losses = [
        cross_entropies(each.cross_validate(features, labels, np.where(is_tested, folds, -1)), labels)[is_tested]
        for each in probes
    ]
    best = min(losses, key=np.mean)
    highest = best.mean() + best.std() / np.sqrt(len(best))
    return next(probe for probe, each in zip(probes, losses, strict=True) if each.mean() <= highest)


def cross_entropies(probabilities: NDArray[np.float64], labels: Labels) -> NDArray[np.float64]:
    """Return the cross-entropy of each row of probabilities [N, num_classes], float64 [N]."""
    return np.asarray(-np.log(probabilities[np.arange(len(labels)), labels] + 1e-12))


def standardize(train: Floats, *others: Floats) -> list[Floats]:
    """Return all features with mean 0 and standard deviation 1 on `train`, on at most 256 principal components."""
    mean, std = train.mean(axis=0, dtype=np.float64), train.std(axis=0, dtype=np.float64)
    scaled = [((each - mean) / np.where(std > 0, std, 1)).astype(np.float32) for each in (train, *others)]
    if train.shape[1] <= _MAX_DIMENSIONS:
        return scaled
    # The time of a fit grows with the dimensions; the components left out vary least.
    covariance = scaled[0].T @ scaled[0] / len(train)
    components = np.linalg.eigh(covariance)[1][:, ::-1][:, :_MAX_DIMENSIONS]
    return [each @ components.astype(np.float32) for each in scaled]
