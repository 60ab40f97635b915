"""Build a model from the recipe's section `model`: built-in, torchvision, timm or plugin."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError, suggest_similar
from paceline.models.airbench import SpeedNet
from paceline.models.freeze import freeze_parameters
from paceline.models.layers import BATCH_NORMS
from paceline.models.resnet_cifar import ResNet, build_basic_block, build_bottleneck_block
from paceline.models.wide_resnet import WideResNet
from paceline.recipe.plugins import MODEL, PluginRef
from paceline.recipe.schema.base import IMPORT_PATH_FORM, is_plugin_name
from paceline.recipe.schema.model import BUILT_IN_MODELS_ONLY, Model

_BUILTIN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18_cifar": partial(ResNet, make_block=build_basic_block, depths=(2, 2, 2, 2), stem_kernel=3),
    "resnet34_cifar": partial(ResNet, make_block=build_basic_block, depths=(3, 4, 6, 3), stem_kernel=3),
    "resnet50_cifar": partial(ResNet, make_block=build_bottleneck_block, depths=(3, 4, 6, 3), stem_kernel=3),
    "resnet50_nersc": partial(ResNet, make_block=build_bottleneck_block, depths=(3, 4, 6, 3), stem_kernel=7),
    "wideresnet_course": WideResNet,
    "speednet94": partial(SpeedNet, block_channels=(64, 256, 256), batch_norm_momentum=0.4, is_residual=False),
    "speednet95": partial(SpeedNet, block_channels=(128, 384, 384), batch_norm_momentum=0.4, is_residual=False),
    "speednet96": partial(SpeedNet, block_channels=(128, 384, 512), batch_norm_momentum=0.1, is_residual=True),
}
MODEL_NAMES: tuple[str, ...] = tuple(_BUILTIN_MODELS)
"""Built-in models without `empty`. Only these support `width` and all values of `norm`."""
_UNSUPPORTED_FIELDS: dict[str, tuple[str, ...]] = {
    "wideresnet_course": ("zero_init_residual",),  # branches end in a ReLU: initialized to zero, they would stay zero
    "speednet94": ("zero_init_residual", "drop_path"),  # no residual branches
    "speednet95": ("zero_init_residual", "drop_path"),
    "speednet96": ("zero_init_residual",),  # norms have no learned scale that could move away from zero
    "empty": BUILT_IN_MODELS_ONLY,
}
_RESIDUAL_MODELS = tuple(name for name in _BUILTIN_MODELS if name not in _UNSUPPORTED_FIELDS)


class EmptyModel(nn.Module):
    """A linear classifier of the mean of each channel, to measure a run without the cost of a model.

    Maps images, float [N, channels, H, W], to logits, float [N, num_classes].
    """

    def __init__(self, *, num_classes: int, channels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(channels, num_classes)  # weights for the optimizer, DDP and checkpoints

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`."""
        logits: Tensor = self.classifier(images.mean(dim=(2, 3)))
        return logits


