"""The oracle: what the trainer itself would train on and be judged by, step by step, of the same recipe."""

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

    def batches(words, first: int, stop: int, rank: int = 0, world_size: int = 1) -> list:
        with contextlib.ExitStack() as held:
            parts = parts_of(words, held, rank, world_size)
            finish, place = parts.create_transforms(torch.float32), parts.create_transfer(torch.float32)
            return [finish(place(batch)) for batch in parts.create_train_loader(place).batches(first, stop)]

    return batches


@pytest.fixture
def judged_by() -> Callable[..., list]:
    """Return a function from a recipe to the (images, labels) of the whole evaluation, by one rank."""

    def batches(words) -> list:
        with contextlib.ExitStack() as held:
            parts = parts_of(words, held, 0, 1)
            place = parts.create_transfer(torch.float32)
            loader, num_batches = parts.create_eval_loader(parts.datasets.val, parts.plan.val_images)
            placed = [place(batch) for batch in loader.batches(0, num_batches)]
            return [(place.normalize(each.images), each.labels) for each in placed]

    return batches


def parts_of(words, held: contextlib.ExitStack, rank: int, world_size: int) -> RunContext:
    recipe = load(words[0], Patch.parse(list(words[1:]))).recipe
    recipe, datasets = read_run_data(recipe, held, True)
    return RunContext.derive(recipe, World(rank, world_size, rank, world_size), torch.device("cpu"), datasets, held)


@pytest.fixture
def folder_of_photographs(tmp_path_factory):
    """Return a folder of 8 images to train on and 6 to be judged by, in two classes."""
    root = tmp_path_factory.mktemp("photographs")
    for split, num in (("train", 4), ("val", 3)):
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            for number in range(num):
                pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root
