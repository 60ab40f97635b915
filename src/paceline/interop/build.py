"""Build the loaders of a recipe for another training loop, from the parts that training uses."""

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
from paceline.data.finish import Finish
from paceline.data.loader import Loader
from paceline.data.mix import Unmixed
from paceline.data.placement import Placement
from paceline.interop.ahead import Ahead
from paceline.interop.dataset import build_dataset
from paceline.interop.eval_loader import EvalLoader, even_batch
from paceline.interop.pipeline import Pipeline
from paceline.interop.place import find_device, find_place, gpu_by_chance
from paceline.interop.shared import Shared
from paceline.interop.train_loader import TrainLoader
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load_any
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.recipe import Checkpoint
from paceline.train.bad_images import BadImages
from paceline.train.parts import Parts
from paceline.train.reading import read_own

_ENDLESS: Final = 1 << 40
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
    rank_place = find_place(rank, world_size, gpu_by_chance(device, where))
    data_recipe = _of_data(loaded.recipe)
    with ExitStack() as unless_whole:
        resources = unless_whole.enter_context(ExitStack())
        data_recipe, datasets = rank_place.in_turn(partial(read_own, data_recipe, resources))
        parts = Parts.derive(data_recipe, rank_place.world, where, datasets, resources)
        even = even_batch(parts.plan.val_images, parts.plan.eval_batch, rank_place.world.world_size)
        parts = replace(parts, plan=replace(parts.plan, eval_batch=even))
        parts.check_room()
        shared = Shared(resources)
        made = Loaders(_train(parts, dtype, shared), _val(parts, dtype, shared))
        unless_whole.pop_all()
    if rank_place.world.is_main:
        for note in filter(None, (*datasets.train.info.notes, *datasets.val.info.notes, parts.choice.note)):
            warnings.warn(note, stacklevel=2)
    return made


def _of_data(recipe: Recipe) -> Recipe:
    """Return `recipe` without trainer settings that would change batches; images are contiguous by default."""
    # A foreign model has contiguous weights unless its trainer changed them, and may call `view`.
    layout = "contiguous" if recipe.model.memory_format == "auto" else recipe.model.memory_format
    model = recipe.model.model_copy(update={"memory_format": layout})
    train = recipe.train.model_copy(update={"accumulate": 1})
    return recipe.model_copy(update={"model": model, "train": train, "checkpoint": Checkpoint()})


def _train(parts: Parts, dtype: torch.dtype, shared: Shared) -> TrainLoader:
    placement, finish = _placement(parts, dtype), parts.finish(dtype)
    if dtype == torch.uint8 and finish.mix.num_draws:
        raise RecipeError(
            "data.augment: mixup and cutmix mix normalised images, but dtype is torch.uint8 (use a float dtype, or "
            "leave them out)"
        )
    loader = parts.train_loader(placement)
    pipeline = Pipeline(
        loader=loader,
        ahead=_ahead(parts, loader, _ENDLESS),
        left_out=_bad_images(parts).of("train"),
        place=placement,
        finish=replace(finish, normalise=_normalising(placement, dtype)),
        facts=build_dataset(parts.datasets.train.info, parts.plan.image_size, *parts.statistics),
    )
    return TrainLoader(pipeline=pipeline, plan=parts.plan, seed=parts.recipe.seed, shared=shared)


def _val(parts: Parts, dtype: torch.dtype, shared: Shared) -> EvalLoader:
    placement, source = _placement(parts, dtype), parts.datasets.val
    loader, num_batches = parts.eval_loader(source, parts.plan.val_images)
    pipeline = Pipeline(
        loader=loader,
        ahead=_ahead(parts, loader, num_batches),
        left_out=_bad_images(parts).of("val"),
        place=placement,
        finish=Finish((), _normalising(placement, dtype), Unmixed()),
        facts=build_dataset(source.info, parts.plan.eval_image_size, *parts.statistics),
    )
    return EvalLoader(pipeline=pipeline, num_batches=num_batches, batch_size=parts.plan.eval_batch, shared=shared)


def _ahead(parts: Parts, loader: Loader, stop: int) -> Ahead:
    """Return a prefetcher of `loader`, closed together with the other resources."""
    ahead = Ahead(loader, stop)
    parts.held.callback(ahead.close)
    return ahead


def _placement(parts: Parts, dtype: torch.dtype) -> Placement:
    """Return the placement onto the device. Raise `RecipeError` for a dtype that images cannot have."""
    if not (dtype.is_floating_point or dtype == torch.uint8):
        raise RecipeError(
            f"dtype: {dtype} is not a dtype of images (give torch.float32, another float, or torch.uint8)"
        )
    return parts.placement(dtype)


def _normalising(placement: Placement, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return _as_pixels if dtype == torch.uint8 else placement.normalise


def _as_pixels(images: Tensor) -> Tensor:
    """Return uint8 images unchanged."""
    return images


def _bad_images(parts: Parts) -> BadImages:
    """Return a handler that warns of bad images, and raises an error for too many."""
    return BadImages(parts.datasets, parts.recipe.data.max_bad_images, sorted, _told, [])


def _told(bad: Mapping[str, str | int]) -> None:
    warnings.warn(f"{bad['path']}: {bad['reason']} (left out; paceline data verify lists all)", stacklevel=2)
