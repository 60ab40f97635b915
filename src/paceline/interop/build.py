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

from paceline.core.errors import RecipeError
from paceline.data.augment.build import DeviceTransforms
from paceline.data.augment.mixup import NoMixing
from paceline.data.loaders.build import Loader
from paceline.data.transfer import DeviceTransfer
from paceline.interop.data_loaders import (
    EvalLoader,
    Prefetcher,
    SharedResources,
    SplitPipeline,
    TrainLoader,
    build_dataset,
    even_batch,
)
from paceline.interop.distributed import find_device, find_rank, unchosen_gpu
from paceline.recipe.consent import require_consent
from paceline.recipe.load import Patch, load_any
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.recipe import Checkpoint
from paceline.training.context import RunContext
from paceline.training.coordinator import BadImageRegistry
from paceline.training.datasets import read_run_data

_MAX_STEPS: Final = 1 << 40
"""Steps: more than any loop takes."""


class Loaders(NamedTuple):
    """Both loaders of a data set: `train, val = loaders(...)`, or `with loaders(...) as (train, val):`."""

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
    own_code: bool = False,
) -> Loaders:
    """Return the loaders of the training and validation split of a recipe's data, for a loop of your own.

    `recipe` is what `paceline.train` takes: a preset's name, a YAML file, a run directory, a mapping, or a
    `paceline.recipe.schema.Recipe`; `overrides` are `"KEY=VALUE"` strings. Only `data`, `seed`, `model.memory_format`
    and `measure.clock` matter, and the training length for `data.progressive`. Code that a file or a run directory
    names for its data or augmentation is imported only with `own_code`: set it if you trust the author. Code that the
    arguments name needs no consent.

    Batches are moved to `device` (`auto`: torch's current GPU, or the CPU without one) and normalised there to `dtype`;
    `torch.uint8` leaves pixels unchanged. Images are contiguous, unless `model.memory_format` is channels_last.

    `rank` and `world_size` default to those of torch.distributed if it is initialised, in which case every rank must
    call this function; otherwise there is one rank. Raise `paceline.core.errors.PacelineError` for errors that a user
    can fix.
    """
    loaded, where = load_any(recipe, Patch.parse(list(overrides))), find_device(device)
    require_consent(loaded, own_code=own_code, of=("data.",))
    rank_place = find_rank(rank, world_size, unchosen_gpu(device, where))
    data_recipe = _data_only_recipe(loaded.recipe)
    with ExitStack() as unless_whole:
        resources = unless_whole.enter_context(ExitStack())
        data_recipe, datasets = rank_place.run_node_main_first(partial(read_run_data, data_recipe, resources))
        parts = RunContext.derive(data_recipe, rank_place.world, where, datasets, resources)
        even = even_batch(parts.plan.val_images, parts.plan.eval_batch, rank_place.world.world_size)
        parts = replace(parts, plan=replace(parts.plan, eval_batch=even))
        parts.check_worker_limits()
        shared = SharedResources(resources)
        made = Loaders(_build_train_loader(parts, dtype, shared), _build_eval_loader(parts, dtype, shared))
        unless_whole.pop_all()
    if rank_place.world.is_main:
        for note in filter(None, (*datasets.train.info.notes, *datasets.val.info.notes, parts.loader_choice.note)):
            warnings.warn(note, stacklevel=2)
    return made


def _data_only_recipe(recipe: Recipe) -> Recipe:
    """Return `recipe` without trainer settings that would change batches; images are contiguous by default."""
    # A foreign model has contiguous weights unless its trainer changed them, and may call `view`.
    layout = "contiguous" if recipe.model.memory_format == "auto" else recipe.model.memory_format
    model = recipe.model.model_copy(update={"memory_format": layout})
    train = recipe.train.model_copy(update={"accumulate": 1})
    return recipe.model_copy(update={"model": model, "train": train, "checkpoint": Checkpoint()})


def _build_train_loader(parts: RunContext, dtype: torch.dtype, shared: SharedResources) -> TrainLoader:
    placement, finish = _build_placement(parts, dtype), parts.create_transforms(dtype)
    if dtype == torch.uint8 and finish.mix.num_draws:
        raise RecipeError(
            "data.augment: mixup and cutmix mix normalised images, but dtype is torch.uint8 (use a float dtype, or "
            "leave them out)"
        )
    loader = parts.create_train_loader(placement)
    pipeline = SplitPipeline(
        loader=loader,
        prefetcher=_build_prefetcher(parts, loader, _MAX_STEPS),
        left_out=_build_bad_images(parts).for_split("train"),
        placement=placement,
        finish=replace(finish, normalize=_build_normalize(placement, dtype)),
        dataset=build_dataset(parts.datasets.train.info, parts.plan.image_size, *parts.mean_and_std),
    )
    return TrainLoader(pipeline=pipeline, plan=parts.plan, seed=parts.recipe.seed, shared=shared)


def _build_eval_loader(parts: RunContext, dtype: torch.dtype, shared: SharedResources) -> EvalLoader:
    placement, source = _build_placement(parts, dtype), parts.datasets.val
    loader, num_batches = parts.create_eval_loader(source, parts.plan.val_images)
    pipeline = SplitPipeline(
        loader=loader,
        prefetcher=_build_prefetcher(parts, loader, num_batches),
        left_out=_build_bad_images(parts).for_split("val"),
        placement=placement,
        finish=DeviceTransforms((), _build_normalize(placement, dtype), NoMixing()),
        dataset=build_dataset(source.info, parts.plan.eval_image_size, *parts.mean_and_std),
    )
    return EvalLoader(pipeline=pipeline, num_batches=num_batches, batch_size=parts.plan.eval_batch, shared=shared)


def _build_prefetcher(parts: RunContext, loader: Loader, stop: int) -> Prefetcher:
    """Return a prefetcher of `loader`, closed together with the other resources."""
    ahead = Prefetcher(loader, stop)
    parts.exit_stack.callback(ahead.close)
    return ahead


def _build_placement(parts: RunContext, dtype: torch.dtype) -> DeviceTransfer:
    """Return the placement onto the device. Raise `RecipeError` for a dtype that images cannot have."""
    if not (dtype.is_floating_point or dtype == torch.uint8):
        raise RecipeError(
            f"dtype: {dtype} is not a dtype of images (give torch.float32, another float, or torch.uint8)"
        )
    return parts.create_transfer(dtype)


def _build_normalize(placement: DeviceTransfer, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return _identity if dtype == torch.uint8 else placement.normalize


def _identity(images: Tensor) -> Tensor:
    """Return uint8 images unchanged."""
    return images


def _build_bad_images(parts: RunContext) -> BadImageRegistry:
    """Return a handler that warns of bad images, and raises an error for too many."""
    return BadImageRegistry(parts.datasets, parts.recipe.data.max_bad_images, sorted, _warn_bad_image, [])


def _warn_bad_image(bad: Mapping[str, str | int]) -> None:
    warnings.warn(f"{bad['path']}: {bad['reason']} (left out; paceline data verify lists all)", stacklevel=2)
