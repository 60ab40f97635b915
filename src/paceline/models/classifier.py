"""Find the classifier of a network, whoever wrote it: the layers that give the logits."""

from torch import Tensor, nn


def filters(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the linear and convolutional layers by the layers' names: the classifier's is the last."""
    layers = (each for each in model.named_modules() if isinstance(each[1], nn.Linear | nn.Conv2d))
    return {name: module.weight for name, module in layers}


def classifier_of(model: nn.Module, num_classes: int) -> tuple[str, ...]:
    """Return the names of the layers that give the `num_classes` logits, none where they cannot be told.

    That is the last linear or convolutional layer, and those beside it that have as many outputs and dimensions, such
    as the second head of a distilled transformer.
    """
    weights = filters(model)
    last = next(reversed(weights), None)
    if last is None or len(weights[last]) != num_classes:
        return ()
    beside = [name for name in weights if _place(name) == _place(last) and weights[name].ndim == weights[last].ndim]
    return tuple(name for name in beside if len(weights[name]) == num_classes)


def _place(name: str) -> str:
    """Return the module that a layer is in. timm's `head_dist.linear` is one of its `head`."""
    return name.rpartition(".")[0].replace("_dist", "")
