"""Load pretrained weights from safetensors and `.pth` files."""

import os
import shlex
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.models.structure import layer_weights

_NESTED_KEYS = ("state_dict", "model", "encoder")
"""Keys of the state dict in files that hold more; `encoder` is I-JEPA's."""
_MAX_NAMED = 3
_PREFIXES = ("module.", "_orig_mod.")
_BATCH_COUNTER = "num_batches_tracked"
"""Buffer of BatchNorm that files from before torch 0.4.1 lack, such as torchvision's first ResNets; not used."""
_AUX_PREFIXES = ("aux1.", "aux2.", "AuxLogits.")
"""Auxiliary classifiers of torchvision's googlenet and inception_v3, which are built without them."""


def load_weights(model: nn.Module, path: str, name: str, setting: str = "") -> str:
    """Copy the tensors of the file at `path` into model `name`, in place; return a summary.

    Errors name the file as `setting`, by default by its path.

    The file holds a state dict, possibly under `state_dict`, `model` or `encoder`; prefixes of DDP and `torch.compile`
    are removed. Raise `RecipeError` for an unreadable file, and as `copy_weights` does.
    """
    return copy_weights(model, _strip_prefixes(read_weights(path)), setting or path, name)


def copy_weights(model: nn.Module, given: Mapping[str, Tensor], path: str, name: str, trained_name: str = "") -> str:
    """Copy the tensors `given`, read from `path`, into model `name`, in place; return a summary.

    `trained_name` is the model that they are of, if it is known. A classifier with another number of classes keeps its
    initial weights, made smaller if they are large. The first filters are fitted to the input channels. Raise
    `RecipeError` for any other difference; `model` is then unchanged.
    """
    wanted = {key: tensor for key, tensor in model.state_dict().items() if not key.endswith(_BATCH_COUNTER)}
    given = {key: tensor for key, tensor in given.items() if not key.endswith(_BATCH_COUNTER)}
    given = {key: tensor for key, tensor in given.items() if key in wanted or not key.startswith(_AUX_PREFIXES)}
    hint = f"(is it for another model than {name}?)"
    if trained_name not in ("", name):
        hint = f"(it is of a {trained_name}, not of a {name}: set model.name={trained_name})"
    before, given = given, _adapt_to_model(model, given, wanted)
    _refuse_resampled_filters(model, before, given, path, hint)
    missing = _find_missing_classifier(model, given, wanted)
    for key in wanted:
        if key not in given and key not in missing:
            raise RecipeError(f"model.weights: {path}: has no {key!r} {hint}")
    for key in given:
        if key not in wanted:
            raise RecipeError(f"model.weights: {path}: has {key!r}, which the model lacks {hint}")
    summed = _fit_input_channels(model, given)
    reinitialized = missing or _find_reinitialized(model, given)
    _check_trained(model, reinitialized)
    for key, tensor in wanted.items():
        if key not in reinitialized and given[key].shape != tensor.shape:
            sizes = f"{_format_shape(given[key].shape)} instead of {_format_shape(tensor.shape)}"
            raise RecipeError(f"model.weights: {path}: {key!r} is {sizes} {hint}")
    with torch.no_grad():  # copy_ converts dtype and device
        for key in wanted.keys() - reinitialized.keys():
            wanted[key].copy_(given[key])
        for key in reinitialized:
            _shrink_initial_weight(wanted[key])
    sentence = f"loaded {len(wanted) - len(reinitialized)} of {len(wanted)} tensors"
    resampled = _list_resampled(before, given, skipped={*summed, *reinitialized})
    return "; ".join(
        [sentence, *summed.values(), *sorted(set(reinitialized.values())), *_describe_resampled(resampled)]
    )


def find_weights_file(path: str) -> Path:
    """Return the path of a weights file, without opening it.

    Raise `RecipeError` if there is none or its suffix is not supported. For a URL or the name of weights, the error has
    the setting or command that gets them.
    """
    file = Path(os.path.expanduser(path))  # noqa: PTH111 - the method raises without a home directory
    if not file.is_file():
        raise RecipeError(f"model.weights: {path}: {_explain_missing_file(path)}")
    if not file.name.endswith(tuple(_READERS)):
        kinds = ", ".join(_READERS)
        raise RecipeError(f"model.weights: {path}: is not a file of weights by its name (rename it to one of {kinds})")
    return file


