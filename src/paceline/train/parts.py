"""Build the parts of a run from its recipe, plan, world and data: the only place where all of them meet."""

from dataclasses import dataclass

import torch
from torch import nn

from paceline.core.dataset import ArraySource, Datasets
from paceline.core.world import World
from paceline.data.loader import Loader, LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.placement import Placement
from paceline.data.sampler import EvalShard, TrainOrder
from paceline.models.zoo import build_model
from paceline.parallel.device import usable_cores
from paceline.parallel.strategy import Strategy
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.train.evaluate import Evaluator
from paceline.train.precision import Precision, build_precision

_MAX_WORKERS = 16


@dataclass(frozen=True)
class Parts:
    """What was asked, who we are, on which device, over which data, and what follows from it in integers."""

    recipe: Recipe
    world: World
    device: torch.device
    datasets: Datasets
    plan: Plan

    @property
    def workers(self) -> int:
        """Decoding processes a rank: none for pixels in memory, else the rank's share of the cores but one."""
        if self.recipe.data.workers != "auto":
            return self.recipe.data.workers
        if isinstance(self.datasets.train, ArraySource):
            return 0
        return min(_MAX_WORKERS, max(0, usable_cores() // self.world.local_world_size - 1))

    def model(self) -> nn.Module:
        """Return the model on the device, its weights drawn from the recipe's seed alone."""
        torch.manual_seed(self.recipe.seed)
        model = build_model(self.recipe.model, num_classes=self.plan.num_classes, channels=self.plan.channels)
        model.to(self.device, self.precision().dtype)
        return model.to(memory_format=self._memory_format)

    def placement(self) -> Placement:
        """Return what brings batches to the device and normalises them there."""
        data, info = self.recipe.data, self.datasets.train.info
        mean = info.mean if data.mean == "auto" else data.mean
        std = info.std if data.std == "auto" else data.std
        return Placement(self.device, self.precision().dtype, mean, std, self._memory_format)

    def precision(self) -> Precision:
        """Return the number format of a step."""
        return build_precision(self.recipe.train.precision, self.device.type)

    def train_loader(self) -> Loader:
        """Return this rank's part of the exact order."""
        plan, world = self.plan, self.world
        order = TrainOrder(self.recipe.seed, plan.train_images, plan.batch_size, world.rank, world.world_size)
        return build_train_loader(self.recipe.data, self.datasets.train, order, self._loader_options)

    def evaluator(self, strategy: Strategy) -> Evaluator:
        """Return what evaluates this rank's shard and sums over all."""
        plan, world = self.plan, self.world
        shard = EvalShard(plan.val_images, plan.eval_batch, world.rank, world.world_size)
        return Evaluator(
            loader=build_eval_loader(self.recipe.data, self.datasets.val, shard, self._loader_options),
            num_batches=shard.num_batches,
            num_images=plan.val_images,
            place=self.placement(),
            precision=self.precision(),
            strategy=strategy,
        )

    @property
    def _loader_options(self) -> LoaderOptions:
        return LoaderOptions(self.plan.image_size, self.workers, pin_memory=self.device.type == "cuda")

    @property
    def _memory_format(self) -> torch.memory_format:
        is_contiguous = self.recipe.model.memory_format == "contiguous"
        return torch.contiguous_format if is_contiguous else torch.channels_last
