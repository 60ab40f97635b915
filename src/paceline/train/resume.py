"""Go on with a run: is it the same recipe, has it ended already, and where was it?"""

from collections.abc import Iterator
from typing import Any

from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir, write_atomic
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import write_text

_FREE_TO_CHANGE = (
    "log.",
    "measure.",
    "checkpoint.",
    "parallel.",
    "data.workers",
    "data.eval_batch_size",
    "data.source.download",
    "data.source.root",  # data may move
    "data.source.train_root",
    "data.source.val_root",
)


_NEVER_FREE = ("parallel.compression", "parallel.powersgd_rank")


def check_rundir(rundir: RunDir, recipe: Recipe, *, resume: bool) -> None:
    """Raise `RecipeError` when `rundir` holds another run, or on resuming one that `recipe` would change."""
    rundir.refuse_another_run(resume=resume)
    if rundir.recipe.exists():
        before = load(str(rundir.path)).recipe
        changes = list(changed(before.to_dict(), recipe.to_dict()))
        if changes:
            raise RecipeError(f"--resume: {rundir.path} was started with {', '.join(changes)} (resume it as it was)")


def open_rundir(rundir: RunDir, recipe: Recipe) -> None:
    """Make the run directory and write the recipe into it."""
    rundir.create()
    write_atomic(rundir.recipe, f"# recipe {recipe.hash}\n" + write_text(recipe.to_dict()))


def finished(rundir: RunDir) -> RunResult | None:
    """Return the result of a run that has ended as it was meant to, or None."""
    if not (rundir.path / "result.json").exists():
        return None
    result = rundir.read_result()
    return result if result.status in ("completed", "target_reached") else None


def changed(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `path=old (now new)` for each field that differs and that the experiment depends on."""
    for key in sorted(before.keys() | after.keys()):
        path = f"{prefix}{key}"
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changed(old, new, f"{path}.")
        elif old != new and (path in _NEVER_FREE or not path.startswith(_FREE_TO_CHANGE)):
            yield f"{path}={old} (now {new})"
