"""Merge patches of a recipe, and build the patch of a short run that is only measured. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from paceline.lab.trial import apply_patch
from paceline.recipe.load import ALTERNATIVES, Patch, iter_settings
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import Section
from paceline.recipe.schema.optim import Muon
from paceline.recipe.schema.recipe import Checkpoint
from paceline.recipe.schema.source import Lmdb, Pack
from paceline.recipe.schema.train import NEEDS_EVALUATION

SOURCE_SECTION: Final = "data.source"
_VARIANT_SECTIONS: Final = (SOURCE_SECTION, "optim", "schedule")
"""Sections whose fields are dropped when another `name` is chosen."""
TINY_LR_SHARE: Final = 1e-3
"""Share of the peak learning rate at which weights hardly move, so that steps without LR warm-up stay finite."""
REDUCED_LR_SHARE: Final = 0.1
"""Share of the peak learning rate at which the loss falls, to detect changed training, without LR warm-up."""
_CHECKPOINT_FIELDS: Final = ("keep", "keep_best", "keep_every", "background", "on_failure")
_MEASURE_FIELDS: Final = ("communication", "trace", "nvtx")
_ENDING_FIELDS: Final = ("patience", "max_time")
"""Fields of `train` that would end a measured run before its last step."""
Assignment = tuple[str, Any]


def merge_patches(recipe: Recipe, below: Patch, added: Patch) -> Patch:
    """Return `added` on top of `below`; fields of a variant that `added` replaces are dropped.

    Raise `RecipeError` if `below` does not fit `recipe`.
    """
    added = flatten_patch(added)
    for path, name in added.assignments:
        section, _, leaf = path.rpartition(".")
        is_variant = leaf == "name" and section in _VARIANT_SECTIONS
        if is_variant and name != get_setting(apply_patch(recipe, below), path):
            # A patch is one layer of a recipe, in which a field of the previous variant would be an error.
            below = drop_section(below, section)
    overridden = expand_equivalent_paths(path for path, _ in added.assignments)
    remaining = (each for each in below.assignments if each[0] not in overridden)
    return Patch((*remaining, *added.assignments))


def expand_equivalent_paths(paths: Iterable[str]) -> set[str]:
    """Return `paths` and the fields that set the same value in another unit (`ALTERNATIVES`)."""
    expanded = set(paths)
    for section, *names in ALTERNATIVES:
        equivalents = {f"{section}.{name}" for name in names}
        expanded |= equivalents if expanded & equivalents else set()
    return expanded


def flatten_patch(patch: Patch) -> Patch:
    """Return the patch with one entry per field: `optim={name: adam}` becomes `optim.name=adam`."""
    return Patch(tuple(each for path, value in patch.assignments for each in iter_settings({path: value})))


def drop_section(patch: Patch, section: str) -> Patch:
    """Return `patch` without the settings of a section."""
    return Patch(
        tuple(each for each in patch.assignments if each[0] != section and not each[0].startswith(f"{section}."))
    )


def build_source_patch(source: Pack | Lmdb) -> Patch:
    """Return the patch that selects `source`."""
    return Patch(((f"{SOURCE_SECTION}.name", source.name), (f"{SOURCE_SECTION}.root", source.root)))


def build_measurement_patch(recipe: Recipe, steps: int, user_patch: Patch, lr_share: float = TINY_LR_SHARE) -> Patch:
    """Return the patch that turns `recipe` into a run of `steps` measured steps after the measurement warm-up.

    The learning rate is constant at `lr_share` of its peak. Settings in `user_patch` of evaluation, checkpoints,
    progressive sizes and logging are kept.
    """
    schedule: list[Assignment] = [("schedule.name", "constant")]
    return _build_short_run_patch(recipe, recipe.measure.warmup_steps + steps, user_patch, lr_share, schedule)


def build_range_test_patch(recipe: Recipe, steps: int, low: float, high: float) -> Patch:
    """Return the patch that turns `recipe` into a learning-rate range test of `steps` steps.

    `optim.lr` rises from `low` to `high`, and with it every rate that the optimizer derives from it. The loss of every
    step is logged.
    """
    schedule: list[Assignment] = [
        ("schedule.name", "range_test"),
        ("schedule.start", _round_lr(low / high)),
        ("log.every", "1st"),
    ]
    return _build_short_run_patch(recipe, steps, Patch(), high / recipe.optim.lr, schedule)


def _build_short_run_patch(
    recipe: Recipe, steps: int, user_patch: Patch, lr_share: float, schedule: list[Assignment]
) -> Patch:
    # Lengths in percent refer to the whole run and are dropped; measurements that slow down steps get their own runs.
    keys = {path for path, _ in user_patch.assignments}
    assignments: list[Assignment] = [
        ("train.steps", steps),
        *schedule,
        ("optim.lr", _round_lr(recipe.optim.lr * lr_share)),
        ("measure.clock", "on"),
    ]
    if isinstance(recipe.optim, Muon):
        assignments.append(("optim.sgd_lr", _round_lr(recipe.optim.sgd_lr * lr_share)))
    reset: tuple[str, ...] = _ENDING_FIELDS
    if "train.eval_every" not in keys:
        assignments.append(("train.eval_every", "off"))
        reset = tuple(dict.fromkeys((*NEEDS_EVALUATION, *_ENDING_FIELDS)))
    assignments += reset_to_defaults(recipe.train, "train", reset)
    assignments += disable_checkpoints(recipe.checkpoint, user_patch)
    if not any(key.startswith("data.progressive") for key in keys):
        assignments.append(("data.progressive", "off"))
    if ("log.every", "1st") not in schedule and str(recipe.log.every).endswith("%"):
        assignments += reset_to_defaults(recipe.log, "log", ("every",))
    if str(recipe.parallel.check_replicas).endswith("%"):
        assignments.append(("parallel.check_replicas", "off"))
    assignments += reset_to_defaults(recipe.measure, "measure", _MEASURE_FIELDS)
    assignments.append(("log.report", "off"))  # a profile writes one report at its end
    return drop_unchanged_settings(recipe, assignments)


def disable_checkpoints(section: Checkpoint, user_patch: Patch) -> list[Assignment]:
    """Return the settings that turn checkpoints off, none if `user_patch` sets `checkpoint.every`."""
    if any(path == "checkpoint.every" for path, _ in user_patch.assignments):
        return []
    return [("checkpoint.every", "off"), *reset_to_defaults(section, "checkpoint", _CHECKPOINT_FIELDS)]


def reset_to_defaults(section: Section, path: str, names: tuple[str, ...]) -> list[Assignment]:
    """Return the settings that reset fields of the section at `path` to the schema's defaults."""
    return [(f"{path}.{name}", type(section).model_fields[name].default) for name in names]


def drop_unchanged_settings(recipe: Recipe, assignments: list[Assignment]) -> Patch:
    """Return the patch of those assignments that change `recipe`."""
    changed: list[Assignment] = []
    renamed: set[str] = set()
    for path, value in assignments:
        section, _, leaf = path.rpartition(".")
        # After a change of variant the old recipe says nothing about fields of the new one, so keep them all.
        if section in renamed or get_setting(recipe, path) != value:
            changed.append((path, value))
            renamed |= {section} if leaf == "name" and section in ("optim", "schedule") else set()
    return Patch(tuple(changed))


def get_setting(section: Section, path: str) -> object:
    """Return a setting below `section` as written: durations, sections and lists as text, but () if it is empty.

    None if there is no such field.
    """
    value: Any = section
    for name in path.split("."):
        value = getattr(value, name, None) if isinstance(value, Section) else None
    is_plain = value is None or value == () or isinstance(value, bool | int | float)
    return value if is_plain else str(value)


def _round_lr(lr: float) -> float:
    return float(f"{lr:.6g}")
