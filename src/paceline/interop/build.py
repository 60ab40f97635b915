"""Build the loaders of a recipe for another training loop."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from paceline.core.dataset import Split
from paceline.core.errors import RecipeError
from paceline.data.augment.build import DeviceTransforms, place_targets
from paceline.data.loaders.build import Loader
from paceline.data.sources.statistics import with_measured
from paceline.data.transfer import DeviceTransfer
from paceline.interop.data_loaders import (
    Dataset,
    EvalLoader,
    Prefetcher,
    SharedResources,
    SplitPipeline,
    TrainLoader,
)
from paceline.interop.distributed import find_device, find_rank, unchosen_gpu
from paceline.interop.samplers import even_batch
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import Patch, load_any
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.recipe import Checkpoint
from paceline.recipe.schema.sampler import Hard
from paceline.recipe.schema.train import BceLoss
from paceline.training.context import RunContext
from paceline.training.coordinator import BadImageRegistry
from paceline.training.datasets import read_run_data

_MAX_STEPS: Final = 1 << 40  # more than any loop takes


class Loaders(NamedTuple):
    """Both loaders of a dataset: `train, val = loaders(...)`, or `with loaders(...) as (train, val):`."""

    train: TrainLoader
    val: EvalLoader

    def close(self) -> None:
        """Stop prefetching, and release what both loaders share."""
        self.train.close()
        self.val.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def loaders(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *overrides: str,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    trust_code: bool = False,
) -> Loaders:
    """Return the loaders of the training and validation split of a recipe's data, for a loop of your own.

    `recipe` is what `paceline.train` takes: a preset's name, a YAML file, a run directory, a mapping, or a
    `paceline.recipe.schema.Recipe`; `overrides` are `"KEY=VALUE"` strings. Only `data`, `seed`, `model.memory_format`
    and `measure.clock` matter, and the training length for `data.progressive`. Code that a file or a run directory
    names is imported only with `trust_code`: set it if you trust the author.

    Batches are moved to `device` (`auto`: torch's current GPU, or the CPU without one) and normalized there to `dtype`;
    `torch.uint8` leaves pixels unchanged. Images are contiguous, unless `model.memory_format` is channels_last.

    `rank` and `world_size` default to those of torch.distributed if it is initialized, in which case every rank must
    call this function; otherwise there is one rank. Raise `paceline.core.errors.PacelineError` for errors that a user
    can fix.
    """
    loaded = with_weights_defaults(load_any(recipe, Patch.parse(list(overrides))))
    target = find_device(device)
    require_consent(loaded, trust_code=trust_code, paths=("data.",))
    external_rank = find_rank(rank, world_size, unchosen_gpu(device, target))
    data_recipe = _data_only_recipe(loaded.recipe)
    # `on_error` closes what was opened if a later step fails; on success the loaders own it.
    with ExitStack() as on_error:
        resources = on_error.enter_context(ExitStack())
        data_recipe, datasets = external_rank.run_node_main_first(partial(read_run_data, data_recipe, resources))
        # Each rank measures the same: these ranks need not have a store.
        datasets = with_measured(datasets, skip_bad=data_recipe.data.on_bad_image == "skip")
        context = RunContext.derive(data_recipe, external_rank.world, target, datasets, resources)
        # Equal numbers of batches, so that collectives in the user's loop do not hang.
        eval_batch = even_batch(context.plan.val_images, context.plan.eval_batch, external_rank.world.world_size)
        context = replace(context, plan=replace(context.plan, eval_batch=eval_batch))
        context.check_worker_limits()
        shared = SharedResources(resources)
        result = Loaders(_build_train_loader(context, dtype, shared), _build_eval_loader(context, dtype, shared))
        on_error.pop_all()
    # Rank 0 only: all ranks have the same notes.
    if external_rank.world.is_main:
        for note in filter(None, (*datasets.train.info.notes, *datasets.val.info.notes, context.loader_choice.note)):
            warnings.warn(note, stacklevel=2)
    return result


def _data_only_recipe(recipe: Recipe) -> Recipe:
    # A foreign model has contiguous weights unless its trainer changed them, and may call `view`.
    layout = "contiguous" if recipe.model.memory_format == "auto" else recipe.model.memory_format
    model = recipe.model.model_copy(update={"memory_format": layout})
    # A foreign trainer has its own loss and metrics: no targets of the data are refused.
    own = {"loss": BceLoss(), "metrics": (), "monitor": "auto", "stop": "off", "distill": "off"}
    train = recipe.train.model_copy(update={"accumulate": 1, **own})
    return recipe.model_copy(update={"model": model, "train": train, "checkpoint": Checkpoint()})


def _build_train_loader(context: RunContext, dtype: torch.dtype, shared: SharedResources) -> TrainLoader:
    transfer, finish = _build_transfer(context, dtype), context.create_transforms(dtype)
    if isinstance(context.recipe.data.sampler, Hard):
        raise RecipeError("data.sampler: hard needs the losses of paceline's own training loop (use another sampler)")
    if dtype == torch.uint8 and finish.mix:
        raise RecipeError(
            "data.augment: mixup and cutmix mix normalized images, but dtype is torch.uint8 (use a float dtype, or "
            "leave them out)"
        )
    finish = replace(finish, normalize=_build_normalize(transfer, dtype))
    loader = context.create_train_loader(transfer)
    pipeline = _build_pipeline(context, "train", loader, _MAX_STEPS, transfer, finish)
    return TrainLoader(pipeline=pipeline, plan=context.plan, seed=context.recipe.seed, shared=shared)


def _build_eval_loader(context: RunContext, dtype: torch.dtype, shared: SharedResources) -> EvalLoader:
    transfer = _build_transfer(context, dtype)
    targets = place_targets(context.datasets.val.info.targets, transfer.device)
    finish = DeviceTransforms((), _build_normalize(transfer, dtype), None, targets)
    loader, num_batches = context.create_eval_loader(context.datasets.val, context.plan.val_images)
    pipeline = _build_pipeline(context, "val", loader, num_batches, transfer, finish)
    return EvalLoader(pipeline=pipeline, num_batches=num_batches, batch_size=context.plan.eval_batch, shared=shared)


def _build_pipeline(
    context: RunContext, split: Split, loader: Loader, stop: int, transfer: DeviceTransfer, finish: DeviceTransforms
) -> SplitPipeline:
    info = (context.datasets.train if split == "train" else context.datasets.val).info
    size = context.plan.image_size if split == "train" else context.plan.eval_image_size
    bad_images = BadImageRegistry(
        context.datasets, context.recipe.data.max_bad_images, sorted, _warn_bad_image, []
    ).for_split(split)
    prefetcher = Prefetcher(loader, stop)
    context.exit_stack.callback(prefetcher.close)
    dataset = Dataset(info.class_names, info.num_images, info.channels, size, *context.mean_and_std)
    return SplitPipeline(loader, prefetcher, bad_images, transfer, finish, dataset)


def _build_transfer(context: RunContext, dtype: torch.dtype) -> DeviceTransfer:
    if not (dtype.is_floating_point or dtype == torch.uint8):
        raise RecipeError(
            f"dtype: {dtype} is not a dtype of images (give torch.float32, another float, or torch.uint8)"
        )
    if dtype == torch.uint8 and context.datasets.train.info.pixel_format.is_wide:
        raise RecipeError(
            f"dtype: torch.uint8 cannot hold {context.datasets.train.info.pixels} pixels (give torch.float32)"
        )
    return context.create_transfer(dtype)


def _build_normalize(transfer: DeviceTransfer, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return _identity if dtype == torch.uint8 else transfer.normalize


def _identity(images: Tensor) -> Tensor:
    return images


def _warn_bad_image(bad: Mapping[str, str | int]) -> None:
    warnings.warn(f"{bad['path']}: {bad['reason']} (left out; paceline data verify lists all)", stacklevel=2)
