"""From a recipe to a run of a few steps that is measured: nothing is judged or saved, the learning rate stays. Pure."""

from typing import Any, Final

from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Muon
from paceline.recipe.schema.section import Section

STILL: Final = 1e-3
"""Of the peak learning rate: weights hardly move, so that a few steps at a rate nobody warmed up to stay finite."""
FALLING: Final = 0.1
"""Of the peak learning rate: enough for a loss to fall, and to show what trains otherwise, without any warm-up."""
_OF_SAVING: Final = ("keep", "keep_best", "keep_every", "background", "on_failure")
_OF_MEASURING: Final = ("communication", "trace", "nvtx")

Assignment = tuple[str, Any]


def measuring_patch(recipe: Recipe, steps: int, said: Patch, lr_share: float = STILL) -> Patch:
    """Return what makes of `recipe` a run of `steps` counted steps after the warm-up, and of nothing but steps.

    Speed does not depend on the learning rate, so it is constant, at `lr_share` of its peak. What a user has `said` of
    evaluating, saving, progressive sizes and logging stands; a length in percent is one of the whole run, which this
    is not, and goes. So does what slows steps down to measure them: that is done in runs of their own.
    """
    keys = {path for path, _ in said.assignments}
    assignments: list[Assignment] = [
        ("train.steps", recipe.measure.warmup_steps + steps),
        ("schedule.name", "constant"),
        ("optim.lr", _rounded(recipe.optim.lr * lr_share)),
        ("measure.clock", "on"),
    ]
    if isinstance(recipe.optim, Muon):
        assignments.append(("optim.sgd_lr", _rounded(recipe.optim.sgd_lr * lr_share)))
    if "train.eval_every" not in keys:
        assignments += [("train.eval_every", "off"), ("train.stop", "off"), ("train.eval_train", "off")]
    assignments += nothing_saved(recipe, said)
    if not any(key.startswith("data.progressive") for key in keys):
        assignments.append(("data.progressive", "off"))
    if str(recipe.log.every).endswith("%"):
        assignments += defaults(recipe, "log", ("every",))
    if str(recipe.parallel.check_replicas).endswith("%"):
        assignments.append(("parallel.check_replicas", "off"))
    assignments += defaults(recipe, "measure", _OF_MEASURING)
    assignments.append(("log.report", "off"))  # a profile writes one when all is measured
    return without_what_is_so(recipe, assignments)


def nothing_saved(recipe: Recipe, said: Patch) -> list[Assignment]:
    """Return what turns checkpoints off, and nothing where a user has `said` when they are to be written."""
    if any(path == "checkpoint.every" for path, _ in said.assignments):
        return []
    return [("checkpoint.every", "off"), *defaults(recipe, "checkpoint", _OF_SAVING)]


def defaults(recipe: Recipe, section: str, names: tuple[str, ...]) -> list[Assignment]:
    """Return what sets fields of a section back to what the schema says."""
    fields = type(getattr(recipe, section)).model_fields
    return [(f"{section}.{name}", fields[name].default) for name in names]


def without_what_is_so(recipe: Recipe, assignments: list[Assignment]) -> Patch:
    """Return the patch of those assignments that change `recipe`, which is what a person is to read.

    Where one changes the variant of a section, the fields of that section after it are kept.
    """
    kept: list[Assignment] = []
    renamed: set[str] = set()
    for path, value in assignments:
        section, _, leaf = path.rpartition(".")
        if section in renamed or setting_of(recipe, path) != value:
            kept.append((path, value))
            renamed |= {section} if leaf == "name" and section in ("optim", "schedule") else set()
    return Patch(tuple(kept))


def setting_of(recipe: Recipe, path: str) -> object:
    """Return a setting as it is written: a duration or a section as text, anything else as it is.

    None where there is no such field: nothing is set below an `off`, nor is what another variant would have.
    """
    found: Any = recipe
    for name in path.split("."):
        found = getattr(found, name, None) if isinstance(found, Section) else None
    return found if found is None or isinstance(found, bool | int | float) else str(found)


def _rounded(lr: float) -> float:
    return float(f"{lr:.6g}")
