"""Freeze parameters (`model.freeze`), and keep fully frozen modules in evaluation mode.

Frozen parameters have `requires_grad=False`, so the optimizer, weight decay and DDP skip them. In evaluation mode the
running statistics of a frozen BatchNorm do not change.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn

from paceline.core.errors import RecipeError, suggest_similar
from paceline.models.classifier import find_classifier
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.own import is_own_model


def freeze_parameters(section: Model, model: nn.Module, num_classes: int) -> None:
    """Freeze the parameters of `model` that `section.freeze` names, in place.

    Raise `RecipeError` for a pattern that matches nothing, if no parameter is left to train, and for `backbone` if the
    classifier cannot be identified.
    """
    if section.freeze == "off":
        return
    named = list(model.named_parameters(remove_duplicate=False))
    _check_patterns(section, [name for name, _ in named])
    is_frozen = _build_frozen_predicate(section, model, num_classes)
    frozen = [parameter for name, parameter in named if is_frozen(name)]
    if not frozen:
        raise RecipeError(
            f"model.freeze: backbone has no effect on {section.name}, which is a classifier alone (set off)"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise RecipeError(
            f"model.freeze: {_format_freeze(section)} freezes every parameter of {section.name} (leave some to train)"
        )


def set_training_mode(section: Model, model: nn.Module, num_classes: int) -> None:
    """Put `model` into training mode by its own `train()`, in place, and its frozen modules into evaluation mode."""
    model.train()
    if section.freeze == "off":
        return
    is_frozen = _build_frozen_predicate(section, model, num_classes)
    for name, module in model.named_modules():
        if module.training and _is_fully_frozen(name, module, is_frozen):
            module.eval()


def describe_trained_parameters(section: Model, model: nn.Module) -> str | None:
    """Return a sentence with the number of trained parameters, or None if `section` freezes none."""
    if section.freeze == "off":
        return None
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    drawn = section.weights == "off" and not is_own_model(section.name)
    more = "; the others keep their random initial values (set model.weights)" if drawn else ""
    return f"model.freeze: {trained:,} parameters of {total:,} are trained{more}"


def _build_frozen_predicate(section: Model, model: nn.Module, num_classes: int) -> Callable[[str], bool]:
    """Return a predicate on tensor names: True if the tensor is frozen."""
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
    """Return a hint at what to write in place of `pattern`, which matches none of `names`."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f" (write '{pattern}.*')"
    if pattern in ("off", "backbone"):
        return f" (write model.freeze={pattern})"
    return suggest_similar(pattern, names) or f" (one is {names[0]!r})"


def _is_fully_frozen(path: str, module: nn.Module, is_frozen: Callable[[str], bool]) -> bool:
    """Return whether nothing in `module` is trained, judging a module without parameters by its buffers' names."""
    parameters = list(module.parameters())
    if parameters:
        return not any(parameter.requires_grad for parameter in parameters)
    buffers = [f"{path}.{name}" for name, _ in module.named_buffers()]
    return bool(buffers) and all(map(is_frozen, buffers))


def _format_freeze(section: Model) -> str:
    return section.freeze if isinstance(section.freeze, str) else f"[{', '.join(section.freeze)}]"
