"""The result of `paceline probe`, as it is written to `probe.json`."""

from typing import Literal

from paceline.core.json_file import MeasuredFloat, ResultModel
from paceline.core.statistics import Interval


class ProbedImage(ResultModel):
    """An image of the dataset: its split, its number there, its name and its label."""

    split: str
    index: int
    name: str
    label: str


class SuspectLabel(ResultModel):
    """An image whose label is likely wrong: the linear probe's probability of it, and of the class it suggests."""

    image: ProbedImage
    confidence: MeasuredFloat
    suggested: str
    suggested_confidence: MeasuredFloat
    knn_agrees: bool  # the nearest neighbors vote for the suggested class


class DuplicatePair(ResultModel):
    """Two images that are near duplicates, and the correlation of their thumbnails."""

    first: ProbedImage
    second: ProbedImage
    similarity: MeasuredFloat


class UnusualImage(ResultModel):
    """An image far from the training images: 1 - cosine to the k-th nearest."""

    image: ProbedImage
    distance: MeasuredFloat


class CurvePoint(ResultModel):
    """Accuracy of a linear probe of `images` training images."""

    images: int
    accuracy: Interval


class ProbeResult(ResultModel):
    """What the features of a frozen model say of a dataset; lists have the first 100 entries of its tables."""

    schema_version: Literal[1] = 1
    source: str
    weights: str
    train_images: int  # probed
    val_images: int
    total_train: int
    total_val: int
    classes: int
    dimensions: int
    stage: str = ""  # module whose output the linear probe classifies; "" for the input of the model's classifier
    is_cached: bool
    cache: str = ""  # folder; "" without one
    features_s: MeasuredFloat
    answers_s: MeasuredFloat
    linear: Interval  # cross-validated on the training images
    knn: Interval
    linear_val: Interval | None = None
    knn_val: Interval | None = None
    num_suspects: int
    suspects: tuple[SuspectLabel, ...]
    num_duplicates: int  # pairs within a split
    num_leaks: int  # pairs of a training and a validation image
    duplicates: tuple[DuplicatePair, ...]
    curve: tuple[CurvePoint, ...]
    current: Interval | None = None  # of a linear probe of all training images, extrapolated
    doubled: Interval | None = None  # of twice as many
    threshold: MeasuredFloat | None = None  # distance above which 5 % of held-out images are
    unusual: tuple[UnusualImage, ...]
    reference: str = ""  # file of the run for predict --reject
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
