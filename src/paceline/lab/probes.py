"""Probes: a few steps of a recipe, and the same with a part of the work for free. Pure: what to measure, as patches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.lab.trial import Trial, vary
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Muon

BASE: Final = "base"
TRACE: Final = "trace"
BUCKETS: Final = "buckets"
FREE_DATA: Final = "free-data"
FREE_COPY: Final = "free-copy"
FREE_COMMUNICATION: Final = "free-communication"
FREE_MODEL: Final = "free-model"

_LR_SHARE: Final = 1e-3
"""Of the peak learning rate: weights hardly move, so that a few steps at a rate nobody warmed up to stay finite."""
_OF_SAVING: Final = ("keep", "keep_best", "keep_every", "background", "on_failure")
_OF_MEASURING: Final = ("communication", "trace", "nvtx")
_OF_SYNC: Final = ("compression", "powersgd_rank", "static_graph", "check_replicas")
_OF_MODEL: Final = ("norm", "width", "zero_init_residual", "drop_path", "weights")

Assignment = tuple[str, Any]


@dataclass(frozen=True)
class LeftOut:
    """A probe that does not fit the recipe or has failed, and why in one line."""

    name: str
    reason: str


def measuring_patch(recipe: Recipe, steps: int, said: Patch) -> Patch:
    """Return what makes of `recipe` a run of `steps` counted steps after the warm-up, and of nothing but steps.

    Speed does not depend on the learning rate, so it is small and constant. What a user has `said` of evaluating,
    saving, progressive sizes and logging stands; a length in percent is one of the whole run, which this is
    not, and goes. So does what slows steps down to measure them: that is done in runs of their own.
    """
    keys = {path for path, _ in said.assignments}
    assignments: list[Assignment] = [
        ("train.steps", recipe.measure.warmup_steps + steps),
        ("schedule.name", "constant"),
        ("optim.lr", _small(recipe.optim.lr)),
        ("measure.clock", "on"),
    ]
    if isinstance(recipe.optim, Muon):
        assignments.append(("optim.sgd_lr", _small(recipe.optim.sgd_lr)))
    if "train.eval_every" not in keys:
        assignments += [("train.eval_every", "off"), ("train.stop", "off"), ("train.eval_train", "off")]
    if "checkpoint.every" not in keys:
        assignments += [("checkpoint.every", "off"), *_defaults(recipe, "checkpoint", _OF_SAVING)]
    if not any(key.startswith("data.progressive") for key in keys):
        assignments.append(("data.progressive", "off"))
    if str(recipe.log.every).endswith("%"):
        assignments += _defaults(recipe, "log", ("every",))
    if str(recipe.parallel.check_replicas).endswith("%"):
        assignments.append(("parallel.check_replicas", "off"))
    assignments += _defaults(recipe, "measure", _OF_MEASURING)
    assignments.append(("log.report", "off"))  # a profile writes one when all is measured
    return _without_what_is_so(recipe, assignments)


def base_trial(repeats: int) -> Trial:
    """Return the run that all others are compared with. As in them, nothing is measured in it but its stages."""
    return Trial(BASE, repeats=repeats)


def aside_trials(recipe: Recipe, ranks: int, steps: int, said: Patch, *, trace: bool) -> list[Trial]:
    """Return the run that is compared with none, as it is slower for what is measured in it; often there is no such.

    It is traced where `trace` or the recipe, which is the one that was asked for, wants it; a length that it sets
    stands. Between ranks of ddp buckets are timed in the same run, unless a user has `said` that they are not to be.
    """
    measure, trials = recipe.measure, []
    is_said = any(path == "measure.communication" for path, _ in said.assignments)
    is_timed = _averages(recipe, ranks) and (measure.communication == "on" or not is_said)
    timed: tuple[Assignment, ...] = (("measure.communication", "on"),) if is_timed else ()
    if trace or measure.trace != "off":
        length = steps if measure.trace == "off" else measure.trace
        trials.append(Trial(TRACE, Patch((("measure.trace", length), *timed))))
    elif is_timed:
        trials.append(Trial(BUCKETS, Patch(timed)))
    return trials


def probes_of(recipe: Recipe, ranks: int, repeats: int) -> tuple[list[Trial], list[LeftOut]]:
    """Return the probes that fit `recipe`, and those that do not."""
    trials: list[Trial] = []
    left_out: list[LeftOut] = []
    for name, explains, assignments in _probes(recipe, ranks):
        patch = _without_what_is_so(recipe, assignments)
        try:
            vary(recipe, patch)
        except RecipeError as error:
            left_out.append(LeftOut(name, str(error)))
        else:
            trials.append(Trial(name, patch, repeats, explains))
    return trials, left_out


def _probes(recipe: Recipe, ranks: int) -> Iterator[tuple[str, str, list[Assignment]]]:
    """Yield name, what is free, and the assignments: the first makes it so, the others have no effect beside it."""
    for name, place, explains in (
        (FREE_DATA, "host", "making batches on the host"),
        (FREE_COPY, "device", "making and copying batches"),
    ):
        if recipe.data.replay not in (place, "device"):
            yield name, explains, [("data.replay", place), ("log.samples", False)]
    if _averages(recipe, ranks):
        needless = _defaults(recipe, "parallel", _OF_SYNC)
        yield FREE_COMMUNICATION, "averaging gradients", [("parallel.sync_gradients", False), *needless]
    if recipe.model.name != "empty":
        needless = [("train.compile", "off"), *_defaults(recipe, "model", _OF_MODEL), *_simple_optimizer(recipe)]
        if recipe.model.memory_format == "channels_last":
            needless.append(("model.memory_format", "auto"))  # which is the same, and no claim
        yield FREE_MODEL, "computing: what is left is data and the loop", [("model.name", "empty"), *needless]


def _averages(recipe: Recipe, ranks: int) -> bool:
    return ranks > 1 and recipe.parallel.strategy == "ddp" and recipe.parallel.sync_gradients


def _simple_optimizer(recipe: Recipe) -> list[Assignment]:
    """Return what an optimizer asks of its model that an empty one does not have: matrices, norms and biases."""
    if isinstance(recipe.optim, Muon):
        return [("optim.name", "sgd"), ("optim.lr", recipe.optim.lr)]
    return [("optim.norm_and_bias_lr", 1.0)]


def _defaults(recipe: Recipe, section: str, names: tuple[str, ...]) -> list[Assignment]:
    """Return what sets fields of a section back to what the schema says."""
    fields = type(getattr(recipe, section)).model_fields
    return [(f"{section}.{name}", fields[name].default) for name in names]


def _without_what_is_so(recipe: Recipe, assignments: list[Assignment]) -> Patch:
    """Return the patch of those assignments that change `recipe`, which is what a person is to read.

    Where one changes the variant of a section, the fields of that section after it are kept.
    """
    kept: list[Assignment] = []
    renamed: set[str] = set()
    for path, value in assignments:
        section, _, leaf = path.rpartition(".")
        if section in renamed or _found(recipe, path) != value:
            kept.append((path, value))
            renamed |= {section} if leaf == "name" and section in ("optim", "schedule") else set()
    return Patch(tuple(kept))


def _found(recipe: Recipe, path: str) -> object:
    """Return a setting as it is written: a duration or a section as text, anything else as it is."""
    found: Any = recipe
    for name in path.split("."):
        found = getattr(found, name)
    return found if isinstance(found, bool | int | float) else str(found)


def _small(lr: float) -> float:
    return float(f"{lr * _LR_SHARE:.6g}")
