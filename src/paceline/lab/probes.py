"""Probes of a profile: the same short run with part of its work removed. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import RecipeError
from paceline.lab.patches import Assignment, drop_unchanged_settings, reset_to_defaults
from paceline.lab.trial import Trial, apply_patch
from paceline.recipe.load import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Muon, OptimSection
from paceline.recipe.schema.train import Parallel

BASE: Final = "base"
TRACE: Final = "trace"
BUCKETS: Final = "buckets"
FREE_DATA: Final = "free-data"
FREE_COPY: Final = "free-copy"
FREE_COMMUNICATION: Final = "free-communication"
FREE_MODEL: Final = "free-model"

_SYNC_FIELDS: Final = ("compression", "powersgd_rank", "static_graph", "check_replicas")
_MODEL_FIELDS: Final = ("norm", "width", "zero_init_residual", "drop_path", "weights", "freeze", "unfreeze", "lora")


@dataclass(frozen=True)
class SkippedProbe:
    """A probe that did not fit or failed, and the reason in one line."""

    name: str
    reason: str


def build_base_trial(repeats: int) -> Trial:
    """Return the base run, without instrumentation."""
    return Trial(BASE, repeats=repeats)


def build_instrumented_trials(recipe: Recipe, ranks: int, steps: int, user_patch: Patch, *, trace: bool) -> list[Trial]:
    """Return the instrumented run, which is slower and not compared with others, or no run.

    It is traced if `trace` or the recipe asks for it, and times DDP's buckets unless `user_patch` turns that off.
    """
    measure, trials = recipe.measure, []
    is_set_by_user = any(path == "measure.communication" for path, _ in user_patch.assignments)
    is_timed = _averages_gradients(recipe.parallel, ranks) and (measure.communication == "on" or not is_set_by_user)
    timed: tuple[Assignment, ...] = (("measure.communication", "on"),) if is_timed else ()
    if trace or measure.trace != "off":
        length = steps if measure.trace == "off" else measure.trace
        trials.append(Trial(TRACE, Patch((("measure.trace", length), *timed))))
    elif is_timed:
        trials.append(Trial(BUCKETS, Patch(timed)))
    return trials


def build_probes(recipe: Recipe, ranks: int, repeats: int) -> tuple[list[Trial], list[SkippedProbe]]:
    """Return the probes that fit `recipe`, and those that do not."""
    trials: list[Trial] = []
    skipped: list[SkippedProbe] = []
    for name, explains, assignments in _iter_probes(recipe, ranks):
        patch = drop_unchanged_settings(recipe, assignments)
        try:
            apply_patch(recipe, patch)
        except RecipeError as error:
            skipped.append(SkippedProbe(name, str(error)))
        else:
            trials.append(Trial(name, patch, repeats, explains))
    return trials, skipped


def _iter_probes(recipe: Recipe, ranks: int) -> Iterator[tuple[str, str, list[Assignment]]]:
    """Yield name, explanation and settings of each probe: the first setting removes work, the others only clean up."""
    for name, replay, explains in (
        (FREE_DATA, "host", "making batches on the host"),
        (FREE_COPY, "device", "making and copying batches"),
    ):
        if recipe.data.replay not in (replay, "device"):
            yield name, explains, [("data.replay", replay), ("log.samples", False)]
    if _averages_gradients(recipe.parallel, ranks):
        cleanup = reset_to_defaults(recipe.parallel, "parallel", _SYNC_FIELDS)
        yield FREE_COMMUNICATION, "averaging gradients", [("parallel.sync_gradients", False), *cleanup]
    if recipe.model.name != "empty":
        cleanup = [
            ("train.compile", "off"),
            *reset_to_defaults(recipe.model, "model", _MODEL_FIELDS),
            *_build_optimizer_overrides(recipe.optim),
        ]
        if recipe.model.memory_format == "channels_last":
            # `auto` is the same format, without the error for a model without convolutions.
            cleanup.append(("model.memory_format", "auto"))
        yield FREE_MODEL, "computing; data loading and the loop remain", [("model.name", "empty"), *cleanup]


def _averages_gradients(section: Parallel, ranks: int) -> bool:
    return ranks > 1 and section.strategy == "ddp" and section.sync_gradients


def _build_optimizer_overrides(section: OptimSection) -> list[Assignment]:
    # The empty model has no matrices, norms, biases or layers, which some optimizer settings require.
    layers: list[Assignment] = [] if section.layer_decay == "off" else [("optim.layer_decay", "off")]
    if isinstance(section, Muon):
        return [("optim.name", "sgd"), ("optim.lr", section.lr), *layers]
    return [("optim.norm_and_bias_lr", 1.0), *layers]
