"""Reject images unlike the training images of a run, by the distance of their features to stored ones.

The distance is 1 - cosine to the k-th nearest reference (Sun et al. 2022, arXiv 2204.06507). docs/how-to/probe.md
compares it with the energy of logits.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.random import permutation
from paceline.core.run_dir import RunDir
from paceline.inference.classifier import Classifier
from paceline.inference.tensor_file import read_tensors, write_tensors
from paceline.models.features import find_feature_layer
from paceline.training.checkpoint import weights_digest

NUM_NEIGHBORS: Final = 5
MAX_REFERENCES: Final = 2000
DEFAULT_RATE: Final = 0.05
_VERSION: Final = "1"


@dataclass(frozen=True)
class Reference:
    """Features of training images, float32 [R, D] with rows of length 1, and ascending distances of held-out images.

    `checkpoint` is the digest of the weights that the features are of.
    """

    features: Tensor
    val_distances: Tensor
    checkpoint: str = ""

    @classmethod
    def choose(
        cls, train: NDArray[np.float32], val: NDArray[np.float32], checkpoint: str
    ) -> tuple[Self, NDArray[np.int64]]:
        """Return a reference of up to 2,000 rows of `train`, and their numbers; `val` are the held-out features.

        Without any, the training images that are no references are held out.
        """
        numbers = np.sort(permutation(0, 0, len(train))[: min(MAX_REFERENCES, max(1, len(train) * 4 // 5))])
        # As they are stored: the threshold then holds exactly.
        reference = cls(_units(train[numbers]).half().float(), torch.empty(0), checkpoint)
        val_features = val if len(val) else np.delete(train, numbers, axis=0)
        return cls(reference.features, reference.distances(val_features).sort().values, checkpoint), numbers

    def distances(self, features: NDArray[np.float32] | Tensor, *, is_reference: bool = False) -> Tensor:
        """Return the distance of each row of `features`, float32 [N, D], to its fifth nearest reference: float32 [N].

        If the rows are references, that is the fifth nearest other one.
        """
        k = min(NUM_NEIGHBORS + is_reference, len(self.features))
        parts = torch.split(torch.as_tensor(features), 1024)
        nearest = [(_units(part) @ self.features.T).topk(k, dim=1).values[:, -1] for part in parts]
        return 1 - torch.cat(nearest) if nearest else torch.empty(0)

    def quantile(self, rate: float) -> float | None:
        """Return the distance above which a new image like the held-out ones is with probability at most `rate`.

        None if there are too few held-out images for that rate.
        """
        # The conformal quantile, which holds for any distribution: Vovk et al. 2005, Algorithmic Learning.
        rank = math.ceil((len(self.val_distances) + 1) * (1 - rate))
        return float(self.val_distances[rank - 1]) if rank <= len(self.val_distances) else None

    def threshold(self, rate: float) -> float:
        """Return `quantile(rate)`. Raise `RecipeError` if there is none."""
        found = self.quantile(rate)
        if found is None:
            num = len(self.val_distances)
            raise RecipeError(
                f"--reject: {rate:g} needs at least {math.ceil(1 / rate) - 1:,} held-out images, and paceline probe "
                f"had {num:,} (reject at least {1 / (num + 1):.2g})"
            )
        return found

    def write(self, path: Path) -> None:
        """Write the reference, with features in float16. Raise `OSError`."""
        tensors = {"features": self.features.half(), "val_distances": self.val_distances}
        write_tensors(path, tensors, {"version": _VERSION, "checkpoint": self.checkpoint})


def read_reference(run: RunDir, checkpoint: str) -> Reference:
    """Return the reference of `run`, of the weights with digest `checkpoint`.

    Raise `RecipeError` if there is none, or if it is of other weights, and `PacelineError` if it is damaged.
    """
    path = run.reference
    fix = f"run `paceline probe {run.path}`"
    try:
        tensors, facts = read_tensors(path)
        found = Reference(tensors["features"].float(), tensors["val_distances"], facts["checkpoint"])
    except FileNotFoundError:
        raise RecipeError(f"--reject: {path} does not exist ({fix})") from None
    except (OSError, ValueError, KeyError) as error:
        raise PacelineError(f"{path}: cannot be read: {error} ({fix})") from None
    if found.checkpoint != checkpoint:
        raise RecipeError(
            f"--reject: {path} is of other weights than this checkpoint ({fix} with the same --checkpoint)"
        )
    return found


@dataclass(frozen=True)
class Rejector:
    """Tell which images that a model classifies are unlike those that it was trained on.

    `layer` of the model has the features as its input; distances above `threshold` are rejected.
    """

    reference: Reference
    threshold: float
    layer: str

    @classmethod
    def load(cls, classifier: Classifier, rate: float) -> Self:
        """Return the rejector of a run that rejects the share `rate` of images like the held-out ones.

        Raise `RecipeError` as `read_reference` and `Reference.threshold` do.
        """
        layer = find_feature_layer(classifier.model, len(classifier.classes), classifier.recipe.model.name)
        reference = read_reference(RunDir(classifier.run), weights_digest(classifier.checkpoint))
        return cls(reference, reference.threshold(rate), layer)


def _units(features: NDArray[np.float32] | Tensor) -> Tensor:
    return torch.nn.functional.normalize(torch.as_tensor(features).float(), dim=1)
