"""From a recipe's `model` section to a network: our own, torchvision's or timm's."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from paceline.core.errors import RecipeError, near_miss
from paceline.models.resnet_cifar import ResNet, basic_block, bottleneck_block
from paceline.models.surgery import adapt_input_channels
from paceline.models.wide_resnet import WideResNet
from paceline.recipe.schema.recipe import Model

_OURS: dict[str, Callable[..., nn.Module]] = {
    "resnet18_cifar": partial(ResNet, make_block=basic_block, depths=(2, 2, 2, 2), stem_kernel=3),
    "resnet34_cifar": partial(ResNet, make_block=basic_block, depths=(3, 4, 6, 3), stem_kernel=3),
    "resnet50_cifar": partial(ResNet, make_block=bottleneck_block, depths=(3, 4, 6, 3), stem_kernel=3),
    "resnet50_nersc": partial(ResNet, make_block=bottleneck_block, depths=(3, 4, 6, 3), stem_kernel=7),
    "wideresnet_course": WideResNet,
}
MODEL_NAMES: tuple[str, ...] = tuple(_OURS)
"""Our own networks; `norm` and `width` are theirs alone."""


def build_model(section: Model, *, num_classes: int, channels: int) -> nn.Module:
    """Build the untrained network that maps float [N, channels, H, W] to logits [N, num_classes].

    Weights depend on torch's global generator alone. Raise `RecipeError` for an unknown name, for timm where
    it is not installed, and for a `norm` or `width` that the named network does not have.
    """
    library, colon, name = section.name.partition(":")
    match library, colon:
        case "torchvision", ":":
            model = _build_torchvision(name, num_classes, channels)
            _refuse_own_settings(section)
            return model
        case "timm", ":":
            model = _build_timm(name, num_classes, channels)
            _refuse_own_settings(section)
            return model
    if section.name not in _OURS:
        raise _unknown(section.name, [*MODEL_NAMES, f"torchvision:{name}", f"timm:{name}"])
    build = _OURS[section.name]
    return build(num_classes=num_classes, channels=channels, width=section.width, norm=section.norm)


def _refuse_own_settings(section: Model) -> None:
    for field in ("norm", "width"):
        value, default = getattr(section, field), Model.model_fields[field].default
        if value != default:
            raise RecipeError(
                f"model.{field}: {value} has no effect on {section.name} "
                f"(set model.{field}={default}, or use one of {', '.join(MODEL_NAMES)})"
            )


def _build_torchvision(name: str, num_classes: int, channels: int) -> nn.Module:
    from torchvision import models

    # With `module`, only classifiers are listed: no detection, segmentation, video or quantised networks.
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown(f"torchvision:{name}", [f"torchvision:{other}" for other in known])
    options: dict[str, bool] = {}
    if name in ("googlenet", "inception_v3"):
        # One output instead of three; and saying `init_weights`, which is their default, avoids a warning.
        options = {"aux_logits": False, "init_weights": True}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    adapt_input_channels(model, channels)
    return model


def _build_timm(name: str, num_classes: int, channels: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise RecipeError(f"model.name: timm:{name} needs timm (pip install 'paceline[timm]')") from error

    known = timm.list_models()
    if name not in known:
        raise _unknown(f"timm:{name}", [f"timm:{other}" for other in known])
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=channels)
    return model


def _unknown(name: str, known: Iterable[str]) -> RecipeError:
    hint = near_miss(name, known) or f" (use one of {', '.join(MODEL_NAMES)}, torchvision:NAME or timm:NAME)"
    return RecipeError(f"model.name: {name!r} is not a model{hint}")
