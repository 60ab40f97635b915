"""Metrics of the scores of all images, such as AUROC: gathered on rank 0, and computed by scikit-learn or plugins.

Scores are float32 probabilities, which take 4 bytes per image and class on rank 0, and three times that while they are
gathered: 0.6 GB for the 50,000 images and 1,000 classes of ImageNet.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.dataset import LABEL_SHARE
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.metric import COUNTED, MINIMIZED, SCORED, Monitor, class_averages, top_k, weighted_mean
from paceline.core.results import ClassCount
from paceline.parallel.strategy import Strategy
from paceline.recipe.plugins import METRIC, PluginRef, describe_error, plugins_of, unwrap_partial
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_plugin_name

OwnMetric = Callable[[Tensor, Tensor], float]
"""A metric of scores float32 [N, K], probabilities, and labels int64 [N] or targets float32 [N, K], in host memory."""


class ImageScores(NamedTuple):
    """Scores of N images in the order of their index: probabilities float32 [N, K], and labels int64 [N].

    With several labels per image, labels are targets float32 [N, K]. `indices` are int64 [N].
    """

    scores: Tensor
    labels: Tensor
    indices: Tensor | None = None


def softmax(logits: Tensor) -> Tensor:
    """Return the probabilities of logits [N, K]."""
    return logits.softmax(dim=1)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits [N, K]."""
    return logits.log_softmax(dim=1)


@dataclass
class ScoreCollector:
    """Collect the scores of this rank's images in host memory: `to_scores` of their logits, float64 [N, K].

    With `targets`, float32 [T, K] in host memory, images have several labels.
    """

    to_scores: Callable[[Tensor], Tensor] = softmax
    targets: Tensor | None = None
    _scores: list[Tensor] = field(default_factory=list)
    _keys: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, labels: Tensor, indices: NDArray[np.int64]) -> None:
        """Add logits float [N, K] and labels int64 [N] of the images `indices` int64 [N]. Waits for the device."""
        self._scores.append(self.to_scores(logits.double()).float().cpu())
        self._keys.append(torch.stack([torch.from_numpy(indices), labels.cpu()], dim=1))

    def gather(self, strategy: Strategy, num_classes: int, device: torch.device) -> ImageScores | None:
        """Return the scores of all ranks on rank 0, and None on the others. Collective, through `device`."""
        scores, keys = torch.cat([torch.empty(0, num_classes), *self._scores]), torch.cat([_NO_KEYS, *self._keys])
        self._scores.clear()
        counts = strategy.all_gather(torch.tensor([len(keys)], device=device)).flatten().tolist()
        all_scores = _gather_rows(scores, counts, strategy, device)
        del scores
        all_keys = _gather_rows(keys, counts, strategy, device)
        if all_scores is None or all_keys is None:
            return None
        order = all_keys[:, 0].argsort()
        indices, labels = all_keys[order].unbind(1)
        return ImageScores(all_scores[order], labels if self.targets is None else self.targets[labels], indices)


_NO_KEYS = torch.empty(0, 2, dtype=torch.int64)


def _gather_rows(rows: Tensor, counts: Sequence[int], strategy: Strategy, device: torch.device) -> Tensor | None:
    """Return the `rows` [N, C] of all ranks, which have `counts` of them, on rank 0; None on the others."""
    padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), rows.shape[1])])
    gathered = strategy.gather_on_rank_0(padded.flatten(), device)
    if gathered is None:
        return None
    parts = gathered.view(len(counts), max(counts), rows.shape[1])
    return torch.cat([part[:number] for part, number in zip(parts, counts, strict=True)])


def do_nothing() -> None:
    """Do nothing."""


