"""Find the classifier of any model, and number its layers for layer-wise learning rates."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def layer_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of linear and convolutional layers by layer name; the classifier's is the last."""
    layers = (each for each in model.named_modules() if isinstance(each[1], nn.Linear | nn.Conv2d))
    return {name: module.weight for name, module in layers}


def find_classifier(model: nn.Module, num_classes: int) -> tuple[str, ...]:
    """Return the names of the layers that compute the `num_classes` logits, or () if unknown."""
    # The last linear or convolutional layer, and siblings with as many outputs and dimensions, such as the second head
    # of a distilled transformer.
    weights = layer_weights(model)
    last = next(reversed(weights), None)
    if last is None or len(weights[last]) != num_classes:
        return ()
    siblings = [
        name
        for name in weights
        if _get_parent_name(name) == _get_parent_name(last) and weights[name].ndim == weights[last].ndim
    ]
    return tuple(name for name in siblings if len(weights[name]) == num_classes)


def _get_parent_name(name: str) -> str:
    # timm's `head_dist.linear` counts as part of `head`.
    return name.rpartition(".")[0].replace("_dist", "")


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with children whose class occurs more than once, such as residual blocks.

    timm's stages of blocks, which are called so, count as containers.
    """
    classes = Counter(type(module) for module in model.modules() if _has_children(module))

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            is_stage = "Stage" in type(child).__name__ or _is_container(child)
            if _has_children(child) and classes[type(child)] > 1 and not is_stage:
                yield child
            else:
                yield from walk(child)

    return list(walk(model))


@runtime_checkable
class _TimmModel(Protocol):
    """A model that defines the layers of its parameters."""

    group_matcher: Callable[..., Any]


def number_layers(model: nn.Module) -> dict[str, int]:
    """Return the layer number of every parameter by name: 0 at the input, the highest at the classifier.

    Call it before sharding, which changes the classes of modules.
    """
    # timm models name their layers themselves, so scales match timm's `--layer-decay`. Rules for all others, in the
    # order of `named_parameters` (Clark et al. 2020, ELECTRA, arXiv 2003.10555, section A.2; Bao et al. 2021, BEiT,
    # arXiv 2106.08254, section 3):
    # - A block is an outermost module with children whose class occurs more than once, such as a residual or
    #   transformer block. Containers are not blocks: `Sequential`, `ModuleList`, `ModuleDict`, and subclasses that hold
    #   only modules of one class with children, such as a stage.
    # - A layer is a block, or outside of blocks a module with a weight of two or more dimensions. Norms and biases
    #   outside of blocks belong to the layer before them.
    # - Everything before the first block is one layer (stem, tokens, position embeddings), and everything after the
    #   last block is one layer (norm and classifier).
    if isinstance(model, _TimmModel):
        from timm.models import group_parameters

        groups: Mapping[str, int] = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
        return dict(groups)
    return _assign_layers(list(_iter_groups(model)))


@dataclass(frozen=True)
class _ParameterGroup:
    """Names of the parameters of a block, or of a module outside of blocks.

    `is_wide`: one of them has two or more dimensions.
    """

    names: tuple[str, ...]
    is_block: bool
    is_wide: bool


def _iter_groups(model: nn.Module) -> Iterator[_ParameterGroup]:
    """Yield the parameters of `model`, each once, in the order of definition."""
    classes = Counter(type(module) for module in model.modules() if _has_children(module))
    seen: set[int] = set()

    def new(module: nn.Module, path: str, *, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in module.named_parameters(path, recurse=recurse):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def walk(module: nn.Module, path: str) -> Iterator[_ParameterGroup]:
        is_block = (
            module is not model and _has_children(module) and classes[type(module)] > 1 and not _is_container(module)
        )
        parameters = list(new(module, path, recurse=is_block))
        if parameters:
            yield _ParameterGroup(
                tuple(name for name, _ in parameters), is_block, any(each.ndim > 1 for _, each in parameters)
            )
        for name, child in () if is_block else module.named_children():
            yield from walk(child, f"{path}.{name}".lstrip("."))

    return walk(model, "")


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_container(module: nn.Module) -> bool:
    if not isinstance(module, _CONTAINERS):
        return False
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    return type(module) in _CONTAINERS or (
        len({type(child) for child in children}) == 1 and all(map(_has_children, children))
    )


def _assign_layers(groups: list[_ParameterGroup]) -> dict[str, int]:
    blocks = [index for index, group in enumerate(groups) if group.is_block]
    first, last = (blocks[0], blocks[-1]) if blocks else (0, len(groups))
    numbers: dict[str, int] = {}
    layer = 0
    for index, group in enumerate(groups):
        starts_layer = group.is_wide and first < index <= last
        if group.is_block or starts_layer or index == last + 1:
            layer += bool(numbers)
        numbers.update(dict.fromkeys(group.names, layer))
    return numbers
