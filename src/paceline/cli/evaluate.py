"""`paceline eval`: evaluate a run's weights exactly, raw and EMA, on its own images or others."""

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks
from paceline.core.errors import PacelineError
from paceline.core.rundir import RunDir, checkpoint_name
from paceline.data.sources.places import expanded, printable
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.patch import Patch

if TYPE_CHECKING:
    from paceline.core.dataset import Source
    from paceline.core.results import EvalReport


def evaluate(
    run: Path,
    overrides: list[str],
    ranks: str,
    checkpoint: str,
    *,
    out: Path | None = None,
    own_code: bool = False,
    port: int,
    as_json: bool,
    per_class: bool,
    oversubscribe: bool = False,
) -> int:
    """Run `paceline eval`, and return the exit code. `out` is a folder to create for the outputs."""
    rundir = RunDir.existing(run)
    name = str(rundir.path)
    original, loaded = load(name).recipe, load(name, Patch.parse(overrides))
    require_consent(loaded, own_code=own_code, of=("model", "data.source"))
    recipe = loaded.recipe
    world = enter_world()
    num_ranks = ranks_to_start(ranks, world, recipe, oversubscribe=oversubscribe)
    if world.launcher == "single" and num_ranks > 1:
        return start_ranks(num_ranks, port, [])
    from paceline.cli.show import show_evaluation
    from paceline.train.checkpoint import Checkpoints, Keep
    from paceline.train.leave import claimed, kept_nowhere
    from paceline.train.run import evaluate as work

    path = Checkpoints(rundir.checkpoints, Keep(1)).named(checkpoint)
    if world.is_main and checkpoint == "last":
        note_missing_end(rundir, path)
    out_folder = expanded(str(out)) if out and world.is_main else None
    with claimed(out_folder) if out_folder else contextlib.nullcontext() as folder:
        keep = partial(_leave, folder, path, overrides) if folder else kept_nowhere
        report = work(recipe, world, path, own=original, say=_note, keep=keep)
    if world.is_main:
        show_evaluation(report, path, as_json=as_json, per_class=per_class)
    if out_folder and not as_json:
        print(f"outputs: {printable(out_folder)}")
    return 0


def _leave(folder: RunDir, checkpoint: Path, overrides: Sequence[str], report: "EvalReport", source: "Source") -> None:
    """Write the outputs of an evaluation into `folder`."""
    from paceline.cli.show import evaluation_json
    from paceline.train.leave import leave

    origin = {"run": printable(checkpoint.parent.parent), "checkpoint": checkpoint.name, "overrides": list(overrides)}
    leave(folder, {**origin, **evaluation_json(report, ())}, report, source)


def note_missing_end(rundir: RunDir, checkpoint: Path) -> None:
    """Print a note if `checkpoint` replaces a missing checkpoint of the last step."""
    from paceline.train.resume import missing_end

    with contextlib.suppress(PacelineError):
        if checkpoint.name == checkpoint_name(rundir.read_result().steps):
            return  # cheap: reads no checkpoint
    if missing := missing_end(rundir):
        _note(f"{missing}; {checkpoint.name} is used")


def _note(sentence: str) -> None:
    print(f"note: {printable(sentence)}", file=sys.stderr)
