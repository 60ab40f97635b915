"""Evaluate the raw and the averaged weights exactly: each image is counted once on any number of ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.errors import DataError
from paceline.core.results import BatchNormCheck, EvalReport
from paceline.data.loaders.build import Loader
from paceline.data.transfer import DeviceTransfer
from paceline.models.freeze import eval_mode, use_batch_statistics
from paceline.parallel.strategy import Strategy
from paceline.training.coordinator import SplitBadImages, never_stop
from paceline.training.ema import WeightAverage
from paceline.training.precision import Precision
from paceline.training.scores import NO_METRICS, ExtraMetrics, do_nothing
from paceline.training.split_meter import BatchMeter, ClassMeter, LabelMeter, SplitEvaluation, SplitMeter

_BATCH_NORM_BATCH: Final = 128
"""Images per batch of the BatchNorm check."""


EvalViews = Callable[[nn.Module, Tensor], Tensor]
"""Return logits float [N, num_classes] of normalized images [N, C, H, W]."""


def single_view(model: nn.Module, images: Tensor) -> Tensor:
    """Return the model's logits of each image."""
    logits: Tensor = model(images)
    return logits


def flip_views(model: nn.Module, images: Tensor) -> Tensor:
    """Return the mean over each image and its horizontal flip, float64."""
    # float64, so that 16-bit logits are not rounded again.
    both: Tensor = torch.stack([model(images), model(images.flip(3))])
    return both.double().mean(dim=0)


def shift_views(model: nn.Module, images: Tensor) -> Tensor:
    """Return the mean over each image, its flip, and both shifted by a pixel up-left and down-right, float64.

    Borders are reflected. Weights are 1/2, 1/4 and 1/4, as in airbench (Jordan 2024, arXiv 2404.00498, section 3.6).
    """
    height, width = images.shape[-2:]
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    shifted = [
        padded[..., by : by + height, by : by + width].contiguous(memory_format=_memory_format(images)) for by in (0, 2)
    ]
    return 0.5 * flip_views(model, images) + 0.25 * sum(flip_views(model, each) for each in shifted)


EVAL_VIEWS: Final[Mapping[int, EvalViews]] = {1: single_view, 2: flip_views, 6: shift_views}
"""By `data.eval_views`, the number of views."""


def _memory_format(images: Tensor) -> torch.memory_format:
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


@dataclass(frozen=True)
class SplitEvaluator:
    """Evaluate `num_batches` batches per rank, which on all ranks are the `num_images` images of the split.

    `num_worst` is the number of misclassified images to return, `calibrates` whether to fit a temperature on rank 0,
    and `lists_predictions` whether to return that of each image there. Synchronizes with the device once, at the end,
    unless it collects scores.
    `on_progress` is called on every rank while rank 0 computes metrics of scores.
    """

    loader: Loader
    num_batches: int
    num_images: int
    class_names: tuple[str, ...]
    transfer: DeviceTransfer
    precision: Precision
    strategy: Strategy
    device: torch.device
    views: EvalViews = single_view
    should_stop: Callable[[], bool] = never_stop
    bad_images: SplitBadImages | None = None  # without it, an unreadable image is an error
    num_worst: int = 0
    metrics: ExtraMetrics = NO_METRICS
    on_progress: Callable[[], None] = do_nothing
    calibrates: bool = False
    lists_predictions: bool = False
    targets: Tensor | None = None  # of which labels are rows, float32 [T, num_classes] on the device
    threshold: float | None = None  # with several labels per image

    def __call__(self, model: nn.Module) -> SplitEvaluation | None:
        """Return the evaluation of a `SplitMeter`. Collective.

        Return None if a rank `should_stop`. Unreadable images are added to `bad_images`.
        """
        meter = self._build_meter()
        return meter.evaluate(self.strategy, self.class_names) if self.count(model, meter) else None

    def count(self, model: nn.Module, meter: BatchMeter) -> bool:
        """Count the images of all ranks with `meter`; return False if a rank `should_stop`. Collective."""
        stopped, num_bad, num_new = False, 0, 0
        with eval_mode(model), self.strategy.evaluating(model), torch.inference_mode():
            for batch in self.loader.batches(0, self.num_batches):
                stopped = self.should_stop()
                if stopped:  # the other ranks finish; all learn of it in the sum below
                    break
                num_bad += len(batch.bad)
                num_new += self.bad_images.add(batch.bad) if self.bad_images else 0
                if not len(batch):
                    continue
                device_batch = self.transfer(batch)
                with self.precision.autocast():
                    logits = self.views(model, self.transfer.normalize(device_batch.images))
                meter.add(logits, device_batch.labels, batch.indices)
        num_images = meter.sum_over_ranks(self.strategy)
        flags = torch.tensor([stopped, num_bad, num_new], dtype=torch.int64, device=self.device)
        num_stopped, all_bad, all_new = self.strategy.sum(flags).tolist()
        if num_stopped:
            return False
        # Integers, so that the sum over ranks is exact.
        counted = num_images + all_bad
        assert counted == self.num_images, f"{counted} images were counted of {self.num_images}"
        if all_new and self.bad_images:
            self.bad_images.sync()
        if not num_images:
            raise DataError(f"data.source: none of the {self.num_images:,} images to evaluate can be read (fix them)")
        return True

    def _build_meter(self) -> SplitMeter:
        if self.threshold is not None:
            assert self.targets is not None, "several labels are rows of a table"
            return LabelMeter(self.targets, self.threshold, self.metrics, self.on_progress)
        return ClassMeter(
            len(self.class_names),
            self.device,
            self.targets,
            self.num_worst,
            self.metrics,
            self.on_progress,
            calibrates=self.calibrates,
            lists_predictions=self.lists_predictions,
        )


