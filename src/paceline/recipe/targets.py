"""Check that loss and metrics of a recipe fit the labels of its dataset."""

from typing import TYPE_CHECKING

from paceline.core.errors import RecipeError
from paceline.core.metric import ALWAYS, ONLY_MULTI_LABEL, top_k
from paceline.recipe.schema.train import CrossEntropyLoss, FocalLoss, LossSection, OwnLoss, Train

if TYPE_CHECKING:
    from paceline.core.dataset import DatasetInfo  # imports numpy, before the first line of a command


def is_multi_label(loss: LossSection, info: "DatasetInfo") -> bool:
    """Return whether a model gets a probability for each class on its own, by the sigmoid of its logit.

    Otherwise the probabilities of its classes sum to 1, by softmax. Your own loss is for several labels unless all
    targets sum to 1.
    """
    if info.targets is None or _uses_softmax(loss):
        return False
    return not (isinstance(loss, OwnLoss) and info.targets.are_distributions)


def check_targets(train: Train, info: "DatasetInfo") -> None:
    """Raise `RecipeError` if the loss, or a setting that depends on it, does not fit the targets of the dataset."""
    targets, name = info.targets, train.loss.name
    if is_multi_label(train.loss, info):
        return _check_multi_label(train)
    if targets is not None and not targets.are_distributions and not targets.has_shares:
        counts = targets.sums
        worst = f"{counts.max():.0f} labels" if counts.max() > 1 else "no label"
        raise RecipeError(
            f"train.loss: {name} expects one label per image, and an image of {info.name} has {worst} "
            "(set train.loss=bce)"
        )
    if targets is not None and not targets.are_distributions:
        furthest = max(targets.sums.tolist(), key=lambda total: abs(total - 1))
        raise RecipeError(
            f"train.loss: {name} expects soft labels with a sum of 1, and a sum in {info.name} is {furthest:.4g} "
            "(correct the shares, or set train.loss=bce)"
        )
    if train.is_set("label_threshold"):
        raise RecipeError(
            f"train.label_threshold: {train.label_threshold:g} has no effect, as images have one label (leave it out)"
        )
    for metric in train.extra_metrics:
        if metric in ONLY_MULTI_LABEL:
            raise RecipeError(f"{_field_of(metric, train)}: {metric} is for several labels per image (leave it out)")
    return None


def _uses_softmax(loss: LossSection) -> bool:
    return isinstance(loss, CrossEntropyLoss) or (isinstance(loss, FocalLoss) and loss.activation == "softmax")


def _field_of(metric: str, train: Train) -> str:
    return "train.metrics" if metric in train.metrics else "train.monitor"


def _check_multi_label(train: Train) -> None:
    names = [*train.metrics, *(() if train.monitor == "auto" else (train.monitor,))]
    for metric in names:
        if top_k(metric) or metric in set(ALWAYS) - {"loss"}:
            raise RecipeError(
                f"{_field_of(metric, train)}: {metric} is for one label per image (leave it out, or use ap)"
            )
    unusable = {
        "stop": (train.stop != "off", "a target for top-1"),
        "accuracy": (train.accuracy == "on", "top-1 and top-5"),
        "class_weights": (train.class_weights != "off", "a weight for the one label of an image"),
        "distill": (train.distill != "off", "probabilities that sum to 1"),
    }
    for field, (is_on, meaning) in unusable.items():
        if is_on:
            value = getattr(train, field)
            shown = value if isinstance(value, str) else "it"
            raise RecipeError(
                f"train.{field}: {shown} needs {meaning}, and images have several labels (set train.{field}=off)"
            )
