"""Which parts of an image speak for a class: Grad-CAM for grids of local features, occlusion for mixed tokens."""

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
_NUM_COVERS: Final = 7
"""Positions of the cover of `occlusion_maps` along a side."""
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
            logits = model(images.clone().requires_grad_())
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

    Raise `RecipeError` for a layer without a grid, and for a model that has none.
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
    name, grid = layer
    kept: list[Tensor] = []

    def cut(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        # Backward ends here. The model gets a copy, which it may change in place.
        kept[:] = [output.detach().requires_grad_()]
        return kept[0].clone()

    hook = model.get_submodule(name).register_forward_hook(cut)
    with _gradients(model):
        try:
            # An image per class, so that gradients do not mix. Tensors of inference mode take no part in gradients.
            logits = model(images.repeat_interleave(classes.shape[1], dim=0)).float()
            (features,) = kept
            score = logits.gather(1, classes.reshape(-1, 1).clone()).sum()
            # Under the hook, as checkpointed activations are computed again.
            (gradient,) = torch.autograd.grad(score, features)
        finally:
            hook.remove()
    weights = grid.unfold(gradient).mean(dim=(2, 3), keepdim=True)
    maps = (weights * grid.unfold(features.detach())).sum(dim=1).relu()
    return maps.reshape(*classes.shape, *maps.shape[1:])


def occlusion_maps(model: nn.Module, images: Tensor, classes: Tensor, *, is_multi_label: bool) -> Tensor:
    """Return float32 [N, M, 7, 7]: by how much the score of M `classes` falls when a part of an image is covered.

    The square cover has a quarter of the image's side and the mean color; it moves by half of its side. The score is
    the log-odds of a class, which for a model with one label per image compare it with all others. Values are at least
    0. The model is in evaluation mode meanwhile; nothing of it changes. Occlusion sensitivity, Zeiler and Fergus 2014
    (arXiv 1311.2901), section 4.2.
    """
    # For tokens that global attention has mixed. Grad-CAM on a ViT's last block, and rollout weighted by gradients
    # (Chefer et al. 2021, arXiv 2103.15679), missed the part that decides in half of small trained ViTs, and plain
    # attention rollout (Abnar and Zuidema 2020, arXiv 2005.00928) is the same for every class.
    size = images.shape[-1]
    starts = [round(position * size / (_NUM_COVERS + 1)) for position in range(_NUM_COVERS)]
    side = max(1, round(2 * size / (_NUM_COVERS + 1)))
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices=[*devices]), torch.inference_mode(), eval_mode(model):
        whole = _class_scores(model(images), classes, is_multi_label=is_multi_label)
        falls = []
        for top in starts:
            covered = images.repeat(len(starts), 1, 1, 1)
            for left, copy in zip(starts, covered.chunk(len(starts)), strict=True):
                copy[:, :, top : top + side, left : left + side] = 0  # the mean, of normalized images
            scores = _class_scores(model(covered), classes.repeat(len(starts), 1), is_multi_label=is_multi_label)
            falls.append(whole - scores.reshape(len(starts), *whole.shape))
    return torch.stack(falls).permute(2, 3, 0, 1).relu()


def _class_scores(logits: Tensor, classes: Tensor, *, is_multi_label: bool) -> Tensor:
    """Return the log-odds of `classes` [N, M], float32."""
    scores = logits.float().gather(1, classes)
    if is_multi_label:
        return scores
    others = [logits.float().scatter(1, label[:, None], -torch.inf).logsumexp(dim=1) for label in classes.unbind(dim=1)]
    return scores - torch.stack(others, dim=1)


@contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    """Return a context with `model` in evaluation mode and gradients enabled, which keeps torch's random state."""
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices=[*devices]), torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
        yield
