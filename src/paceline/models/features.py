"""Capture the features of a model: the input of its classifier, and the outputs of the stages before it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.models.structure import find_classifier

_MAX_STAGES: Final = 3
_MAX_DEPTH: Final = 2


def find_feature_layer(model: nn.Module, num_classes: int, name: str) -> str:
    """Return the name of the layer whose input are the features of model `name`.

    Raise `RecipeError` if the classifier cannot be identified.
    """
    classifier = find_classifier(model, num_classes)
    if not classifier:
        raise RecipeError(
            f"model.name: {name}: its classifier is not known, as its last linear or convolutional layer does not have "
            f"{num_classes} outputs (name a model that ends in its classifier)"
        )
    return classifier[0]  # a distilled transformer has a second head, for another token


@contextlib.contextmanager
def capture_features(model: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Return a context with a list that gets the input of `layer`, float32 [N, D], on each forward pass.

    Positions of an image or tokens of a sequence are averaged.
    """
    captured: list[Tensor] = []

    def capture(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured.append(_pool(inputs[0], is_image=isinstance(module, nn.Conv2d)))

    handle = model.get_submodule(layer).register_forward_pre_hook(capture)
    try:
        yield captured
    finally:
        handle.remove()


def find_stages(model: nn.Module, layer: str, images: Tensor) -> list[str]:
    """Return the last modules before the classifier `layer` in a forward pass of `images`, at most three, in order.

    They have parts of their own and are at most two levels deep, such as `layer3.1` or `blocks.5`. Their outputs differ
    from one another and from the input of `layer`.
    """
    names = [
        name
        for name, module in model.named_modules()
        if name and name.count(".") < _MAX_DEPTH and any(module.children())
    ]
    with capture_features(model, layer) as captured, capture_outputs(model, names) as outputs:
        model(images)
    seen, stages = {captured[-1].numpy(force=True).tobytes()}, []
    for name, each in outputs.items():
        if (content := each[-1].numpy(force=True).tobytes()) not in seen:
            seen.add(content)
            stages.append(name)
    return stages[-_MAX_STAGES:]


@contextlib.contextmanager
def capture_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Return a context with a list per module, in the order of their first outputs, of its output in each forward pass.

    Outputs are pooled to float32 [N, D] as in `capture_features`; those of other than 3 or 4 dimensions are left out.
    """
    outputs: dict[str, list[Tensor]] = {}
    with contextlib.ExitStack() as handles:
        for name in names:

            def capture(_: nn.Module, __: tuple[Tensor, ...], output: object, name: str = name) -> None:
                if isinstance(output, Tensor) and output.ndim in (3, 4):
                    outputs.setdefault(name, []).append(_pool(output, is_image=output.ndim == 4))

            handles.callback(model.get_submodule(name).register_forward_hook(capture).remove)
        yield outputs


def _pool(inputs: Tensor, *, is_image: bool) -> Tensor:
    inputs = inputs.detach().float()
    if inputs.ndim <= 2:
        return inputs
    # [N, C, H, W] of a convolution, or [N, T, C] of a linear layer
    return inputs.flatten(2).mean(dim=2) if is_image else inputs.flatten(1, -2).mean(dim=1)


def feature_tensors(model: nn.Module, layer: str) -> dict[str, Tensor]:
    """Return the tensors of `model` by name that its features depend on: all but those of the classifier."""
    return {name: each for name, each in model.state_dict().items() if name.rpartition(".")[0] != layer}


def to_thumbnails(images: Tensor, size: int) -> Tensor:
    """Return gray thumbnails, uint8 [N, size, size], of images [N, C, H, W]; the range of each becomes 0 to 255."""
    gray = images[:, :3].float().mean(dim=1, keepdim=True)
    is_larger = min(gray.shape[-2:]) >= size
    small = nn.functional.interpolate(gray, (size, size), mode="area" if is_larger else "bilinear").flatten(1)
    low, high = small.amin(dim=1, keepdim=True), small.amax(dim=1, keepdim=True)
    scaled = (small - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny) * 255
    return scaled.round().to(torch.uint8).view(-1, size, size)
