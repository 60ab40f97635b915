"""Read the dataset of a run, or another one to evaluate its weights on."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from paceline.core.dataset import Datasets
from paceline.core.rundir import RunDir
from paceline.data.sources.build import build_datasets
from paceline.data.stage import stage_for_run
from paceline.recipe.schema import Recipe
from paceline.train.checkpoint import read_state
from paceline.train.facts import read_trained_dataset
from paceline.train.test_set import read_eval_dataset

ReadData = Callable[[contextlib.ExitStack, bool], tuple[Recipe, Datasets]]
"""Read a dataset, with an exit stack for its resources, on a node's first or another rank; return its recipe too."""


def read_run_data(recipe: Recipe, exit_stack: contextlib.ExitStack, is_first: bool) -> tuple[Recipe, Datasets]:
    """Read both splits; the first rank per node downloads or stages them. A staged copy stays locked while `exit_stack` is
    open.
    """
    data = recipe.data
    skip_bad = data.on_bad_image == "skip"
    section = exit_stack.enter_context(stage_for_run(data.source, data.stage, is_first=is_first, skip_bad=skip_bad))
    return recipe, build_datasets(section, may_download=is_first, skip_bad=skip_bad)


def read_eval_data(
    recipe: Recipe,
    run_recipe: Recipe,
    checkpoint: Path,
    report: Callable[[str], None],
    exit_stack: contextlib.ExitStack,
    is_first: bool,
) -> tuple[Recipe, Datasets]:
    """Read the dataset that `recipe` evaluates `checkpoint` on: that of its run, with recipe `run_recipe`, or another."""
    if recipe.data.source == run_recipe.data.source:
        return read_run_data(recipe, exit_stack, is_first)
    facts = read_trained_dataset(RunDir(checkpoint.parent.parent))
    digest = str(read_state(checkpoint).get("dataset", ""))
    eval_data = read_eval_dataset(recipe, run_recipe, facts, digest, is_first=is_first)
    if eval_data.note:
        report(eval_data.note)
    return eval_data.recipe, eval_data.datasets


def discard_message(sentence: str) -> None:
    """Discard a message: only rank 0 prints."""
