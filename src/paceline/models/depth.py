"""Number the layers of a network from its input to its classifier, for learning rates that fall towards the input.

A network of timm's says itself which parameters are one layer (its `group_matcher`), and that is taken over, so that
scales are those of timm's `--layer-decay`. Any other is numbered by one rule:

- A **block** is an outermost module that has modules in it and whose class the network has more than one of: a residual
  block, a transformer's. A list of modules is no block: `Sequential`, `ModuleList` and `ModuleDict` themselves, and
  what derives from one and holds nothing but modules of one class that have modules in them, as a stage may be.
- A **layer** is a block, or outside of blocks a module that holds a weight of two dimensions or more. Norms and biases
  outside of blocks belong to the layer before them.
- Where there are blocks, all before the first is one layer, the stem with tokens and embeddings of positions, and all
  after the last is one, the classifier with the norm before it, as in BEiT.

The order is that in which modules are defined, as in `named_parameters`.

Clark et al. 2020, ELECTRA (arXiv 2003.10555), section A.2; Bao et al. 2021, BEiT (arXiv 2106.08254), section 3.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@runtime_checkable
class _OfTimm(Protocol):
    """A network that says how its parameters are grouped into layers."""

    group_matcher: Callable[..., Any]


def number_layers(model: nn.Module) -> dict[str, int]:
    """Return the layer of every parameter of `model` by its name, from 0 at the input; the highest is the classifier's.

    To be asked before `model` is sharded, which gives its modules other classes.
    """
    if isinstance(model, _OfTimm):
        from timm.models import group_parameters

        found: Mapping[str, int] = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
        return dict(found)
    return _joined(list(_pieces(model)))


@dataclass(frozen=True)
class _Piece:
    """Parameters that are in one layer, by their `names`: those of a block, or of a module outside of blocks.

    `is_wide` where one of them has two dimensions or more.
    """

    names: tuple[str, ...]
    is_block: bool
    is_wide: bool


def _pieces(model: nn.Module) -> Iterator[_Piece]:
    """Yield the parameters of `model`, each once, in the order of definition."""
    classes = Counter(type(module) for module in model.modules() if _has_modules(module))
    seen: set[int] = set()

    def new(module: nn.Module, path: str, *, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in module.named_parameters(path, recurse=recurse):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def walk(module: nn.Module, path: str) -> Iterator[_Piece]:
        is_block = module is not model and _has_modules(module) and classes[type(module)] > 1 and not _is_list(module)
        own = list(new(module, path, recurse=is_block))
        if own:
            yield _Piece(tuple(name for name, _ in own), is_block, any(each.ndim > 1 for _, each in own))
        for name, child in () if is_block else module.named_children():
            yield from walk(child, f"{path}.{name}".lstrip("."))

    return walk(model, "")


def _has_modules(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_list(module: nn.Module) -> bool:
    if not isinstance(module, _LISTS):
        return False
    held = [child for child in module.children() if next(child.parameters(), None) is not None]
    return type(module) in _LISTS or (len({type(child) for child in held}) == 1 and all(map(_has_modules, held)))


def _joined(pieces: list[_Piece]) -> dict[str, int]:
    """Return the layers that pieces come to."""
    blocks = [place for place, piece in enumerate(pieces) if piece.is_block]
    first, last = (blocks[0], blocks[-1]) if blocks else (0, len(pieces))
    numbers: dict[str, int] = {}
    layer = 0
    for place, piece in enumerate(pieces):
        begins = piece.is_wide and first < place <= last
        if piece.is_block or begins or place == last + 1:
            layer += bool(numbers)
        numbers.update(dict.fromkeys(piece.names, layer))
    return numbers
