"""From a recipe to the parts of a run: which samples its batches are made of."""

import contextlib
from itertools import pairwise

import numpy as np
import pytest
import torch

from paceline.core.world import World
from paceline.data.sources.build import build_datasets
from paceline.recipe.load import Patch, load
from paceline.training.context import RunContext


def indices_of(order: str, loader: str, workers: int, first: int, stop: int) -> list[list[int]]:
    """Return the samples of the batches of steps `first` up to `stop`."""
    words = [f"data.order={order}", "data.batch_size=500", f"data.loader={loader}", f"data.workers={workers}"]
    recipe = load("digits", Patch.parse(words)).recipe
    datasets = build_datasets(recipe.data.source, may_download=False)
    with contextlib.ExitStack() as held:
        parts = RunContext.derive(recipe, World.single(), torch.device("cpu"), datasets, held)
        place = parts.create_transfer(torch.float32)
        return [batch.indices.tolist() for batch in parts.create_train_loader(place).batches(first, stop)]


@pytest.mark.parametrize(("loader", "workers"), [("auto", 0), ("threads", 1), ("processes", 1)])
def test_the_stored_order_is_that_of_the_source_from_any_step_on(loader: str, workers: int) -> None:
    taken = indices_of("stored", loader, workers, 0, 4)
    assert taken == [list(range(500)), list(range(500, 1000))] * 2
    assert indices_of("stored", loader, workers, 3, 4) == taken[3:]


@pytest.mark.parametrize(("loader", "workers", "is_noted"), [("auto", 0, False), ("threads", 1, True)])
def test_a_worker_timeout_longer_than_parallel_timeout_is_noted(loader, workers, is_noted) -> None:
    words = [f"data.loader={loader}", f"data.workers={workers}", "parallel.timeout=1min", "parallel.device=cpu"]
    loaded = load("digits", Patch.parse(words))
    datasets = build_datasets(loaded.recipe.data.source, may_download=False)
    with contextlib.ExitStack() as held:
        notes = RunContext.derive(loaded.recipe, World.single(), torch.device("cpu"), datasets, held).plan.notes
    assert [note.startswith("data.worker_timeout: 5min has no effect: ") for note in notes] == [True] * is_noted


def test_the_random_order_is_another_every_epoch() -> None:
    taken = indices_of("random", "auto", 0, 0, 4)
    epochs = [np.concatenate(taken[:2]).tolist(), np.concatenate(taken[2:]).tolist(), list(range(1000))]
    assert all(one != other for one, other in pairwise(epochs))
