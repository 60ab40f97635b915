"""The shipped ladders of data formats: every rung fits whichever of the rungs below were kept."""

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.ladder import stack_patch
from paceline.lab.ladder_file import Ladder, load_ladder
from paceline.lab.trial import apply_patch
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Lmdb, Pack

MADE: dict[str, Pack | Lmdb] = {
    "pack": Pack(root="data/source.pack"),
    "pack-256": Pack(root="data/source-256.pack"),
    "lmdb": Lmdb(root="data/source.lmdb"),
}


def climbed(ladder: Ladder, dropped: set[str]) -> Recipe:
    """Return the recipe at the top, after each rung was laid over those that were kept."""
    recipe = load(ladder.recipe, Patch((("data.source.root", "photos"),))).recipe
    patch = Patch()
    for rung in ladder.rungs:
        laid, _ = stack_patch(recipe, patch, rung, MADE.get(rung.data))
        apply_patch(recipe, laid)
        patch = patch if rung.name in dropped else laid
    return apply_patch(recipe, patch)


@pytest.mark.parametrize("name", ["quant", "data"])
def test_rungs_fit_whichever_of_those_below_were_dropped(name: str) -> None:
    ladder = load_ladder(name)
    may_fall = [rung.name for rung in ladder.rungs[1:] if rung.keep != "always"]
    assert len(may_fall) > 5
    one = [{name} for name in may_fall]
    for dropped in (set(), set(may_fall), *one, *(set(may_fall) - each for each in one)):
        climbed(ladder, dropped)


def test_the_ladder_of_the_study_reads_from_a_cold_disk_and_ends_with_our_pack() -> None:
    rungs = load_ladder("quant").rungs
    assert [rung.name for rung in rungs if rung.cache == "cold"] == [
        "JPEG from disk",
        "LMDB, sequential",
        "LMDB, shuffled",
    ]
    assert [rung.data for rung in rungs[:4]] == ["none", "lmdb", "lmdb", "source"]
    assert [rung.data for rung in rungs[-2:]] == ["pack", "pack-256"]
    top = climbed(load_ladder("quant"), set())
    assert (top.data.order, top.data.stage, top.data.source.name) == ("random", "off", "pack")


def test_no_settings_that_contradict_one_another_are_taken_for_a_rung() -> None:
    """What the test above rests on: a rung that does not fit is an error."""
    with pytest.raises(RecipeError, match="dataparallel"):
        recipe = load("quant/resnet18-imagenet", Patch()).recipe
        apply_patch(recipe, Patch((("train.precision", "amp"), ("parallel.strategy", "dataparallel"))))