def _explain_missing_file(path: str) -> str:
    if "://" in path:
        url = shlex.quote(path)
        return f"is a URL, and nothing is downloaded (run `curl -LO {url}`, then set model.weights to the file)"
    if path.isidentifier() and path.isupper():
        return f"no such file (set model.weights=torchvision:{path} for torchvision's weights)"
    return "no such file (give a .safetensors, a .pth or a run directory, or default for the library's own weights)"


def read_weights(path: str) -> Mapping[str, Tensor]:
    """Return the tensors of a file by name. Raise `RecipeError` if it cannot be read as weights."""
    file = find_weights_file(path)
    read = next(read for suffix, read in _READERS.items() if file.name.endswith(suffix))
    try:
        content = read(file)
    except Exception as error:
        # A broken or hostile file can make the readers raise anything.
        raise RecipeError(
            f"model.weights: {path}: cannot be read as weights, {type(error).__name__} "
            "(give a .safetensors, or a .pth of nothing but a state dict)"
        ) from None
    return _extract_state_dict(content, path)


def _load_torch(file: Path) -> object:
    # `weights_only` rebuilds tensors only, so that a hostile pickle cannot run code.
    return torch.load(file, weights_only=True, map_location="cpu")


_READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": load_file,
    ".pth": _load_torch,
    ".pt": _load_torch,
    ".pth.tar": _load_torch,
    ".bin": _load_torch,
}


def _extract_state_dict(content: object, path: str) -> Mapping[str, Tensor]:
    if isinstance(content, Mapping):
        nested = next((content[key] for key in _NESTED_KEYS if isinstance(content.get(key), Mapping)), content)
        if nested and all(isinstance(tensor, Tensor) for tensor in nested.values()):
            return nested
    raise RecipeError(f"model.weights: {path}: holds no state dict (give a file of tensors by name)")


def _strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stripped = dict(tensors)
    while prefix := next(
        (each for each in _PREFIXES if stripped and all(key.startswith(each) for key in stripped)), None
    ):
        stripped = {key.removeprefix(prefix): tensor for key, tensor in stripped.items()}
    return stripped


def _fit_input_channels(model: nn.Module, given: dict[str, Tensor]) -> dict[str, str]:
    """Fit the first convolution in `given`, in place, to the input channels of the model.

    Filters are summed for one channel, and those of RGB repeated for other numbers. Return the name of the convolution
    and a sentence about it, if it is changed.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d):
            continue
        filters = given.get(f"{name}.weight", module.weight)
        num = module.in_channels
        if filters.ndim != 4 or filters.shape[1] == num or (num != 1 and filters.shape[1] != 3):
            break
        if num == 1:
            # A gray image equals a color image with equal channels, so summing gives the same output.
            given[f"{name}.weight"] = filters.sum(dim=1, keepdim=True)
            return {f"{name}.weight": f"the first convolution is summed over {filters.shape[1]} channels"}
        from timm.models import adapt_input_conv

        given[f"{name}.weight"] = adapt_input_conv(num, filters)
        return {f"{name}.weight": f"the filters of RGB in the first convolution are repeated for {num} channels"}
    return {}


def _adapt_to_model(model: nn.Module, given: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that fit `model`, by its library's own rules: other names, and position embeddings resampled.

    Tensors that fit already, or for which the library has no rule, are returned as they are.
    """
    differing = [key for key, tensor in wanted.items() if key not in given or given[key].shape != tensor.shape]
    last = next(reversed(layer_weights(model)), "")
    if all(key in (f"{last}.weight", f"{last}.bias") for key in differing) and given.keys() <= wanted.keys():
        return given
    module = sys.modules[type(model).__module__]
    if module.__name__ == "torchvision.models.vision_transformer":
        return _resample_torchvision(model, given)
    adapt = getattr(module, "checkpoint_filter_fn", None) if module.__name__.startswith("timm.") else None
    if adapt is None:
        return given
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of timm's interpolation
            adapted = adapt(dict(given), model)
    except Exception:  # it was made for timm's own files, and may fail on any other, which the caller explains
        return given
    return {key: tensor for key, tensor in adapted.items() if not key.endswith(_BATCH_COUNTER)}


