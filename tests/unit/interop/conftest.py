"""The oracle: the batches that the trainer itself uses for the same recipe, step by step."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.context import RunContext
from paceline.training.datasets import read_run_data


@pytest.fixture
def trained_on():
    """Return a function from a recipe to the (images, targets) of steps `first` to `stop` - 1 of a rank."""

    def batches(args, first: int, stop: int, rank: int = 0, world_size: int = 1) -> list:
        with contextlib.ExitStack() as resources:
            context = derive_context(args, resources, rank, world_size)
            finish, place = context.create_transforms(torch.float32), context.create_transfer(torch.float32)
            return [finish(place(batch)) for batch in context.create_train_loader(place).batches(first, stop)]

    return batches


@pytest.fixture
def evaluated_on() -> Callable[..., list]:
    """Return a function from a recipe to the (images, labels) of the whole evaluation, by one rank."""

    def batches(args) -> list:
        with contextlib.ExitStack() as resources:
            context = derive_context(args, resources, 0, 1)
            place = context.create_transfer(torch.float32)
            loader, num_batches = context.create_eval_loader(context.datasets.val, context.plan.val_images)
            placed = [place(batch) for batch in loader.batches(0, num_batches)]
            return [(place.normalize(each.images), each.labels) for each in placed]

    return batches


def derive_context(args, resources: contextlib.ExitStack, rank: int, world_size: int) -> RunContext:
    recipe = load(args[0], Patch.parse(list(args[1:]))).recipe
    recipe, datasets = read_run_data(recipe, resources, True)
    return RunContext.derive(
        recipe, World(rank, world_size, rank, world_size), torch.device("cpu"), datasets, resources
    )


@pytest.fixture
def folder_of_photographs(tmp_path_factory):
    """Return a folder of 8 images to train on and 6 to validate on, in two classes."""
    root = tmp_path_factory.mktemp("photographs")
    for split, num in (("train", 4), ("val", 3)):
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            for number in range(num):
                pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root
