"""Build a model from a recipe's `model` section: built-in, torchvision, timm or plugin.

Options that the section names replace a library's own defaults. Pretrained weights are loaded by `pretrained.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from paceline.core.errors import RecipeError, near_miss
from paceline.models.empty import Empty
from paceline.models.freezing import freeze
from paceline.models.resnet_cifar import ResNet, basic_block, bottleneck_block
from paceline.models.speednet import SpeedNet
from paceline.models.surgery import adapt_input_channels, check_can_synchronise, set_drop_path
from paceline.models.wide_resnet import WideResNet
from paceline.recipe.own import NETWORK, Own
from paceline.recipe.schema.model import OF_OUR_NETWORKS, Model
from paceline.recipe.schema.own import OWN, is_own_model

_OURS: dict[str, Callable[..., nn.Module]] = {
    "resnet18_cifar": partial(ResNet, make_block=basic_block, depths=(2, 2, 2, 2), stem_kernel=3),
    "resnet34_cifar": partial(ResNet, make_block=basic_block, depths=(3, 4, 6, 3), stem_kernel=3),
    "resnet50_cifar": partial(ResNet, make_block=bottleneck_block, depths=(3, 4, 6, 3), stem_kernel=3),
    "resnet50_nersc": partial(ResNet, make_block=bottleneck_block, depths=(3, 4, 6, 3), stem_kernel=7),
    "wideresnet_course": WideResNet,
    "speednet94": partial(SpeedNet, block_channels=(64, 256, 256), batch_norm_momentum=0.4, is_residual=False),
    "speednet95": partial(SpeedNet, block_channels=(128, 384, 384), batch_norm_momentum=0.4, is_residual=False),
    "speednet96": partial(SpeedNet, block_channels=(128, 384, 512), batch_norm_momentum=0.1, is_residual=True),
}
_PROBES: dict[str, Callable[..., nn.Module]] = {"empty": Empty}
MODEL_NAMES: tuple[str, ...] = tuple(_OURS)
"""Built-in models, without probes. Only these take `width` and most values of `norm`."""

_WITHOUT: dict[str, tuple[str, ...]] = {
    "wideresnet_course": ("zero_init_residual",),  # branches end in a ReLU: initialized to zero, they would stay zero
    "speednet94": ("zero_init_residual", "drop_path"),  # no residual branches
    "speednet95": ("zero_init_residual", "drop_path"),
    "speednet96": ("zero_init_residual",),  # norms have no learned scale that could move away from zero
    "empty": OF_OUR_NETWORKS,
}
_RESIDUAL = tuple(name for name in _OURS if name not in _WITHOUT)


def build_model(section: Model, *, num_classes: int, channels: int) -> nn.Module:
    """Build the untrained model: float images [N, channels, H, W] to logits [N, num_classes].

    Initial weights depend on torch's global generator alone. `section.weights` is not loaded here; parameters that
    `section.freeze` names get `requires_grad=False`. Raise `RecipeError` for an unknown name, for timm if it is not
    installed, for a plugin that cannot be built, and for a setting without effect on this model.
    """
    library, colon, name = section.name.partition(":")
    match library, colon:
        case "torchvision", ":":
            model = _build_torchvision(section, name, num_classes, channels)
        case "timm", ":":
            model = _build_timm(section, name, num_classes, channels)
        case _ if is_own_model(section.name):
            model = _build_own(section, num_classes, channels)
        case _:
            model = _build_ours(section, num_classes, channels)
    if section.norm == "sync_batch":
        check_can_synchronise(model, section.name)
    freeze(section, model, num_classes)
    return model


def _build_ours(section: Model, num_classes: int, channels: int) -> nn.Module:
    name = section.name
    known = _OURS | _PROBES
    if name not in known:
        in_full = _of_a_library(name)
        if in_full:
            raise RecipeError(f"model.name: {name!r} is not a model (did you mean {in_full!r}?)")
        bare = name.partition(":")[2]
        raise _unknown(name, [*known, *([f"torchvision:{bare}", f"timm:{bare}"] if bare else [])])
    without = _WITHOUT.get(name, ())
    for field in without:
        if _is_set(section, field):
            others = [each for each in MODEL_NAMES if field not in _WITHOUT.get(each, ())]
            raise _no_effect(section, field, f"one of {', '.join(others)}")
    settings = {field: getattr(section, field) for field in OF_OUR_NETWORKS if field not in without}
    return known[name](num_classes=num_classes, channels=channels, **settings)


def _of_a_library(bare: str) -> str:
    """Return the full name of a torchvision or timm model given without its library, or ""."""
    from torchvision import models

    libraries = {"torchvision": models.list_models(module=models)}
    if find_spec("timm"):
        import timm

        libraries["timm"] = timm.list_models()
    for library, names in libraries.items():
        name = next((each for each in names if each.casefold() == bare.casefold()), "")
        if name:
            return f"{library}:{name}"
    return ""


def _build_own(section: Model, num_classes: int, channels: int) -> nn.Module:
    _refuse_own_settings(section)
    for field in ("zero_init_residual", "drop_path"):
        if _is_set(section, field):
            raise _no_effect(section, field, f"model.args, or one of {', '.join(_RESIDUAL)}")
    plugin = Own("model", section.name, section.args, NETWORK)
    model = plugin.make(num_classes=num_classes, in_channels=channels)
    if not isinstance(model, nn.Module):
        raise plugin.lacks(f"makes a {type(model).__name__}, not a torch.nn.Module (return a module)")
    return model


def _build_torchvision(section: Model, name: str, num_classes: int, channels: int) -> nn.Module:
    from torchvision import models

    # With `module`, only classifiers are listed: no detection, segmentation, video or quantised networks.
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown(section.name, [f"torchvision:{other}" for other in known])
    _refuse_own_settings(section)
    options: dict[str, bool] = {}
    if name in ("googlenet", "inception_v3"):
        # One output instead of three; passing `init_weights`, although it is the default, avoids a warning.
        options = {"aux_logits": False, "init_weights": True}
    if section.zero_init_residual:
        if models.get_model_builder(name).__module__ != models.resnet.__name__:
            raise _no_effect(section, "zero_init_residual", f"one of {', '.join(_RESIDUAL)} or a torchvision:resnet")
        options["zero_init_residual"] = True
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    if not set_drop_path(model, section.drop_path) and section.drop_path > 0:
        raise _no_effect(section, "drop_path", f"one of {', '.join(_RESIDUAL)} or torchvision's convnext or swin")
    adapt_input_channels(model, channels)
    return model


def _build_timm(section: Model, name: str, num_classes: int, channels: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise RecipeError(f"model.name: timm:{name} needs timm (pip install 'paceline[timm]')") from error

    known = timm.list_models()
    if name not in known:
        raise _unknown(section.name, [f"timm:{other}" for other in known])
    _refuse_own_settings(section)
    create = partial(timm.create_model, name, pretrained=False, num_classes=num_classes, in_chans=channels)
    fields = {"drop_path_rate": "drop_path", "zero_init_last": "zero_init_residual"}
    return _create_with(create, fields, section)


def _create_with(create: Callable[..., nn.Module], fields: Mapping[str, str], section: Model) -> nn.Module:
    """Call `create` with those options that it accepts; `fields` maps options to fields of the section."""
    options: dict[str, Any] = {option: getattr(section, field) for option, field in fields.items()}
    # timm has no list of a model's options, so drop the ones that it rejects one by one.
    while True:
        try:
            return create(**options)
        except TypeError as error:
            unknown = next((option for option in options if f"'{option}'" in str(error)), None)
            if unknown is None:
                raise
        if _is_set(section, fields[unknown]):
            raise _no_effect(section, fields[unknown], f"one of {', '.join(_RESIDUAL)} or timm:resnet50")
        del options[unknown]


def _refuse_own_settings(section: Model) -> None:
    for field in ("norm", "width"):
        if _is_set(section, field) and getattr(section, field) != "sync_batch":
            raise _no_effect(section, field, f"one of {', '.join(MODEL_NAMES)}")


def _is_set(section: Model, field: str) -> bool:
    is_default: bool = getattr(section, field) == Model.model_fields[field].default
    return not is_default


def _no_effect(section: Model, field: str, alternative: str) -> RecipeError:
    value, default = (str(each).lower() for each in (getattr(section, field), Model.model_fields[field].default))
    return RecipeError(
        f"model.{field}: {value} has no effect on {section.name} (set model.{field}={default}, or use {alternative})"
    )


def _unknown(name: str, known: Iterable[str]) -> RecipeError:
    hint = near_miss(name, known) or f" (use one of {', '.join(MODEL_NAMES)}, torchvision:NAME, timm:NAME or {OWN})"
    return RecipeError(f"model.name: {name!r} is not a model{hint}")
