"""Build the optimizer of a recipe and its parameter groups.

Each group has a `weight_decay` and an `lr_factor`, its learning rate relative to the run's. Norms and biases are the
parameters with fewer than two dimensions. With `layer_decay` each group belongs to one `layer`.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import RecipeError
from paceline.core.units import count
from paceline.models.structure import number_layers
from paceline.recipe.plugins import OPTIMIZER, PluginRef
from paceline.recipe.schema import optim as schema
from paceline.training.optim.layerwise import Lamb, Lars, NovoGrad
from paceline.training.optim.muon import Muon
from paceline.training.optim.schedule_free import ScheduleFree

ParamGroup = dict[str, Any]
SplitGroups = Callable[[list[ParamGroup]], list[ParamGroup]]
_GROUP_FIELDS = {
    *("name", "implementation", "lr_scaling", "base_batch_size"),
    *("weight_decay", "decay_norm_and_bias", "norm_and_bias_lr", "layer_decay"),
}
"""Fields that the schedule, the parameter groups and the kernel flags use."""
_CLASSES: Mapping[type[schema.OptimSection], Callable[..., torch.optim.Optimizer]] = {
    schema.Sgd: torch.optim.SGD,
    schema.Adam: torch.optim.Adam,
    schema.AdamW: torch.optim.AdamW,
    schema.RmsProp: partial(torch.optim.RMSprop, foreach=True),
    schema.NovoGrad: NovoGrad,
    schema.Lars: Lars,
    schema.Lamb: Lamb,
    schema.ScheduleFree: ScheduleFree,
}
_FUSED_DEVICES = ("cpu", "cuda")
"""Devices with fused kernels, which are fastest; on CPUs measured by benchmarks/optimizers.py."""


def parameter_groups(section: schema.OptimSection, parameters: Sequence[nn.Parameter]) -> list[ParamGroup]:
    """Return a group of weights and one of norms and biases, or a single group if their settings agree.

    LARS and LAMB scale only weights by layer. Raise `RecipeError` for `norm_and_bias_lr` without norms and biases.
    """
    weights, norms_and_biases = _split_by_dimension(section, parameters)
    options: ParamGroup = {"weight_decay": section.weight_decay, "lr_factor": 1.0}
    norm_bias_options: ParamGroup = {
        "weight_decay": _norm_and_bias_decay(section),
        "lr_factor": section.norm_and_bias_lr,
    }
    if isinstance(section, schema.Lars | schema.Lamb):
        options["layerwise"], norm_bias_options["layerwise"] = True, False
    if options == norm_bias_options:
        return [{"params": list(parameters), **options}]
    return _drop_empty_groups([{"params": weights, **options}, {"params": norms_and_biases, **norm_bias_options}])


def muon_groups(section: schema.Muon, parameters: Sequence[nn.Parameter]) -> list[ParamGroup]:
    """Return groups of matrices, the classifier (the last 2-D parameter), vectors, and norms and biases.

    Matrices flatten to more than one row and column. `parameters` has frozen ones too, such as the classifier. Raise
    `RecipeError` without matrices, and for a `classifier_lr` or `norm_and_bias_lr` without effect.
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
    norm_bias_factor = sgd_factor * section.norm_and_bias_lr
    return _drop_empty_groups(
        [
            {"params": matrices, "weight_decay": decay, "lr_factor": 1.0, **muon},
            {"params": classifier, "weight_decay": decay, "lr_factor": classifier_factor, **sgd},
            {"params": rows, "weight_decay": decay, "lr_factor": sgd_factor, **sgd},
            {
                "params": norms_and_biases,
                "weight_decay": _norm_and_bias_decay(section),
                "lr_factor": norm_bias_factor,
                **sgd,
            },
        ]
    )


def split_by_layer(groups: Sequence[ParamGroup], layers: Mapping[nn.Parameter, int], decay: float) -> list[ParamGroup]:
    """Split `groups` by `layer`, in order; the rate of layer l of L is multiplied by `decay ** (L - 1 - l)`."""
    last = max(layers.values())
    split_groups: list[ParamGroup] = []
    for group in groups:
        for layer in sorted({layers[parameter] for parameter in group["params"]}):
            members = [parameter for parameter in group["params"] if layers[parameter] == layer]
            factor = group["lr_factor"] * decay ** (last - layer)
            split_groups.append({**group, "params": members, "lr_factor": factor, "layer": layer})
    return split_groups


def split_late(groups: Sequence[ParamGroup], late: Collection[nn.Parameter]) -> list[ParamGroup]:
    """Split `groups` into parameters that are trained from the start, and those that are unfrozen `late`."""
    # Some optimizers keep state per group, and would take the first step of late parameters for a later one.
    parts = [
        {**group, "params": [each for each in group["params"] if (each in late) is is_late]}
        for group in groups
        for is_late in (False, True)
    ]
    return _drop_empty_groups(parts)


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


def _split_twice(split: SplitGroups, groups: list[ParamGroup], late: Collection[nn.Parameter]) -> list[ParamGroup]:
    return split_late(split(groups), late)


def _drop_empty_groups(groups: list[ParamGroup]) -> list[ParamGroup]:
    return [group for group in groups if group["params"]]