@dataclass(frozen=True)
class BatchNormChecker:
    """Classify training images with BatchNorm's running statistics, and with batch statistics.

    If steps change the weights a lot, running statistics describe an outdated model: evaluation fails while training
    works.
    """

    loader: Loader
    num_batches: int
    transfer: DeviceTransfer
    precision: Precision
    strategy: Strategy
    device: torch.device
    row_classes: Tensor | None = None  # of soft labels, the class of the largest share of each row, int64 [T]

    def __call__(self, model: nn.Module) -> BatchNormCheck | None:
        """Return both counts of correct images over all ranks, or None without BatchNorm. Collective."""
        counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        with self.strategy.evaluating(model), torch.inference_mode():
            for images, labels in self._shuffled_batches():
                with eval_mode(model):
                    running = self._count_correct(model, images, labels)
                with use_batch_statistics(model) as has_norms:
                    batch = self._count_correct(model, images, labels)
                if not has_norms:
                    break
                counts += torch.stack([torch.tensor(len(labels), device=self.device), running, batch])
        images_seen, running_right, batch_right = self.strategy.sum(counts).tolist()
        if not images_seen:
            return None
        return BatchNormCheck(images=images_seen, running=running_right, batch=batch_right)

    def _count_correct(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with self.precision.autocast():
            logits: Tensor = model(images)
        return (logits.argmax(dim=1) == labels).sum()

    def _shuffled_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Shuffle the images of this rank: folders list them by class, and a batch of one class has other statistics.
        batches = [batch for batch in self.loader.batches(0, self.num_batches) if len(batch)]
        if sum(map(len, batches)) < 2:  # one image has no statistics
            return
        images, labels = torch.cat([each.images for each in batches]), torch.cat([each.labels for each in batches])
        labels = labels if self.row_classes is None else self.row_classes[labels]
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        # Evaluation has shown that this many images fit into memory.
        batch_size = max(2, min(_BATCH_NORM_BATCH, max(map(len, batches))))
        for chosen in torch.split(order, batch_size):
            if len(chosen) == batch_size or len(order) < batch_size:
                yield self.transfer.normalize(images[chosen].to(self.device)), labels[chosen].to(self.device)


EvaluateSplit = Callable[[nn.Module], SplitEvaluation | None]
"""Returns None if a rank has to stop before the evaluation is complete."""


@dataclass(frozen=True)
class ModelEvaluator:
    """Run `evaluate_val` on the raw and the averaged weights, and `evaluate_train` on the raw ones.

    Per-class tables and mistakes are those of the averaged weights, if there are any.
    """

    evaluate_val: EvaluateSplit
    average: WeightAverage | None
    evaluate_train: EvaluateSplit | None = None

    def __call__(self, model: nn.Module) -> EvalReport | None:
        """Return the report on `model`, or None if a rank has to stop early. Collective."""
        raw = self.evaluate_val(model)
        trained = self.evaluate_train(model) if raw and self.evaluate_train else None
        if raw is None or (self.evaluate_train and trained is None):
            return None
        train = trained and trained.result
        averaged = None
        if self.average is not None:
            with self.average.swapped():
                averaged = self.evaluate_val(model)
            if averaged is None:
                return None
        primary = averaged or raw
        return EvalReport(
            val=raw.result,
            ema=averaged and averaged.result,
            train=train,
            classes=primary.classes,
            worst=primary.worst,
            calibration=primary.calibration,
            predictions=primary.predictions,
        )
