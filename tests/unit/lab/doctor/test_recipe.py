"""A recipe's needs are checked as training itself would refuse them."""

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest

from paceline.core.world import World
from paceline.data.sources.build import build_datasets
from paceline.lab.doctor.check import DoctorFinding
from paceline.lab.doctor.recipe import check_recipe
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe

Usage = namedtuple("Usage", "total used free")


def recipe(*words: str) -> Recipe:
    return load("digits", Patch.parse([*words, "parallel.device=cpu", "parallel.backend=gloo"])).recipe


def looked_at(recipe: Recipe, world: World | None = None) -> DoctorFinding:
    return check_recipe(recipe, world or World.single(), lambda: build_datasets(recipe.data.source, may_download=False))


def test_a_recipe_that_fits_is_well() -> None:
    finding = looked_at(recipe())
    assert finding.state == "ok" and finding.found.startswith("has room for 1 rank; batches by ")


def test_workers_without_room_for_their_batches_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 10**5))
    workers = looked_at(recipe("data.workers=4", "data.loader=processes"))
    assert workers.state == "error" and "need" in workers.found and "--shm-size" in workers.advice


def test_a_batch_that_does_not_divide_over_the_ranks_is_wrong() -> None:
    world = replace(World.single(), world_size=7, local_world_size=7)
    divided = looked_at(recipe("data.batch_size=100"), world)
    assert divided.state == "error" and "7 ranks" in divided.found


def test_data_that_is_not_here_is_worth_a_look(tmp_path) -> None:
    words = Patch.parse([f"data.source.root={tmp_path}/gone", "parallel.device=cpu"])
    finding = looked_at(load("folder", words).recipe)
    assert finding.state == "warning" and "gone" in finding.found