def adapt_input_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution of an untrained `model`, in place, by one with `channels` input channels.

    Kernel size, stride, padding, bias, device and dtype are kept.
    """
    name, conv = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    if conv.in_channels == channels:
        return
    assert conv.groups == 1, f"{name} is a grouped convolution: it does not read the image"
    replacement = nn.Conv2d(
        channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        conv.dilation,  # type: ignore[arg-type]
        bias=conv.bias is not None,
        padding_mode=conv.padding_mode,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    with torch.no_grad():
        # Resampling the old weights keeps the distribution of the initialization without knowing its scheme. The scale
        # is exact for schemes by fan-out (ResNet, VGG, EfficientNet). A scheme by fan-in would differ by a factor of
        # sqrt(old_channels / channels).
        replacement.weight.copy_(_resample_filters(conv.weight, replacement.weight.shape))
    if conv.bias is not None:
        replacement.bias = conv.bias
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)


def _resample_filters(weight: Tensor, shape: torch.Size) -> Tensor:
    chosen = torch.randint(weight.numel(), shape, device=weight.device)
    return weight.flatten()[chosen]


def set_drop_path(model: nn.Module, drop_path: float) -> bool:
    """Scale the stochastic depth of a torchvision `model`, in place, to a largest probability of `drop_path`.

    Return False if the model has none.
    """
    from torchvision.ops import StochasticDepth

    branches = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    largest = max((branch.p for branch in branches), default=0.0)
    if largest == 0:
        return False
    for branch in branches:
        branch.p = drop_path * (branch.p / largest)
    return True


def check_sync_batch_norm(model: nn.Module, name: str) -> None:
    """Raise `RecipeError` if the BatchNorm layers of model `name` cannot be converted to SyncBatchNorm."""
    batch_norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    if not batch_norms:
        raise RecipeError(
            f"model.norm: sync_batch has no effect on {name}, which has no batch norms (set model.norm=batch)"
        )
    # timm's BatchNormAct2d includes the activation, which replacing the norm would lose.
    if any(type(module) not in BATCH_NORMS for module in batch_norms):
        raise RecipeError(
            f"model.norm: sync_batch cannot replace the batch norms of {name}, which hold activations too "
            "(set model.norm=batch, or use a torchvision: model)"
        )


def build_model(section: Model, *, num_classes: int, channels: int, image_size: int | None = None) -> nn.Module:
    """Build the untrained model: float images [N, channels, H, W] to logits [N, num_classes].

    A model for images of one size, such as many vision transformers, is built for `image_size` pixels squared, by
    default for its own size.

    Initial weights depend on torch's global generator alone; `section.weights` is not loaded. Parameters in
    `section.freeze` get `requires_grad=False`. Raise `RecipeError` for an unknown name, for a plugin that
    cannot be built, and for a setting without effect on this model.
    """
    # Options of the section override a library's own defaults.
    library, colon, name = section.name.partition(":")
    match library, colon:
        case "torchvision", ":":
            model = _build_torchvision(section, name, num_classes, channels, image_size)
        case "timm", ":":
            model = _build_timm(section, name, num_classes, channels, image_size)
        case _ if is_plugin_name(section.name):
            model = _build_plugin(section, num_classes, channels)
        case _:
            model = _build_builtin(section, num_classes, channels)
    if section.norm == "sync_batch":
        check_sync_batch_norm(model, section.name)
    freeze_parameters(section, model, num_classes)
    return model


def _build_builtin(section: Model, num_classes: int, channels: int) -> nn.Module:
    name = section.name
    known = _BUILTIN_MODELS | {"empty": EmptyModel}
    if name not in known:
        full_name = _find_library_name(name)
        if full_name:
            raise RecipeError(f"model.name: {name!r} is not a model (did you mean {full_name!r}?)")
        bare = name.partition(":")[2]
        raise _unknown_model_error(name, [*known, *([f"torchvision:{bare}", f"timm:{bare}"] if bare else [])])
    without = _UNSUPPORTED_FIELDS.get(name, ())
    for field in without:
        if section.is_set(field):
            others = [each for each in MODEL_NAMES if field not in _UNSUPPORTED_FIELDS.get(each, ())]
            raise _no_effect_error(section, field, f"one of {', '.join(others)}")
    settings = {field: getattr(section, field) for field in BUILT_IN_MODELS_ONLY if field not in without}
    return known[name](num_classes=num_classes, channels=channels, **settings)


def _find_library_name(bare: str) -> str:
    """Return the full name of a torchvision or timm model given without its library, or ""."""
    import timm
    from torchvision import models

    libraries = {"torchvision": models.list_models(module=models), "timm": timm.list_models()}
    for library, names in libraries.items():
        name = next((each for each in names if each.casefold() == bare.casefold()), "")
        if name:
            return f"{library}:{name}"
    return ""


def _build_plugin(section: Model, num_classes: int, channels: int) -> nn.Module:
    _check_no_builtin_fields(section)
    for field in ("zero_init_residual", "drop_path"):
        if section.is_set(field):
            raise _no_effect_error(section, field, f"model.args, or one of {', '.join(_RESIDUAL_MODELS)}")
    plugin = PluginRef("model", section.name, section.args, MODEL)
    model = plugin.make(num_classes=num_classes, in_channels=channels)
    if not isinstance(model, nn.Module):
        raise plugin.error(f"makes a {type(model).__name__}, not a torch.nn.Module (return a module)")
    return model


def check_library_model(name: str) -> None:
    """Raise `RecipeError` if timm or torchvision has no classifier of the full `name`."""
    library, _, bare = name.partition(":")
    if library == "timm":
        import timm

        if timm.is_model(bare):
            return
        known = timm.list_models()
    else:
        from torchvision import models

        # With `module`, only classifiers are listed: no detection, segmentation, video or quantized networks.
        known = models.list_models(module=models)
    if bare not in known:
        raise _unknown_model_error(name, [f"{library}:{other}" for other in known])


def _build_torchvision(section: Model, name: str, num_classes: int, channels: int, image_size: int | None) -> nn.Module:
    from torchvision import models

    check_library_model(section.name)
    _check_no_builtin_fields(section)
    options: dict[str, Any] = {**section.args}
    if image_size is not None and models.get_model_builder(name).__module__ == models.vision_transformer.__name__:
        options["image_size"] = image_size
    if name in ("googlenet", "inception_v3"):
        # One output instead of three; passing `init_weights`, although it is the default, avoids a warning.
        options |= {"aux_logits": False, "init_weights": True}
    if section.zero_init_residual:
        if models.get_model_builder(name).__module__ != models.resnet.__name__:
            raise _no_effect_error(
                section, "zero_init_residual", f"one of {', '.join(_RESIDUAL_MODELS)} or a torchvision:resnet"
            )
        options["zero_init_residual"] = True
    with _explain_args(section):
        model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    if not set_drop_path(model, section.drop_path) and section.drop_path > 0:
        raise _no_effect_error(
            section, "drop_path", f"one of {', '.join(_RESIDUAL_MODELS)} or torchvision's convnext or swin"
        )
    adapt_input_channels(model, channels)
    return model


def _build_timm(section: Model, name: str, num_classes: int, channels: int, image_size: int | None) -> nn.Module:
    import timm

    check_library_model(section.name)
    _check_no_builtin_fields(section)
    fields = {"drop_path_rate": "drop_path", "zero_init_last": "zero_init_residual"}
    options = {option: getattr(section, field) for option, field in fields.items()}
    args: dict[str, Any] = section.args
    config = timm.get_pretrained_cfg(name)
    is_dynamic = args.get("dynamic_img_size") or args.get("strict_img_size") is False
    if image_size is not None and config is not None and config.fixed_input_size and not is_dynamic:
        # Its own size is not passed on, as a few models with a fixed size do not take the argument.
        options |= {"img_size": image_size} if image_size != config.input_size[-1] else {}
    # timm does not list a model's options, so drop those that it rejects one by one.
    while True:
        try:
            with _explain_args(section, passed_on=options):
                model: nn.Module = timm.create_model(
                    name, pretrained=False, num_classes=num_classes, in_chans=channels, **options, **args
                )
                return model
        except TypeError as error:
            unknown = next((option for option in options if f"'{option}'" in str(error)), None)
            if unknown is None:
                raise
        if unknown in fields and section.is_set(fields[unknown]):
            raise _no_effect_error(section, fields[unknown], f"one of {', '.join(_RESIDUAL_MODELS)} or timm:resnet50")
        del options[unknown]


@contextlib.contextmanager
def _explain_args(section: Model, passed_on: Collection[str] = ()) -> Iterator[None]:
    """Convert any error of a library's model with `model.args`, but a `TypeError` about one of `passed_on`."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:150]
        if not section.args or any(f"'{option}'" in reason for option in passed_on):
            raise
        raise RecipeError(f"model.args: {section.name} does not take {section.args}: {reason} (change them)") from None


def _check_no_builtin_fields(section: Model) -> None:
    for field in ("norm", "width"):
        if section.is_set(field) and getattr(section, field) != "sync_batch":
            raise _no_effect_error(section, field, f"one of {', '.join(MODEL_NAMES)}")


def _no_effect_error(section: Model, field: str, alternative: str) -> RecipeError:
    value, default = (str(each).lower() for each in (getattr(section, field), Model.model_fields[field].default))
    return RecipeError(
        f"model.{field}: {value} has no effect on {section.name} (set model.{field}={default}, or use {alternative})"
    )


def _unknown_model_error(name: str, known: Iterable[str]) -> RecipeError:
    hint = (
        suggest_similar(name, known)
        or f" (use one of {', '.join(MODEL_NAMES)}, torchvision:NAME, timm:NAME or {IMPORT_PATH_FORM})"
    )
    return RecipeError(f"model.name: {name!r} is not a model{hint}")
