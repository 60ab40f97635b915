"""Turn a recipe into a short measured run: no evaluation, no checkpoints, constant learning rate. Pure."""

from typing import Any, Final

from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Muon
from paceline.recipe.schema.section import Section

STILL: Final = 1e-3
"""Share of the peak learning rate at which weights hardly move, so that steps without LR warm-up stay finite."""
FALLING: Final = 0.1
"""Share of the peak learning rate at which the loss falls, to detect changed training, without LR warm-up."""
_OF_SAVING: Final = ("keep", "keep_best", "keep_every", "background", "on_failure")
_OF_MEASURING: Final = ("communication", "trace", "nvtx")

Assignment = tuple[str, Any]


def measuring_patch(recipe: Recipe, steps: int, user_patch: Patch, lr_share: float = STILL) -> Patch:
    """Return the patch that turns `recipe` into a run of `steps` measured steps after the measurement warm-up.

    The learning rate is constant at `lr_share` of its peak. The user's own settings (`said`) of evaluation,
    checkpoints, progressive sizes and logging are kept. Lengths in percent are dropped, as they refer to the whole run;
    so are measurements that slow down steps, which get their own runs.
    """
    keys = {path for path, _ in user_patch.assignments}
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
    assignments += nothing_saved(recipe, user_patch)
    if not any(key.startswith("data.progressive") for key in keys):
        assignments.append(("data.progressive", "off"))
    if str(recipe.log.every).endswith("%"):
        assignments += defaults(recipe, "log", ("every",))
    if str(recipe.parallel.check_replicas).endswith("%"):
        assignments.append(("parallel.check_replicas", "off"))
    assignments += defaults(recipe, "measure", _OF_MEASURING)
    assignments.append(("log.report", "off"))  # a profile writes one report at its end
    return without_what_is_so(recipe, assignments)


def nothing_saved(recipe: Recipe, user_patch: Patch) -> list[Assignment]:
    """Return the settings that turn checkpoints off, or none if the user (`said`) set `checkpoint.every`."""
    if any(path == "checkpoint.every" for path, _ in user_patch.assignments):
        return []
    return [("checkpoint.every", "off"), *defaults(recipe, "checkpoint", _OF_SAVING)]


def defaults(recipe: Recipe, section: str, names: tuple[str, ...]) -> list[Assignment]:
    """Return the settings that reset fields of a section to the schema's defaults."""
    fields = type(getattr(recipe, section)).model_fields
    return [(f"{section}.{name}", fields[name].default) for name in names]


def without_what_is_so(recipe: Recipe, assignments: list[Assignment]) -> Patch:
    """Return the patch with those assignments that change `recipe`.

    If one changes the variant of a section, later fields of that section are kept.
    """
    changed: list[Assignment] = []
    renamed: set[str] = set()
    for path, value in assignments:
        section, _, leaf = path.rpartition(".")
        if section in renamed or setting_of(recipe, path) != value:
            changed.append((path, value))
            renamed |= {section} if leaf == "name" and section in ("optim", "schedule") else set()
    return Patch(tuple(changed))


def setting_of(recipe: Recipe, path: str) -> object:
    """Return a setting as written: durations and sections as text, other values unchanged.

    None if there is no such field, for example below an `off` or in another variant.
    """
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name, None) if isinstance(value, Section) else None
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _rounded(lr: float) -> float:
    return float(f"{lr:.6g}")
