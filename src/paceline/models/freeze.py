"""Freeze parameters (`model.freeze`), and switch models between training and evaluation mode."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.units import count
from paceline.models.layers import BATCH_NORMS
from paceline.models.structure import find_classifier
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.model import Model


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context with `model` in evaluation mode, which restores the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Call the model's own `train()`, which may do more than set modes, then correct each module: the default
        # `train()` would put frozen modules into training mode.
        for module, was_training in modes:  # from the root down, as each call changes all descendants
            if module is model or module.training != was_training:
                module.train(was_training)


@contextlib.contextmanager
def use_batch_statistics(model: nn.Module) -> Iterator[bool]:
    """Return a context in which trained BatchNorm layers use batch statistics and keep their running ones.

    All other modules are in evaluation mode. Yield whether `model` has such layers; frozen and SyncBatchNorm ones do
    not count.
    """
    # No subclasses: SyncBatchNorm would communicate, and the other ranks may not take part. Other ones may do
    # something else in training.
    norms = [
        each
        for each in model.modules()
        if isinstance(each, BATCH_NORMS) and type(each) in BATCH_NORMS and each.training
    ]
    tracking = [each.track_running_stats for each in norms]
    with eval_mode(model):
        for each in norms:
            each.training, each.track_running_stats = True, False  # neither reads nor updates the buffers
        try:
            yield bool(norms)
        finally:
            for each, tracks in zip(norms, tracking, strict=True):
                each.training, each.track_running_stats = False, tracks


def find_modules_set_to_train(modes_before: dict[str, bool], model: nn.Module) -> list[str]:
    """Return the names of modules that were in evaluation mode and now are in training mode."""
    return [name for name, module in model.named_modules() if module.training and not modes_before.get(name, True)]


def record_modes(model: nn.Module) -> dict[str, bool]:
    """Return for each module by name whether it is in training mode."""
    return {name: module.training for name, module in model.named_modules()}


def freeze_parameters(section: Model, model: nn.Module, num_classes: int) -> None:
    """Set `requires_grad=False` on the parameters that `section.freeze` names, in place.

    Raise `RecipeError` for a pattern without a match, if no parameter is left to train, and for `backbone` if the
    classifier cannot be identified.
    """
    if section.freeze == "off":
        return
    named = list(model.named_parameters(remove_duplicate=False))  # tied parameters match by either name
    _check_patterns(section, [name for name, _ in named])
    frozen = list_frozen(section, model, num_classes)
    if not frozen:
        raise RecipeError(
            f"model.freeze: backbone has no effect on {section.name}, which is a classifier alone (set off)"
        )
    own = next((name for name, each in named if name in frozen and not each.requires_grad), "")
    if own and section.unfreeze != "off":
        raise RecipeError(
            f"model.unfreeze: {own!r} of {section.name}, which its own code freezes, would train "
            "(name the others in model.freeze, or set model.unfreeze=off)"
        )
    set_trained(model, frozen, is_trained=False)  # the optimizer, weight decay and DDP skip them
    if not any(parameter.requires_grad for _, parameter in named):
        raise RecipeError(
            f"model.freeze: {_format_freeze(section)} freezes every parameter of {section.name} (leave some to train)"
        )


def list_frozen(section: Model, model: nn.Module, num_classes: int) -> frozenset[str]:
    """Return the names of the parameters that `section.freeze` matches; of tied ones, every name."""
    if section.freeze == "off":
        return frozenset()
    is_frozen = _build_frozen_predicate(section, model, num_classes)
    named = list(model.named_parameters(remove_duplicate=False))
    frozen = {parameter for name, parameter in named if is_frozen(name)}
    return frozenset(name for name, parameter in named if parameter in frozen)


def set_trained(model: nn.Module, names: Collection[str], *, is_trained: bool) -> None:
    """Set `requires_grad` of the parameters `names` of `model`, in place."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(is_trained)


def set_training_mode(section: Model, model: nn.Module, num_classes: int) -> None:
    """Call the model's own `train()`, then put its frozen modules into evaluation mode, in place."""
    model.train()
    if section.freeze == "off" and section.lora == "off":
        return
    is_frozen = _build_frozen_predicate(section, model, num_classes)
    for name, module in model.named_modules():
        if module.training and _is_fully_frozen(name, module, is_frozen):
            module.eval()  # the running statistics of a frozen BatchNorm do not change


def describe_trained_parameters(
    section: Model, model: nn.Module, unfrozen: Collection[str] = (), step: int = 0
) -> str | None:
    """Return a sentence with the number of trained parameters, or None without frozen ones.

    The parameters `unfrozen` are trained from global step `step` on.
    """
    if section.freeze == "off":
        return None
    parameters = list(model.named_parameters())
    trained = sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for _, parameter in parameters)
    if unfrozen:
        later = sum(each.numel() for name, each in parameters if each.requires_grad or name in unfrozen)
        return (
            f"model.unfreeze: {trained:,} parameters of {total:,} are trained in the first {count(step, 'step')}, "
            f"then {later:,}"
        )
    is_random = section.weights == "off" and not is_plugin_name(section.name)
    more = "; the others keep their random initial values (set model.weights)" if is_random else ""
    return f"model.freeze: {trained:,} parameters of {total:,} are trained{more}"


def _build_frozen_predicate(section: Model, model: nn.Module, num_classes: int) -> Callable[[str], bool]:
    """Return a predicate on tensor names."""
    if section.lora != "off":
        return lambda name: True
    if section.freeze != "backbone":
        return lambda name: any(fnmatchcase(name, pattern) for pattern in section.freeze)
    classifier = find_classifier(model, num_classes)
    if not classifier:
        raise RecipeError(
            f"model.freeze: backbone is not known of {section.name}, whose last linear or convolutional layer does not "
            f"have {num_classes} outputs (give patterns of names)"
        )
    return lambda name: name.rpartition(".")[0] not in classifier


def _check_patterns(section: Model, names: Iterable[str]) -> None:
    if isinstance(section.freeze, str):
        return
    known = list(names)
    for pattern in section.freeze:
        if any(fnmatchcase(name, pattern) for name in known):
            continue
        raise RecipeError(
            f"model.freeze: {pattern!r} matches no parameter of {section.name}{_suggest_pattern(pattern, known)}"
        )


def _suggest_pattern(pattern: str, names: list[str]) -> str:
    if any(name.startswith(f"{pattern}.") for name in names):
        return f" (write '{pattern}.*')"
    if pattern in ("off", "backbone"):
        return f" (write model.freeze={pattern})"
    return suggest_similar(pattern, names) or f" (one is {names[0]!r})"


def _is_fully_frozen(path: str, module: nn.Module, is_frozen: Callable[[str], bool]) -> bool:
    """Return whether nothing in `module` is trained."""
    parameters = list(module.parameters())
    if parameters:
        return not any(parameter.requires_grad for parameter in parameters)
    # A norm without affine parameters is frozen if the patterns match its running statistics.
    buffers = [f"{path}.{name}" for name, _ in module.named_buffers()]
    return bool(buffers) and all(map(is_frozen, buffers))


def _format_freeze(section: Model) -> str:
    return section.freeze if isinstance(section.freeze, str) else f"[{', '.join(section.freeze)}]"