def layers_for_decay(section: schema.OptimSection, model: nn.Module) -> dict[str, int]:
    """Return the layer number of each parameter, before sharding; empty without layer decay.

    Raise `RecipeError` if only the last layer is trained.
    """
    if section.layer_decay == "off":
        return {}
    layers = number_layers(model)
    trained = {layers[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trained == {max(layers.values(), default=0)}:
        raise RecipeError(
            f"optim.layer_decay: {section.layer_decay:g} has no effect, as the last layer alone is trained (set "
            f"optim.layer_decay=off)"
        )
    return layers


def describe_layer_decay(
    section: schema.OptimSection, optimizer: torch.optim.Optimizer, layers: Mapping[str, int]
) -> str:
    """Return a note on the layer decay, or an empty string without it.

    For example `optim.layer_decay: 14 layers of 14 learn, at 0.0238 (layer 0) to 1 (layer 13) times the rate`.
    """
    if not layers or section.layer_decay == "off":
        return ""
    learn, last = {group["layer"] for group in optimizer.param_groups}, max(layers.values())
    ends = (f"{section.layer_decay ** (last - layer):.3g} (layer {layer})" for layer in (min(learn), max(learn)))
    return f"optim.layer_decay: {count(len(learn), 'layer')} of {last + 1} learn, at {' to '.join(ends)} times the rate"


def build_optimizer(
    section: schema.OptimSection,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    device_type: str,
    layers: Mapping[str, int] | None = None,
    late: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters, in model order, at learning rate `section.lr`.

    `layers` is from `layers_for_decay`, and `late` are the names of parameters that are unfrozen later. Raise
    `RecipeError` for a model without trainable parameters, and for a setting that has no effect or does not support
    sharded parameters (FSDP).
    """
    named = list(named_parameters)
    parameters = [parameter for _, parameter in named]
    if not any(parameter.requires_grad for parameter in parameters):
        raise RecipeError("model.name: the model has no trainable parameter (give it one with requires_grad)")
    is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    split: SplitGroups = list
    if section.layer_decay != "off":
        assert layers, "layer_decay needs the layers of the model"
        numbers = {parameter: layers[name] for name, parameter in named}
        split = partial(split_by_layer, layers=numbers, decay=section.layer_decay)
    if late:
        split = partial(_split_twice, split, late={parameter for name, parameter in named if name in late})
    optimizer = _build_from_section(section, parameters, device_type, split, is_sharded=is_sharded)
    set_lr(optimizer.param_groups, section.lr)
    return optimizer


def set_lr(groups: Iterable[ParamGroup], lr: float) -> None:
    """Set the learning rate of every group to `lr` times its `lr_factor`."""
    for group in groups:
        group["lr"] = lr * group["lr_factor"]


def _build_from_section(
    section: schema.OptimSection,
    parameters: list[nn.Parameter],
    device_type: str,
    split: SplitGroups,
    *,
    is_sharded: bool,
) -> torch.optim.Optimizer:
    if isinstance(section, schema.Muon):
        return _build_muon(section, parameters, split, is_sharded=is_sharded)
    groups = split(parameter_groups(section, [parameter for parameter in parameters if parameter.requires_grad]))
    if isinstance(section, schema.OwnOptim):
        return _build_plugin_optimizer(section, groups)
    options: dict[str, Any] = section.model_dump(exclude=_GROUP_FIELDS)
    if isinstance(section, schema.Sgd | schema.Adam):
        options |= _kernel_flags(section, device_type, is_sharded=is_sharded)
    return _CLASSES[type(section)](groups, **options)


def _build_muon(section: schema.Muon, parameters: list[nn.Parameter], split: SplitGroups, *, is_sharded: bool) -> Muon:
    if is_sharded:
        raise RecipeError("optim.name: muon needs whole matrices, and FSDP shards them (set parallel.strategy=ddp)")
    groups = split(muon_groups(section, parameters))
    # bfloat16 has two digits, too few for a float64 run.
    dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.bfloat16
    steps, rescale = section.newton_schulz_steps, section.rescale
    return Muon(groups, lr=section.lr, newton_schulz_steps=steps, rescale=rescale, dtype=dtype)


def _build_plugin_optimizer(section: schema.OwnOptim, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    plugin = PluginRef("optim", section.name, section.args, OPTIMIZER)
    optimizer = plugin.make(groups, lr=section.lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise plugin.error(f"makes a {type(optimizer).__name__}, not a torch.optim.Optimizer (derive it from that)")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise plugin.error(f"cannot be used: its step() needs more than gradients: {error} (take another)") from None
    if any("lr_factor" not in group for group in optimizer.param_groups):
        raise plugin.error(
            "does not keep the groups it is given (hand them to torch.optim.Optimizer.__init__ as they are)"
        )
    return optimizer


def _kernel_flags(section: schema.Sgd | schema.Adam, device_type: str, *, is_sharded: bool) -> dict[str, bool]:
    """Return torch's flags for `implementation`. Fused SGD does not support sharded parameters, fused Adam does."""
    can_fuse = not (is_sharded and isinstance(section, schema.Sgd))
    match section.implementation:
        case "fused" if not can_fuse:
            raise RecipeError(
                "optim.implementation: fused SGD does not support sharded parameters (set optim.implementation=foreach)"
            )
        case "fused":
            return {"fused": True}
        case "foreach":
            return {"foreach": True}
        case "loop":
            return {"foreach": False, "fused": False}
        case "auto":
            return {"fused": True} if can_fuse and device_type in _FUSED_DEVICES else {"foreach": True}
