"""Read what a run works on: its own data set, or another one that its weights are judged by."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from paceline.core.dataset import Datasets
from paceline.core.rundir import RunDir
from paceline.data.sources.build import build_datasets
from paceline.data.stage import staged
from paceline.recipe.schema import Recipe
from paceline.train.checkpoint import read_state
from paceline.train.facts import read_facts
from paceline.train.test_set import read_test_set

Read = Callable[[contextlib.ExitStack, bool], tuple[Recipe, Datasets]]
"""Read a data set, with what is to be held open of it, on the first rank of a node or another; give its recipe too."""


def read_own(recipe: Recipe, held: contextlib.ExitStack, is_first: bool) -> tuple[Recipe, Datasets]:
    """Read both splits; the first rank of a node fetches or stages them. A staged copy stands while it is `held`."""
    data = recipe.data
    skip_bad = data.on_bad_image == "skip"
    section = held.enter_context(staged(data.source, data.stage, is_first=is_first, skip_bad=skip_bad))
    return recipe, build_datasets(section, may_download=is_first, skip_bad=skip_bad)


def read_judged(
    recipe: Recipe,
    own: Recipe,
    checkpoint: Path,
    say: Callable[[str], None],
    held: contextlib.ExitStack,
    is_first: bool,
) -> tuple[Recipe, Datasets]:
    """Read what `recipe` judges a `checkpoint` of a run of `own` by: its own set, or the one that is named anew."""
    if recipe.data.source == own.data.source:
        return read_own(recipe, held, is_first)
    facts = read_facts(RunDir(checkpoint.parent.parent))
    digest = str(read_state(checkpoint).get("dataset", ""))
    judged = read_test_set(recipe, own, facts, digest, is_first=is_first)
    if judged.note:
        say(judged.note)
    return judged.recipe, judged.datasets


def silent(sentence: str) -> None:
    """Say nothing: rank 0 speaks."""
