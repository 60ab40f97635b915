"""A dry run refuses what the run would refuse."""

import pytest

from paceline.cli.dry_run import dry_run
from paceline.core.errors import DataError, RecipeError
from paceline.core.world import World
from paceline.recipe.load import load
from paceline.recipe.patch import Patch


@pytest.mark.parametrize(
    ("words", "error", "reason"),
    [
        (["data.stage=/dev/shm"], DataError, "data.stage: has no effect on digits"),
        (["data.loader=native"], RecipeError, "data.loader: native decodes photographs"),
    ],
    ids=["staging what is in memory", "a loader that cannot"],
)
def test_what_the_run_would_refuse_is_refused(words, error, reason):
    loaded = load("digits", Patch.parse([*words, "parallel.device=cpu"]))
    with pytest.raises(error, match=reason):
        dry_run(loaded, World(), 1, as_json=False)
