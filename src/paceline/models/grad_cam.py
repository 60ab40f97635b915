"""Grad-CAM: which parts of an image speak for a class, for any model with a grid of features."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError, suggest_similar
from paceline.models.freeze import eval_mode

_MAX_PREFIX_TOKENS: Final = 8
"""Class, distillation and register tokens ahead of those of the patches."""
_MIN_SIDE: Final = 4
"""Smallest side of the maps that are chosen if the model has any; 2 x 2 parts of an image show little."""
_NOT_FEATURES: Final = (nn.Linear, nn.Dropout, nn.Softmax)
"""Modules within an attention or MLP block, whose outputs look like a grid: projections and attention weights."""


@dataclass(frozen=True)
class FeatureGrid:
    """How a layer's output holds a grid of `side` x `side` features: `channels_first` [N, C, H, W], `channels_last`
    [N, H, W, C], or `tokens` [N, T, C], of which the first `num_prefix` are not of the grid.
    """

    layout: str
    side: int
    num_prefix: int = 0

    @classmethod
    def of(cls, shape: Sequence[int]) -> "FeatureGrid | None":
        """Return the grid in an output of a square image; None if there is none of at least 2 x 2 features."""
        match tuple(shape):
            case (_, _, height, width) if height == width > 1:
                return cls("channels_first", height)
            case (_, height, width, _) if height == width > 1:
                return cls("channels_last", height)
            case (_, num_tokens, _):
                for num_prefix in range(min(_MAX_PREFIX_TOKENS, num_tokens - 4) + 1):
                    side = math.isqrt(num_tokens - num_prefix)
                    if side**2 == num_tokens - num_prefix:
                        return cls("tokens", side, num_prefix)
        return None

    def unfold(self, features: Tensor) -> Tensor:
        """Return float32 [N, C, side, side]."""
        match self.layout:
            case "channels_last":
                features = features.movedim(-1, 1)
            case "tokens":
                patches = features[:, self.num_prefix :].transpose(1, 2)
                features = patches.reshape(*patches.shape[:2], self.side, self.side)
        return features.float()


@dataclass
class _Recorder:
    """Outputs of a forward pass that hold a grid, by module name in the order of execution, for gradients."""

    outputs: dict[str, Tensor] = field(default_factory=dict)

    def record(self, name: str, module: nn.Module, output: Any, num_images: int) -> None:
        is_grid = isinstance(output, Tensor) and output.is_floating_point() and len(output) == num_images
        if is_grid and output.requires_grad and FeatureGrid.of(output.shape):
            self.outputs.pop(name, None)  # a module that is called again counts at its last call
            self.outputs[name] = output


def grid_layers(model: nn.Module, images: Tensor) -> dict[str, FeatureGrid]:
    """Return the layers whose grid of features the logits of normalized `images` depend on, in order of execution.

    The weights need no gradients.
    """
    recorder = _Recorder()
    hooks = [
        module.register_forward_hook(
            lambda module, _, output, name=name: recorder.record(name, module, output, len(images))
        )
        for name, module in model.named_modules()
        if name and not isinstance(module, _NOT_FEATURES)
    ]
    with _gradients(model):
        try:
            logits = model(images.detach().requires_grad_())
        finally:
            for hook in hooks:
                hook.remove()
        outputs = recorder.outputs
        gradients = torch.autograd.grad(logits.float().sum(), [*outputs.values()], allow_unused=True) if outputs else ()
    layers = {}
    for (name, output), gradient in zip(outputs.items(), gradients, strict=True):
        grid = FeatureGrid.of(output.shape)
        # After the last attention, the logits of a transformer may depend on its class token alone.
        if grid and gradient is not None and grid.unfold(gradient).any():
            layers[name] = grid
    return layers


def choose_layer(model: nn.Module, images: Tensor, name: str = "auto") -> tuple[str, FeatureGrid]:
    """Return the name and the grid of the layer to explain with: the last of `grid_layers`, or the layer `name`.

    For a transformer with a class token that is the first norm of its last block. Raise `RecipeError` for a layer
    without a grid, and for a model that has none.
    """
    layers = grid_layers(model, images)
    if name != "auto":
        if name not in layers:
            known = suggest_similar(name, layers) or f" (choose one of {', '.join([*layers][-12:]) or 'none'})"
            raise RecipeError(f"--layer: {name!r} is not a layer with a grid of features{known}")
        return name, layers[name]
    fine = [each for each, grid in layers.items() if grid.side >= _MIN_SIDE] or [*layers]
    if not fine:
        raise RecipeError("--explain: the model has no layer with a grid of features that its logits depend on")
    return fine[-1], layers[fine[-1]]


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor, layer: tuple[str, FeatureGrid]) -> Tensor:
    """Return float32 [N, M, side, side]: how much each part of normalized images speaks for M `classes` each.

    `classes` is int64 [N, M], `layer` from `choose_layer`. Values are at least 0, in the unit of the logits' gradient.
    The model is in evaluation mode meanwhile; nothing of it changes.

    Grad-CAM, Selvaraju et al. 2017 (arXiv 1610.02391), equations 1 and 2. For a model that ends in average pooling and
    a linear layer this is CAM (Zhou et al. 2016, arXiv 1512.04150) without its negative values.
    """
    # Not attention rollout (Abnar and Zuidema 2020, arXiv 2005.00928): it is the same for every class, needs the
    # attention weights, which fused kernels do not return, and has no meaning for windows that are merged (Swin).
    name, grid = layer
    kept: list[Tensor] = []

    def cut(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        # Backward ends here. The model gets a copy, which it may change in place.
        kept[:] = [output.detach().requires_grad_()]
        return kept[0].clone()

    hook = model.get_submodule(name).register_forward_hook(cut)
    with _gradients(model):
        try:
            logits = model(images).float()
        finally:
            hook.remove()
        (features,) = kept
        scores = logits.gather(1, classes).sum(dim=0)  # of distinct images, so that their gradients do not mix
        gradients = [torch.autograd.grad(each, features, retain_graph=True)[0] for each in scores]
    activations = grid.unfold(features.detach())
    weights = torch.stack([grid.unfold(each).mean(dim=(2, 3)) for each in gradients], dim=1)
    return torch.einsum("nmc,nchw->nmhw", weights, activations).relu()


@contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    """Return a context with `model` in evaluation mode and gradients enabled, which keeps torch's random state."""
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices=[*devices]), torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
        yield
