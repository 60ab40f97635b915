"""Read the dataset of a run, or another one to evaluate its weights on."""

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
"""Read a dataset, with an exit stack for its resources, on a node's first or another rank; return its recipe too."""


def read_own(recipe: Recipe, held: contextlib.ExitStack, is_first: bool) -> tuple[Recipe, Datasets]:
    """Read both splits; the first rank per node downloads or stages them. A staged copy stays locked while `held` is
    open.
    """
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
    """Read the dataset that `recipe` evaluates `checkpoint` on: that of its run, with recipe `own`, or another."""
    if recipe.data.source == own.data.source:
        return read_own(recipe, held, is_first)
    facts = read_facts(RunDir(checkpoint.parent.parent))
    digest = str(read_state(checkpoint).get("dataset", ""))
    eval_data = read_test_set(recipe, own, facts, digest, is_first=is_first)
    if eval_data.note:
        say(eval_data.note)
    return eval_data.recipe, eval_data.datasets


def silent(sentence: str) -> None:
    """Discard a message: only rank 0 prints."""
