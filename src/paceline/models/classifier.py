"""Find the classifier of a model: the layers that compute the logits."""

from torch import Tensor, nn


def layer_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of linear and convolutional layers by layer name; the classifier's is the last."""
    layers = (each for each in model.named_modules() if isinstance(each[1], nn.Linear | nn.Conv2d))
    return {name: module.weight for name, module in layers}


def find_classifier(model: nn.Module, num_classes: int) -> tuple[str, ...]:
    """Return the names of the layers that compute the `num_classes` logits, or () if unknown.

    These are the last linear or convolutional layer and siblings with as many outputs and dimensions, such as the
    second head of a distilled transformer.
    """
    weights = layer_weights(model)
    last = next(reversed(weights), None)
    if last is None or len(weights[last]) != num_classes:
        return ()
    beside = [
        name
        for name in weights
        if _get_parent_name(name) == _get_parent_name(last) and weights[name].ndim == weights[last].ndim
    ]
    return tuple(name for name in beside if len(weights[name]) == num_classes)


def _get_parent_name(name: str) -> str:
    """Return the parent module of a layer; timm's `head_dist.linear` counts as part of its `head`."""
    return name.rpartition(".")[0].replace("_dist", "")
