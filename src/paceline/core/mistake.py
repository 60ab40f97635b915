"""A misclassified image. It knows no tensors and no pixels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MisclassifiedImage:
    """Sample `index` of a split, of class `label`, which a model took for class `predicted`.

    `confidence` is the model's share for the predicted class, 0 to 1, and `loss` the cross-entropy of the true one.
    """

    index: int
    label: int
    predicted: int
    confidence: float
    loss: float