def _refuse_resampled_filters(
    model: nn.Module, before: Mapping[str, Tensor], given: Mapping[str, Tensor], path: str, hint: str
) -> None:
    """Raise `RecipeError` if a convolution in `given` was resampled from a kernel of another size in `before`.

    timm's rules resample patch embeddings too, which a model of another patch size would take without a word.
    """
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if not isinstance(module, nn.Conv2d) or key not in given:
            continue
        shape = given[key].shape
        source = _find_source(before, key)
        candidates = [each for each in before.values() if each.shape[:2] == shape[:2]] if source is None else [source]
        others = [each for each in candidates if each.ndim == 4 and each.shape[2:] != shape[2:]]
        if others and len(others) == len(candidates):
            sizes = f"{_format_shape(others[0].shape[2:])} pixels instead of {_format_shape(shape[2:])}"
            raise RecipeError(f"model.weights: {path}: {key!r} has filters of {sizes} {hint}")


def _find_source(before: Mapping[str, Tensor], key: str) -> Tensor | None:
    """Return the tensor of a file that became `key` of the model, if its name ends in the same way."""
    names = [key] if key in before else [name for name in before if name.endswith(f".{key}")]
    return before[names[0]] if len(names) == 1 else None


def _list_resampled(before: Mapping[str, Tensor], given: Mapping[str, Tensor], skipped: set[str]) -> list[str]:
    """Return the names of tensors whose number of elements the rules of the library changed."""
    if before is given:
        return []
    sources = {key: _find_source(before, key) for key in given if key not in skipped}
    return [key for key, source in sources.items() if source is not None and source.numel() != given[key].numel()]


def _describe_resampled(keys: Sequence[str]) -> list[str]:
    if not keys:
        return []
    more = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
    return [f"resampled to the image size: {', '.join(keys[:_MAX_NAMED])}{more}"]


def _resample_torchvision(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    assert isinstance(model, VisionTransformer)
    if "encoder.pos_embedding" not in given:
        return given
    try:
        resampled = interpolate_embeddings(model.image_size, model.patch_size, OrderedDict(given))
    except ValueError:  # of another number of channels, which the caller explains
        return given
    return dict(resampled)


def _find_missing_classifier(
    model: nn.Module, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return the tensors of the classifier if they are all that the file lacks, as those of self-supervised models."""
    last = next(reversed(layer_weights(model)), "")
    missing = [key for key in wanted if key not in given]
    is_classifier = bool(missing) and {f"{last}.weight"} <= set(missing) <= {f"{last}.weight", f"{last}.bias"}
    return dict.fromkeys(missing, "the file has no classifier, which starts fresh") if is_classifier else {}


def _find_reinitialized(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensors of a classifier with other classes, which keep their initial weights, each with the reason."""
    # The classifier is the last linear or convolutional layer, and others whose number of outputs changes in the same
    # way, such as the second head of a distilled transformer.
    layers = {name: weight for name, weight in layer_weights(model).items() if f"{name}.weight" in given}
    outputs = {
        name: (given[f"{name}.weight"].shape[0], weight.shape[0])
        for name, weight in layers.items()
        if given[f"{name}.weight"].shape[1:] == weight.shape[1:]
    }
    old, new = outputs.get(next(reversed(layers), ""), (0, 0))
    if old == new:
        return {}
    heads = [name for name, change in outputs.items() if change == (old, new)]
    reason = f"the classifier starts fresh ({old} -> {new} classes)"
    return {key: reason for name in heads for key in (f"{name}.weight", f"{name}.bias") if key in given}


def _shrink_initial_weight(weight: Tensor) -> None:
    """Scale the weight of a fresh classifier, in place, to the bound of `nn.Linear` if it is far larger.

    EfficientNets draw it from [-1, 1] / sqrt(classes), which suits the 1,000 classes of ImageNet. With five classes and
    1,280 features it is 16 times the bound, and the first gradients destroy the pretrained layers.
    """
    if weight.ndim < 2:  # a bias
        return
    bound = weight[0].numel() ** -0.5
    if weight.square().mean().sqrt() > 2 * bound:
        weight.mul_(bound / weight.abs().max())  # the maximum has the same bits with any number of threads


def _check_trained(model: nn.Module, reinitialized: Mapping[str, str]) -> None:
    """Refuse to freeze a tensor that keeps its random initial weights."""
    for name, parameter in model.named_parameters():
        if name in reinitialized and not parameter.requires_grad:
            raise RecipeError(
                f"model.freeze: {reinitialized[name]}, but {name!r} is frozen (leave it out of model.freeze)"
            )


def _format_shape(shape: torch.Size) -> str:
    return "x".join(str(size) for size in shape) or "a single number"
