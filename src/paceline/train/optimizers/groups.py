"""Parameter groups: weight decay, learning rate and algorithm.

Each group has a `weight_decay` and an `lr_factor`, its learning rate relative to the run's. Norms and biases are the
parameters with fewer than two dimensions. With `layer_decay` each group belongs to one `layer`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from paceline.core.errors import RecipeError
from paceline.recipe.schema import optim as schema

ParamGroup = dict[str, Any]


def parameter_groups(section: schema.OptimSection, parameters: Sequence[nn.Parameter]) -> list[ParamGroup]:
    """Return a group of weights and one of norms and biases, or a single group if their settings agree.

    LARS and LAMB scale by layer in the first only (`layerwise`). Raise `RecipeError` for `norm_and_bias_lr` without
    norms and biases.
    """
    weights, norms_and_biases = _split_by_dimension(section, parameters)
    options: ParamGroup = {"weight_decay": section.weight_decay, "lr_factor": 1.0}
    spared: ParamGroup = {"weight_decay": _norm_and_bias_decay(section), "lr_factor": section.norm_and_bias_lr}
    if isinstance(section, schema.Lars | schema.Lamb):
        options["layerwise"], spared["layerwise"] = True, False
    if options == spared:
        return [{"params": list(parameters), **options}]
    return _drop_empty_groups([{"params": weights, **options}, {"params": norms_and_biases, **spared}])


def muon_groups(section: schema.Muon, parameters: Sequence[nn.Parameter]) -> list[ParamGroup]:
    """Return groups of matrices, the classifier (the last 2-D parameter), vectors, and norms and biases.

    Matrices are parameters that flatten to more than one row and column. `parameters` are all of the model's, since the
    classifier may be frozen. Raise `RecipeError` without matrices, and for a `classifier_lr` or `norm_and_bias_lr`
    without effect.
    """
    weights, norms_and_biases = _split_by_dimension(
        section, [parameter for parameter in parameters if parameter.requires_grad]
    )
    last = [parameter for parameter in parameters if parameter.ndim == 2][-1:]
    classifier = [parameter for parameter in last if parameter.requires_grad]
    others = [weight for weight in weights if all(weight is not each for each in classifier)]
    matrices = [weight for weight in others if min(len(weight), weight.numel() // len(weight)) > 1]
    # Orthogonalizing one row or column, such as a layer scale [C, 1, 1], would discard its length.
    rows = [weight for weight in others if all(weight is not each for each in matrices)]
    if not matrices:
        raise RecipeError(
            "optim.name: muon needs filters or inner matrices to train, and there are none (set optim.name=sgd)"
        )
    if not classifier and section.classifier_lr != 1.0:
        raise RecipeError(
            f"optim.classifier_lr: {section.classifier_lr:g} has no effect, as no weight of the model is a plain "
            f"matrix (set optim.classifier_lr=1)"
        )
    decay, sgd_factor = section.weight_decay, section.sgd_lr / section.lr
    muon = {"is_matrix": True, "momentum": section.momentum, "nesterov": section.nesterov}
    sgd = {"is_matrix": False, "momentum": section.sgd_momentum, "nesterov": True}
    classifier_factor = sgd_factor * section.classifier_lr
    spared_factor = sgd_factor * section.norm_and_bias_lr
    return _drop_empty_groups(
        [
            {"params": matrices, "weight_decay": decay, "lr_factor": 1.0, **muon},
            {"params": classifier, "weight_decay": decay, "lr_factor": classifier_factor, **sgd},
            {"params": rows, "weight_decay": decay, "lr_factor": sgd_factor, **sgd},
            {
                "params": norms_and_biases,
                "weight_decay": _norm_and_bias_decay(section),
                "lr_factor": spared_factor,
                **sgd,
            },
        ]
    )


def split_by_layer(groups: Sequence[ParamGroup], layers: Mapping[nn.Parameter, int], decay: float) -> list[ParamGroup]:
    """Split `groups` by layer, first layer first, each with its own learning rate.

    The rate of layer l of L is multiplied by `decay ** (L - 1 - l)`. `layers` includes frozen parameters. Every group
    gets its `layer`.
    """
    last = max(layers.values())
    divided: list[ParamGroup] = []
    for group in groups:
        for layer in sorted({layers[parameter] for parameter in group["params"]}):
            members = [parameter for parameter in group["params"] if layers[parameter] == layer]
            factor = group["lr_factor"] * decay ** (last - layer)
            divided.append({**group, "params": members, "lr_factor": factor, "layer": layer})
    return divided


def _split_by_dimension(
    section: schema.OptimSection, parameters: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return weights, and norms and biases, in model order."""
    weights = [parameter for parameter in parameters if parameter.ndim >= 2]
    norms_and_biases = [parameter for parameter in parameters if parameter.ndim < 2]
    if section.norm_and_bias_lr != 1.0 and not norms_and_biases:
        raise RecipeError(
            f"optim.norm_and_bias_lr: {section.norm_and_bias_lr:g} has no effect, as the model trains no norms or "
            f"biases (set optim.norm_and_bias_lr=1)"
        )
    return weights, norms_and_biases


def _norm_and_bias_decay(section: schema.OptimSection) -> float:
    return section.weight_decay if section.decay_norm_and_bias else 0.0


def _drop_empty_groups(groups: list[ParamGroup]) -> list[ParamGroup]:
    return [group for group in groups if group["params"]]
