"""Low-rank adapters beside the linear layers of a model (`model.lora`), through peft, and merging them into weights."""

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.random import adapter_seed
from paceline.core.units import count
from paceline.models.freeze import eval_mode, set_trained
from paceline.models.structure import find_classifier
from paceline.recipe.plan import Plan
from paceline.recipe.schema.base import Off
from paceline.recipe.schema.model import Lora, Model

_ADAPTER: Final = "default"
_BASE: Final = ".base_layer."
"""peft keeps the weights of an adapted layer below this name."""


def add_adapters(section: Model, model: nn.Module, plan: Plan, seed: int) -> None:
    """Add adapters to `model`, in place, and freeze all parameters but theirs and the classifier's.

    As in the paper, A is random (Kaiming uniform), from `seed` alone, and B is zero, so logits do not change. Raise
    `RecipeError` without peft, and for a model without suitable layers.
    """
    lora, classifier = _get_section(section), _find_classifier(section, model, plan.num_classes)
    targets = _find_targets(section, model, plan, classifier)
    from peft import LoraConfig, inject_adapter_in_model

    names = "|".join(map(re.escape, targets))  # as one expression, since peft takes a name in a list for an ending too
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=f"(?:{names})", bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    generator = torch.Generator().manual_seed(adapter_seed(seed))
    for name, base in targets.items():
        layer = model.get_submodule(name)
        layer.to(base.weight.device, base.weight.dtype)
        first = layer.get_parameter(f"lora_A.{_ADAPTER}.weight")
        initial = nn.init.kaiming_uniform_(torch.empty(first.shape), a=math.sqrt(5), generator=generator)
        with torch.no_grad():
            first.copy_(initial)
    set_trained(model, classifier, is_trained=True)


def describe_adapters(section: Model, model: nn.Module, plan: Plan) -> str:
    """Return a note on the adapters that `model`, which may be on the meta device, gets."""
    lora, classifier = _get_section(section), _find_classifier(section, model, plan.num_classes)
    targets = _find_targets(section, model, plan, classifier)
    added = sum(lora.rank * (each.in_features + each.out_features) for each in targets.values())
    own = sum(parameter.numel() for name, parameter in model.named_parameters() if name in classifier)
    total = sum(parameter.numel() for parameter in model.parameters())
    more = "; the others keep their random initial values (set model.weights)" if section.weights == "off" else ""
    return (
        f"model.lora: {count(len(targets), 'layer')} of {section.name} get adapters of rank {lora.rank}: "
        f"{added + own:,} parameters of {total + added:,} are trained{more}"
    )


def merge_adapters(section: Lora | Off, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the plain model: W + alpha / rank * B A in place of W, A and B (arXiv 2106.09685, eq. 3).

    `tensors` are those of a model with adapters; without `section` they are returned as they are.
    """
    if section == "off":
        return dict(tensors)
    merged = {}
    for name, tensor in tensors.items():
        layer, base, leaf = name.partition(_BASE)
        if base and leaf == "weight":
            second, first = (tensors[f"{layer}.lora_{each}.{_ADAPTER}.weight"].float() for each in "BA")
            merged[f"{layer}.weight"] = (tensor.float() + section.alpha / section.rank * (second @ first)).to(tensor)
        elif f".lora_A.{_ADAPTER}." not in name and f".lora_B.{_ADAPTER}." not in name:
            merged[f"{layer}.{leaf}" if base else name] = tensor
    return merged


def _get_section(section: Model) -> Lora:
    assert section.lora != "off", "the model has adapters"
    if find_spec("peft") is None:
        raise RecipeError("model.lora: needs peft (pip install 'paceline[lora]', or set model.lora=off)")
    return section.lora


def _find_classifier(section: Model, model: nn.Module, num_classes: int) -> frozenset[str]:
    """Return the names of the classifier's parameters."""
    layers = find_classifier(model, num_classes)
    if not layers:
        raise RecipeError(
            f"model.lora: the classifier of {section.name}, which is trained too, is not known: its last linear or "
            f"convolutional layer does not have {num_classes} outputs (set model.lora=off)"
        )
    return frozenset(name for name, _ in model.named_parameters() if name.rpartition(".")[0] in layers)


def _find_targets(section: Model, model: nn.Module, plan: Plan, classifier: frozenset[str]) -> dict[str, nn.Linear]:
    """Return the layers of `section.lora.targets` by name."""
    called = {name: layer for name, layer in _find_called(model, plan).items() if f"{name}.weight" not in classifier}
    if not called:
        raise RecipeError(f"model.lora: {section.name} has no linear layer but the classifier (set model.lora=off)")
    patterns = _get_section(section).targets
    if patterns == "auto":
        return called
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in called):
            raise RecipeError(_explain_pattern(section, model, pattern, list(called)))
    return {name: layer for name, layer in called.items() if any(fnmatchcase(name, each) for each in patterns)}


def _explain_pattern(section: Model, model: nn.Module, pattern: str, names: list[str]) -> str:
    uncalled = next((name for name, _ in model.named_modules() if fnmatchcase(name, pattern)), "")
    if uncalled:
        why = f"matches {uncalled!r}, which is no linear layer that the model calls"
    else:
        why = f"matches no layer of {section.name}"
    return f"model.lora.targets: {pattern!r} {why}{suggest_similar(pattern, names) or f' (one is {names[0]!r})'}"


def _find_called(model: nn.Module, plan: Plan) -> dict[str, nn.Linear]:
    """Return the linear layers that a forward pass calls, by name."""
    # Some are not called, but only lend their weight to a function, such as the projections of torch's
    # MultiheadAttention and torchvision's Swin: an adapter beside them would never be computed.
    called: set[nn.Module] = set()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    hooks = [module.register_forward_pre_hook(lambda layer, _: called.add(layer)) for module in linear.values()]
    like = next(model.parameters())
    size = plan.image_size
    images = torch.zeros(1, plan.channels, size, size, dtype=like.dtype, device=like.device)
    try:
        with eval_mode(model):
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: module for name, module in linear.items() if module in called}
