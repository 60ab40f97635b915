"""Train a few steps, evaluate the weights and their average, continue; run by `rank.py` on any number of ranks.

The images are the same for every number of ranks, and with two ranks one evaluates a batch more than the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.results import EvalResult
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.order import EvalShard
from paceline.data.transfer import DeviceTransfer
from paceline.parallel.build import build_strategy
from paceline.parallel.strategy import Strategy
from paceline.parallel.sync_batch_norm import convert_sync_batch_norm
from paceline.recipe.schema.train import Ema, Parallel
from paceline.training.ema import build_weight_average
from paceline.training.evaluator import ModelEvaluator, SplitEvaluator
from paceline.training.precision import build_precision
from paceline.training.scores import ExtraMetrics

CPU = torch.device("cpu")
WAYS = {
    "ddp": Parallel(),
    "fsdp": Parallel(strategy="fsdp"),
    "fsdp resharding": Parallel(strategy="fsdp", reshard=True),
}
NUM_IMAGES, EVAL_BATCH, BATCH, STEPS, WORST = 21, 10, 12, 6, 7


@dataclass(frozen=True)
class SyntheticLoader:
    """A loader of images that are a function of their index; labels cycle through the five classes."""

    shard: EvalShard

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Yield a rank's batches."""
        for number in range(first, stop):
            indices = self.shard.indices(number)
            yield Batch(*images_at(indices), indices, torch.empty(len(indices), 0, dtype=torch.float64))


def images_at(indices: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return uint8 images [N, 3, 8, 8] and their labels [N]."""
    draws = [np.random.Generator(np.random.PCG64(int(index))).integers(0, 256, (3, 8, 8)) for index in indices]
    return torch.from_numpy(np.stack(draws).astype(np.uint8)), torch.from_numpy(indices % 5)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 5)).double()


def evaluator(place: DeviceTransfer, strategy: Strategy, shard: EvalShard) -> SplitEvaluator:
    return SplitEvaluator(
        loader=SyntheticLoader(shard),
        num_batches=shard.num_batches,
        num_images=shard.num_images,
        class_names=tuple("abcde"),
        transfer=place,
        precision=build_precision("fp64", CPU),
        strategy=strategy,
        device=CPU,
        num_worst=WORST,
        metrics=ExtraMetrics(("f1", "weighted_precision", "top3", "auroc", "weighted_ap", "own"), {"own": brier_score}),
    )


def brier_score(scores: Tensor, labels: Tensor) -> float:
    return float((scores.double() - functional.one_hot(labels, scores.shape[1])).square().sum(dim=1).mean())


def evaluate_all(way: Parallel, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the last report, the weights and the averages."""
    world = World(rank, world_size, rank, world_size)
    strategy = build_strategy(way, world, CPU)
    model = convert_sync_batch_norm(build_model(), CPU)
    replica = strategy.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = build_weight_average(Ema(decay=0.5, warmup=False), model, optimizer, list(model.named_parameters()))
    place = DeviceTransfer(CPU, torch.float64, (0.5,) * 3, (0.25,) * 3, torch.contiguous_format)
    shards = [EvalShard(NUM_IMAGES, EVAL_BATCH, rank, world_size, of) for of in (None, 500)]
    judge = ModelEvaluator(evaluator(place, strategy, shards[0]), average, evaluator(place, strategy, shards[1]))
    share = BATCH // world_size
    for step in range(STEPS):
        indices = 100 + np.arange(step * BATCH + rank * share, step * BATCH + (rank + 1) * share)
        images, labels = images_at(indices)
        with strategy.accumulate(final=True):
            functional.cross_entropy(replica(place.normalize(images)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)
        if step in (STEPS - 3, STEPS - 1):
            report = judge(model)
    assert report.ema is not None and report.train is not None and report.classes is not None
    tensors = {"confusion": torch.tensor(report.classes.confusion)}
    for name, result in (("val", report.val), ("ema", report.ema), ("train", report.train)):
        tensors[f"{name}.numbers"] = numbers(result)
    worst = [[each.index, each.label, each.predicted, each.confidence, each.loss] for each in report.worst]
    tensors["worst"] = torch.tensor(worst, dtype=torch.float64)
    tensors |= {f"weights.{name}": tensor for name, tensor in strategy.gather(model.state_dict()).items()}
    return tensors | {f"average.{name}": tensor for name, tensor in strategy.gather(average.tensors()).items()}


def numbers(result: EvalResult) -> Tensor:
    values = result.to_row("python")
    assert len(values) == 6 + 6
    return torch.tensor(list(values.values()), dtype=torch.float64)


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    ways = {name: evaluate_all(way, rank, world_size) for name, way in WAYS.items()}
    return {f"{name}/{key}": tensor for name, tensors in ways.items() for key, tensor in tensors.items()}