def add_class_scores(
    classes: Sequence[ClassCount], images: ImageScores, on_progress: Callable[[], None] = do_nothing
) -> list[ClassCount]:
    """Return `classes` with AUROC and average precision of each class against all others, by scikit-learn.

    They are NaN for a class without images or with all of them, and if a score is NaN. `on_progress` is called after
    each class.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    scores, labels = images.scores.numpy(), images.labels.numpy()
    is_finite, scored = bool(np.isfinite(scores).all()), []
    for number, each in enumerate(classes):
        auroc = ap = math.nan
        if is_finite and 0 < each.images < len(labels):
            truth = labels == number if labels.ndim == 1 else labels[:, number] >= LABEL_SHARE
            score = scores[:, number]
            auroc, ap = float(roc_auc_score(truth, score)), float(average_precision_score(truth, score))
        scored.append(replace(each, auroc=auroc, ap=ap))
        on_progress()
    return scored


@dataclass(frozen=True)
class ExtraMetrics:
    """The metrics of an evaluation that a recipe names: by their names, those of `own` code by their import paths."""

    names: tuple[str, ...] = ()
    own: Mapping[str, OwnMetric] = field(default_factory=dict)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """Return those of `train.metrics` and `train.monitor`. Raise `RecipeError` for plugins that cannot be used."""
        own = {each.name: each.load() for each in plugins_of(recipe) if each.contract is METRIC}
        return cls(recipe.train.extra_metrics, own)

    @property
    def needs_scores(self) -> bool:
        """Whether any of them needs the scores of all images."""
        return bool(self.own) or any(name in SCORED for name in self.names)

    @property
    def num_best(self) -> int:
        """The largest k of top-k accuracies, at least 5, which every evaluation has."""
        return max(5, *(top_k(name) or 0 for name in self.names)) if self.names else 5

    def measure(
        self,
        classes: Sequence[ClassCount],
        top_k_shares: Sequence[float],
        images: ImageScores | None,
        on_progress: Callable[[], None] = do_nothing,
    ) -> tuple[dict[str, float], Sequence[ClassCount]]:
        """Return the metrics by name, and `classes` with those of each class. Without `images`, scored ones are 0.

        `on_progress` is called after each class and each of your own metrics, as often without `images` as with them.
        """
        has_scored = any(name in SCORED for name in self.names)
        values = class_averages(classes) if any(name in COUNTED for name in self.names) else {}
        for name in self.names:
            k = top_k(name)
            if k:
                values[name] = top_k_shares[min(k, len(top_k_shares)) - 1]
        if images is None:
            for _ in range((len(classes) if has_scored else 0) + len(self.own)):
                on_progress()
        elif has_scored:
            classes = add_class_scores(classes, images, on_progress)
            numbers = [each.images for each in classes]
            for name in ("auroc", "ap"):
                of_classes = [getattr(each, name) for each in classes]
                values[name] = weighted_mean(of_classes, [1] * len(classes))
                values[f"weighted_{name}"] = weighted_mean(of_classes, numbers)
        if images is not None:
            for name, metric in self.own.items():
                values[name] = _call(metric, name, images)
                on_progress()
        return {name: values.get(name, 0.0) for name in self.names}, classes


NO_METRICS = ExtraMetrics()
"""Only the metrics of every evaluation."""


def _call(metric: OwnMetric, name: str, images: ImageScores) -> float:
    try:
        return float(metric(images.scores, images.labels))
    except PacelineError:
        raise
    except Exception as error:
        raise RecipeError(f"train.metrics: {name} raised {describe_error(error)} (fix it)") from error


def build_monitor(recipe: Recipe, default: str = "top1") -> Monitor:
    """Return the metric of `train.monitor`, or `default` for auto.

    Your own is maximized, unless the function has an attribute `minimize` that is true. Raise `RecipeError` as
    `ExtraMetrics.from_recipe`.
    """
    name = default if recipe.train.monitor == "auto" else recipe.train.monitor
    if is_plugin_name(name):
        function = PluginRef("train.monitor", name, {}, METRIC).load()
        inner = unwrap_partial(function)
        return Monitor(name, is_minimized=bool(getattr(function, "minimize", getattr(inner, "minimize", False))))
    return Monitor(name, is_minimized=name in MINIMIZED)
