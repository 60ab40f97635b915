"""Mixup and CutMix on pairs of images of the global batch.

Image 2k is mixed with image 2k + 1. Ranks and micro-batches hold even numbers of images, so the pairs are the same for
any world size. The first image's draws give one mixing weight per pair: each image keeps that weight and takes the rest
from its neighbor.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.units import Duration
from paceline.data.augment.erasing import box_mask
from paceline.recipe.schema import augment as sections
from paceline.recipe.schema.base import Section

_METHOD, _WEIGHT, _ROW, _COLUMN = range(4)


# From prepared draws, float64 [P, 4], and an image's height and width to the weights in [0, 1] that each pixel and each
# label keeps, float64 ([P, 1, H or 1, W or 1], [P]).
ComputeWeights = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


class MixMethod(NamedTuple):
    """A way to mix a pair, with probability `p` before step `stop`; its weights are drawn from Beta(alpha, alpha)."""

    alpha: float
    compute_weights: ComputeWeights
    p: float = 1.0
    stop: int = sys.maxsize


def compute_mixup_weights(draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Blend whole images (Zhang et al. 2018, arXiv 1710.09412)."""
    return draws[:, _WEIGHT, None, None, None], draws[:, _WEIGHT]


def compute_cutmix_weights(draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Paste a box from the neighbor (Yun et al. 2019, arXiv 1905.04899).

    The box is centered on a random pixel, has sides sqrt(1 - weight) of the image's, and is clipped at the edges.
    """
    side = (1 - draws[:, _WEIGHT]).sqrt()
    top, bottom = _clip_interval((draws[:, _ROW] * height).long(), (side * height).long(), height)
    left, right = _clip_interval((draws[:, _COLUMN] * width).long(), (side * width).long(), width)
    outside = ~box_mask(top, left, bottom, right, height, width)
    # The label's weight is the area that remains after clipping, to the pixel.
    area = ((bottom - top) * (right - left)).double()
    return outside.double(), 1 - area / (height * width)


def _clip_interval(center: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor]:
    half = length // 2
    return (center - half).clamp_(min=0), (center + half).clamp_(max=size)


@dataclass(frozen=True)
class PairMixer:
    """Mix images and labels in pairs, each with one of `methods`, drawn uniformly.

    Draws: method, weight, row and column of the box's center.
    """

    methods: tuple[MixMethod, ...]
    num_classes: int
    num_draws: int = 4

    def prepare(self, draws: NDArray[np.float64], step: int) -> NDArray[np.float64]:
        """Return float64 draws [N, 4] with N even, with each pair's weight drawn from its Beta distribution.

        A pair that is not mixed gets weight 1.
        """
        # The Beta quantile function is scipy's (installed with scikit-learn), in float64 on the host: torch has none.
        from scipy.special import betaincinv  # type: ignore[import-untyped]

        prepared = draws.copy()
        first = prepared[0::2]
        position = first[:, _METHOD] * len(self.methods)
        chosen = position.astype(np.int64)
        alphas = np.array([method.alpha for method in self.methods])[chosen]
        first[:, _WEIGHT] = betaincinv(alphas, alphas, first[:, _WEIGHT])
        # What is left of the draw after the choice of a method is uniform in [0, 1) again.
        p = np.array([method.p if step < method.stop else 0.0 for method in self.methods])
        first[position - chosen >= p[chosen], _WEIGHT] = 1.0
        return prepared

    def __call__(self, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images [N, C, H, W] of the same dtype, targets [N, num_classes]) for `labels`.

        `labels` are classes int64 [N] or targets float [N, num_classes]. Targets are float32, or float64 if the images
        are; those of classes sum to 1.
        """
        assert len(images) % 2 == 0, f"{len(images)} images: the plan admits only even micro-batches"
        pixels, shares = self._compute_weights(draws[0::2], *images.shape[-2:])
        classes = torch.arange(self.num_classes, device=labels.device)
        targets = labels if labels.is_floating_point() else labels[:, None] == classes
        targets = targets.to(torch.promote_types(images.dtype, torch.float32))
        return _mix_pairs(images, pixels), _mix_pairs(targets, shares[:, None])

    def _compute_weights(self, draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        pixels, shares = self.methods[0].compute_weights(draws, height, width)
        chosen = (draws[:, _METHOD] * len(self.methods)).long()
        # Compute every method for all pairs: selecting pairs would wait for the device.
        for number, method in enumerate(self.methods[1:], start=1):
            is_chosen = chosen == number
            other_pixels, other_shares = method.compute_weights(draws, height, width)
            pixels = torch.where(is_chosen[:, None, None, None], other_pixels, pixels)
            shares = torch.where(is_chosen, other_shares, shares)
        return pixels, shares


def _mix_pairs(values: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(values.dtype)  # of each pair: `values` has two rows per weight
    first, second = values[0::2], values[1::2]
    mixed = torch.empty_like(values)  # keeps the memory format
    mixed[0::2] = weights * first + (1 - weights) * second
    mixed[1::2] = weights * second + (1 - weights) * first
    return mixed


def build_mixer(
    chosen_sections: tuple[Section, ...], num_classes: int, to_steps: Callable[[Duration], int] | None = None
) -> PairMixer | None:
    """Build the mixer at the end of `data.augment`: mixup, cutmix or both; None without.

    Only `PairMixer.prepare` needs `to_steps`, which converts `until` to steps.
    """
    methods = []
    for section in chosen_sections:
        if isinstance(section, sections.MixUp | sections.CutMix):
            compute = compute_mixup_weights if isinstance(section, sections.MixUp) else compute_cutmix_weights
            stop = sys.maxsize if section.until == "off" or to_steps is None else to_steps(section.until)
            methods.append(MixMethod(section.alpha, compute, section.p, stop))
    return PairMixer(tuple(methods), num_classes) if methods else None
