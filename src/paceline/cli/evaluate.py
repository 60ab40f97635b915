"""`paceline eval`: the exact accuracy of a run's weights, as they are and averaged, on its own images or on others."""

import sys
from pathlib import Path

from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks
from paceline.core.rundir import RunDir
from paceline.data.sources.places import printable
from paceline.recipe.load import load
from paceline.recipe.patch import Patch


def evaluate(
    run: Path,
    overrides: list[str],
    ranks: str,
    checkpoint: str,
    *,
    own_code: bool = False,
    port: int,
    as_json: bool,
    per_class: bool,
) -> int:
    """Do what `paceline eval` was asked for; return the exit code."""
    rundir = RunDir.existing(run)
    name = str(rundir.path)
    own, recipe = load(name).recipe, load(name, Patch.parse(overrides)).recipe
    world = enter_world()
    num_ranks = ranks_to_start(ranks, world, recipe)
    if world.launcher == "single" and num_ranks > 1:
        return start_ranks(num_ranks, port, [])
    from paceline.cli.show import show_evaluation
    from paceline.train.checkpoint import Checkpoints, Keep
    from paceline.train.run import evaluate as work

    path = Checkpoints(rundir.checkpoints, Keep(1)).named(checkpoint)
    report = work(recipe, world, path, own=own, say=_note, own_code=own_code)
    if world.is_main:
        show_evaluation(report, path, as_json=as_json, per_class=per_class)
    return 0


def _note(sentence: str) -> None:
    print(f"note: {printable(sentence)}", file=sys.stderr)
